"""Reading the manifests of a local store."""

from tracestore.errors import CorruptStoreError
from tracestore.store.format import paths
from tracestore.store.format.manifest import MAX_MANIFEST_BYTES, Manifest, parse_manifest
from tracestore.store.io.files import LocalFiles


def list_generations(files: LocalFiles) -> list[int]:
    """Return the generations that have a manifest file, latest first."""
    return sorted((int(n) for n in files.list_dir("manifest") if paths.is_generation(n)), reverse=True)


def load_manifest(files: LocalFiles, generation: int) -> Manifest:
    """Return the manifest of a generation.

    Raises
    ------
    CorruptStoreError
        If the file cannot be read or is not a valid manifest.
    FileNotFoundError
        If it does not exist.
    """
    path = paths.manifest(generation)
    try:
        data = files.read_small(path, MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CorruptStoreError(f"{path}: {error.strerror}") from None
    return parse_manifest(data, generation)
