"""Checks of output paths: no file of a store, of another command's run or of the input is ever replaced."""

import os
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from tracestore.errors import UsageError
from tracestore.store.format.paths import TOP_FOLDERS
from tracestore.store.io.files import LocalFiles
from tracestore.store.io.fsio import check_destination

# What a folder may hold: the files that show it, and its other files of a kind that commands write.
TRAIN, BENCHMARK, TRACES = "a run of tracestore train", "a run of tracestore benchmark", "trace files"
_HOLDINGS = {
    TRAIN: (
        ("results.json", "split.json", "folds.json"),
        ("report.html", "predictions.csv", "loss.svg", "auroc.svg", "roc.svg", "precision_recall.svg"),
    ),
    BENCHMARK: (("benchmark.json",), ("report.html", "scores.csv", "scores-*.csv")),
    TRACES: (
        ("*.pkl", "*.pkl.gz", "*.pt", "*.safetensors", "*.npz", "*.h5", "*.parquet", "store.json"),
        ("*scores*.csv", "*scores*.tsv"),
    ),
}


def check_output_file(
    path: Path, suffixes: Sequence[str], *, overwrite: bool = False, inputs: Iterable[object] = ()
) -> None:
    """Check that a command may write a file, so that it fails before its work.

    Parameters
    ----------
    path : Path
        The file.
    suffixes : sequence of str
        Suffixes that the file may have, in lower case.
    overwrite : bool
        Replace an existing file. A page of tracestore is replaced in any case.
    inputs : iterable
        Files and folders that the command reads; other values, such as URLs, are ignored.

    Raises
    ------
    UsageError
        No file can be created there, the suffix is wrong, the file exists and may not be replaced, or it lies in a
        store.
    """
    check_destination(path)
    if path.suffix.lower() not in suffixes:
        expected = suffixes[0] if len(suffixes) == 1 else f"one of {', '.join(suffixes)}"
        raise UsageError(f"{path}: found {path.suffix or 'no suffix'}, expected {expected}")
    require_outside_stores(path)
    _require_replaceable(path, overwrite=overwrite or _is_page(path), inputs=inputs)


def check_output_dir(path: Path) -> None:
    """Raise UsageError if `path` is in a store, is not a folder and cannot be made one, or if it is not writable."""
    parent = path.absolute()
    while not os.path.lexists(parent):
        parent = parent.parent
    if not parent.is_dir():
        raise UsageError(f"cannot write {path}: {parent} is not a folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write {path}: the folder {parent} is not writable")
    require_outside_stores(path)


def check_output_files(
    folder: Path, names: Iterable[str], *, own: str, overwrite: bool, inputs: Iterable[object] = ()
) -> None:
    """Check that a command may write files of these names into its output folder.

    `own` is what the folder holds afterwards, such as TRAIN: its files are not those of another command. With `overwrite`
    the folder holds it now.

    Raises
    ------
    UsageError
        A file exists and may not be replaced; see `check_output_file`.
    """
    for name in names:
        _require_replaceable(folder / name, overwrite=overwrite, inputs=inputs, own=own)


def require_outside_stores(path: Path) -> None:
    """Raise UsageError if a folder or file is a store, or would lie in one."""
    for place in _places(path):
        for folder in (place, *place.parents):
            if _is_store(folder):
                raise UsageError(f"cannot write {path}: {folder} is a store; choose a place outside of it")


def _places(path: Path) -> set[Path]:
    """Return the file at a path, without links in the path of its folder, and the file that it links to."""
    # realpath() accepts loops of links.
    return {Path(os.path.realpath(path.parent), path.name), Path(os.path.realpath(path))}


def _is_store(folder: Path) -> bool:
    if not os.path.isdir(folder):
        return False
    return LocalFiles(folder).has_root() or all(os.path.isdir(folder / name) for name in TOP_FOLDERS)


def _require_replaceable(path: Path, *, overwrite: bool, inputs: Iterable[object], own: str | None = None) -> None:
    if not os.path.lexists(path):
        return
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: not a regular file; choose another name")
    for place in inputs:
        if isinstance(place, Path) and _is_file_of(path, place):
            raise UsageError(f"{path}: a file that this command reads; choose another name")
    for place in _places(path):
        holding = _holding(place)
        if holding not in (None, own):
            raise UsageError(f"{path}: belongs to {holding} in {place.parent}; choose another name")
    if not overwrite and own is not None:
        raise UsageError(f"{path}: a file in a folder without {own}; move it, or choose another --output")
    if not overwrite:
        raise UsageError(f"{path}: exists; choose another name, or replace it with --overwrite")


def _is_file_of(path: Path, place: Path) -> bool:
    """Return whether an input, a file or a folder, contains the file at `path` under any name."""
    try:
        status = path.stat()
    except OSError:  # a link to nothing
        return False
    if not place.is_dir():
        return place.exists() and os.path.samestat(status, place.stat())
    if status.st_nlink == 1:  # Its only name lies in no store and belongs to no run.
        return False
    return any(os.path.samestat(status, inner.lstat()) for inner in place.rglob("*"))


def _holding(path: Path) -> str | None:
    """Return what the folder of a file holds if the file is a part of it."""
    names = os.listdir(path.parent) if os.access(path.parent, os.R_OK) else []
    for holding, (signs, files) in _HOLDINGS.items():
        is_there = any(fnmatchcase(name, sign) for name in names for sign in signs)
        if is_there and any(fnmatchcase(path.name, pattern) for pattern in (*signs, *files)):
            return holding
    return None


def _is_page(path: Path) -> bool:
    """Return whether a file is a page that tracestore wrote."""
    if path.suffix.lower() != ".html" or not path.is_file() or not os.access(path, os.R_OK):
        return False
    from tracestore.pages.document import PAGE_MARK  # where a page may be replaced only

    with path.open("rb") as file:
        return PAGE_MARK.encode() in file.read(1024)
