"""Definition of the store format: schema, paths, manifest and array containers. Opens no files."""
