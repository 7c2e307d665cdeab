"""The files of a store that no generation names."""

from collections.abc import Callable, Iterable

from tracestore.errors import CorruptStoreError
from tracestore.store.format import paths
from tracestore.store.format.manifest import Manifest
from tracestore.store.io.files import StoreFiles
from tracestore.store.read.index import StoreIndex


def find_leftovers(
    found: Iterable[str],
    known: set[str],
    verified: int,
    generations: Iterable[int],
    load: Callable[[int], Manifest],
    files: StoreFiles,
) -> list[str]:
    """Return the files of `found` that neither `known` nor a generation names.

    Parameters
    ----------
    found : iterable of str
        Paths in the store, listed before `generations`: the files of each commit in between are then named.
    known : set of str
        Files of the verified generations.
    verified : int
        The newest verified generation. Each file in a segment of a later one counts as named.
    generations : iterable of int
        The generations that have a manifest now.
    load : callable
        Returns the manifest of a generation; may raise CorruptStoreError and OSError.
    files : StoreFiles
        The files of the store.
    """
    named, segments = known | {"zarr.json", "lock"}, set()
    for number in generations:
        named |= {paths.manifest(number), paths.manifest_copy(number)}
        try:
            manifest = load(number)
            named |= {file.path for file in manifest.small_files()}
            if number > verified:
                segments |= {segment.path for segment in StoreIndex(files, manifest).segments()}
        except (CorruptStoreError, OSError):
            continue
    return sorted(p for p in found if p not in named and "/".join(p.split("/")[:2]) not in segments)
