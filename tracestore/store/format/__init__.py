"""What the bytes of a store mean: schema, paths, manifest, arrays; no file is opened here."""
