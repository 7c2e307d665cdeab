"""Checking every byte of a store against its manifest, and repairing the newest manifest."""

import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tracestore._core.kernels import crc32c
from tracestore._core.mapping import MappedFile
from tracestore.errors import StoreDamagedError, UsageError
from tracestore.store import fsio
from tracestore.store import manifest as mf
from tracestore.store.columns import read_columns
from tracestore.store.commit import root_metadata
from tracestore.store.index import StoreIndex
from tracestore.store.segment import FileEntry

_PIECE_BYTES = 8 << 20


@dataclass
class Report:
    """What verify found. `damaged` maps a path in the store to what is wrong with it."""

    generation: int | None = None
    num_files: int = 0
    num_bytes: int = 0
    damaged: dict[str, str] = field(default_factory=dict)
    leftovers: list[str] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)


def _check_file(store: Path, entry: FileEntry, quick: bool) -> str | None:
    try:
        if quick:
            found = os.stat(store / entry.path).st_size
            return None if found == entry.size else f"{found} bytes where {entry.size} were committed"
        mapped = MappedFile(store / entry.path, entry.size, entry.path)
        view, crc = memoryview(mapped), 0
        for begin in range(0, len(view), _PIECE_BYTES):
            crc = crc32c(view[begin : begin + _PIECE_BYTES], crc)
        return None if crc == entry.crc32c else "checksum mismatch"
    except StoreDamagedError as error:
        return str(error).removeprefix(f"{entry.path}: ")
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:
        return str(error)


def verify_store(
    store: str | os.PathLike[str],
    *,
    quick: bool = False,
    num_threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Reads every file that the newest generation and its predecessor name and compares
    size and (unless quick) crc32c. Never changes anything. UsageError without a store."""
    path = Path(store)
    numbers = mf.generations(path) if path.is_dir() else []
    if not numbers:
        raise UsageError(
            f"{path}: no such store" if not path.exists() else f"{path}: not a store, or nothing committed"
        )
    report = Report()
    entries: dict[str, FileEntry] = {}
    good: list[mf.Manifest] = []
    for number in numbers[:2]:
        name = f"manifest/{number:010d}"
        try:
            manifest = mf.load_manifest(path, number)
        except StoreDamagedError as error:
            report.damaged[name] = str(error).split(": ", 1)[-1]
            continue
        except FileNotFoundError:
            continue
        good.append(manifest)
        report.num_files += 1
        for part in manifest.parts:
            entries[part.path] = FileEntry(part.path, part.size, part.crc32c)
        for columns in manifest.columns:
            entries |= {f.path: f for f in columns.files}
        try:
            entries |= {f.path: f for f in StoreIndex(path, manifest).files()}
        except (StoreDamagedError, FileNotFoundError, ValueError) as error:
            named = next((p.path for p in manifest.parts if p.path in str(error)), f"manifest/{number:010d}")
            report.damaged.setdefault(named, str(error))
    if good:
        report.generation = good[0].generation
        allowed = {root_metadata(m.attributes) for m in good}
        found = (path / "zarr.json").read_bytes() if (path / "zarr.json").is_file() else b""
        if found not in allowed:
            report.damaged["zarr.json"] = "not what the manifest says" if found else "missing"
    names = sorted(entries)
    with ThreadPoolExecutor(num_threads or min(4, os.cpu_count() or 1)) as pool:
        results = pool.map(lambda name: _check_file(path, entries[name], quick), names)
        for done, (name, problem) in enumerate(zip(names, results, strict=True), 1):
            report.num_files += 1
            report.num_bytes += entries[name].size
            if problem is not None:
                report.damaged[name] = problem
            if progress is not None:
                progress(done, len(names))
    known = set(names) | {"zarr.json", "lock"} | {f"manifest/{n:010d}" for n in numbers}
    for folder, _, files in os.walk(path):
        for file in files:
            relative = Path(folder, file).relative_to(path).as_posix()
            if relative not in known:
                report.leftovers.append(relative)
    report.leftovers.sort()
    return report


def repair_store(store: str | os.PathLike[str]) -> Report:
    """Makes a store writable again whose newest manifest is not whole: sets it aside,
    so that its predecessor is the newest. Committed traces of the predecessor and all
    segment files are kept. Damage elsewhere is reported, not repaired."""
    path = Path(store)
    if not path.is_dir() or not mf.generations(path):
        raise UsageError(f"{path}: no such store")
    with fsio.translated_errors(path):
        lock = fsio.WriterLock(path)
    repaired = []
    try:
        numbers = mf.generations(path)
        whole = None
        for number in numbers:
            try:
                whole = mf.load_manifest(path, number)
                StoreIndex(path, whole)
                for ref in whole.columns:
                    read_columns(path, ref)
                break
            except (StoreDamagedError, FileNotFoundError) as error:
                whole = None
                repaired.append(f"manifest/{number:010d} set aside: {str(error).split(': ', 1)[-1]}")
        if whole is None:
            raise StoreDamagedError(f"{path}: no generation reads back whole; nothing was changed")
        for number in numbers:
            if number > whole.generation:
                name = mf.manifest_path(path, number)
                name.rename(name.with_name(f"damaged-{name.name}"))
                fsio.fsync_path(name.parent)
        expected = root_metadata(whole.attributes)
        root = path / "zarr.json"
        if not root.is_file() or root.read_bytes() != expected:
            fsio.replace_file(root, expected)
            repaired.append("zarr.json written anew from the manifest")
        if repaired:
            repaired.append(f"generation {whole.generation} with {whole.num_traces} traces is kept")
    finally:
        lock.release()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = verify_store(path)
    report.repaired = repaired
    return report
