"""Find the input files, and recognize a file that was read before."""

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol

from tracestore._core.mapping import MappedFile
from tracestore.errors import InvalidInputError, UsageError, escape_unprintable
from tracestore.ingest.containers import registry
from tracestore.ingest.containers.grouping import natural_key
from tracestore.ingest.containers.tables import TableReference
from tracestore.ingest.discovery.folders import join_folders, sources_of_folder
from tracestore.ingest.discovery.tables_beside import FoundSource, is_table, tables_of_pickles
from tracestore.ingest.exports.manifest import DATA_FOLDER, ExportedFile, exported_file, read_export
from tracestore.ingest.pickles import torch_file
from tracestore.ingest.roles.keys import label_of_path
from tracestore.store.format.provenance import Provenance
from tracestore.store.io import fsio
from tracestore.store.io.scratch import Scratch
from tracestore.store.vocabulary import score_of_word
from tracestore.store.write.record import TraceRecord

_PICKLES, _COMPRESSED = (".pkl", ".pickle", ".p", ".joblib"), (".gz", ".bz2", ".xz", ".zst")
_PLAIN = (*_PICKLES, *torch_file.SUFFIXES)
PICKLE_SUFFIXES = (*_PLAIN, *(f"{name}{packed}" for name in _PLAIN for packed in _COMPRESSED))
SUFFIXES = (*PICKLE_SUFFIXES, *registry.SUFFIXES)
PROVENANCE_FILE = "provenance.json"
# What to do with containers that are not read, by suffix or name.
_SAVE = "as .npz or .safetensors, one file per trace"
_OTHERS = {
    **dict.fromkeys((".tar", ".tar.gz", ".tgz", ".zip", ".7z"), "extract the archive and convert the folder"),
    **dict.fromkeys((".zarr", ".zgroup", ".zarray", "zarr.json"), f"open it with zarr and save its arrays {_SAVE}"),
    ".mat": f"load it with scipy.io.loadmat and save its arrays {_SAVE}",
    **dict.fromkeys((".db", ".sqlite", ".sqlite3"), f"read it with sqlite3 and save its arrays {_SAVE}"),
    **dict.fromkeys(
        (".lmdb", ".mdb", ".tfrecord", ".msgpack", ".pb", ".bp", ".beton"),
        f"read it with its library and save the arrays {_SAVE}",
    ),
}
_MAX_PROVENANCE_BYTES = 1 << 20
_SAMPLES = 16
_SAMPLE_BYTES = 64 << 10


class Described(Protocol):
    """The files of a source that a layout describes."""

    @property
    def fingerprint(self) -> bytes:
        """A digest of what the source depends on besides its files."""

    @property
    def what(self) -> str | None:
        """The place of the layers in the model, if it is stated."""

    def read(
        self, need_attention: bool | None, scratch: Scratch, on_refused: Callable[[InvalidInputError], None] | None
    ) -> Iterator[TraceRecord]:
        """Yield the records of the source."""


@dataclass(frozen=True)
class SourceFile:
    """A file to read, or several files that are read together.

    Parameters
    ----------
    path : Path
        The file, or the folder of `parts`.
    name : str
        Its path below SRC, with forward slashes.
    parts : tuple of Path
        The files of a source that consists of several.
    table : TableReference, optional
        Rows of a table next to it, which are read with it.
    is_trace : bool
        Whether the parts are those of one trace, whose id they have in their names.
    id_folder : str, optional
        Folder in ids that are made of the path, instead of its own, which names a class of answers.
    label : float, optional
        Label (1: hallucinated) of the class that its folders name, or the file itself next to one of the other class.
    export : ExportedFile, optional
        What an export says about the file, if it is one of its files.
    described : Described, optional
        How a layout reads the source.
    """

    path: Path
    name: str
    parts: tuple[Path, ...] = ()
    table: TableReference | None = None
    is_trace: bool = False
    id_folder: str | None = None
    label: float | None = None
    export: ExportedFile | None = field(default=None, compare=False)
    described: Described | None = field(default=None, compare=False)

    @property
    def folder(self) -> str:
        """The folders below SRC."""
        return self.name.rpartition("/")[0]

    @property
    def stem(self) -> str:
        """The name of the file without suffixes."""
        return self.name.rpartition("/")[2].partition(".")[0]

    def name_record(self, record: TraceRecord, *, has_scores_file: bool) -> None:
        """Set the id of a record of the source, if it begins with its path, to that with `id_folder`, and a missing label."""
        question_id = record.question_id
        if self.id_folder is not None and question_id.startswith(f"{self.folder}/{self.stem}"):
            record.question_id = f"{self.id_folder}/{question_id[len(self.folder) + 1 :]}".removeprefix("/")
        if self.label is not None and not has_scores_file and record.label is None and not record.scores:
            record.label, record.is_label_of_path = self.label, True

    @property
    def files(self) -> tuple[Path, ...]:
        """The files with its arrays."""
        return self.parts or (self.path,)

    def without_values(self) -> "SourceFile":
        """Return the source without the labels, scores and groups of an export."""
        return self if self.export is None else replace(self, export=replace(self.export, has_values=False))

    def absolute(self) -> "SourceFile":
        """Return the source with absolute paths, for a process with another working folder."""
        table = None if self.table is None else self.table.absolute()
        export = None if self.export is None else self.export.absolute()
        parts = tuple(part.absolute() for part in self.parts)
        return replace(self, path=self.path.absolute(), parts=parts, table=table, export=export)

    def file_bytes(self) -> int:
        """Return the size of its files; 0 for one that is missing or not regular."""
        return sum(path.stat().st_size for path in self.files if path.is_file())


def with_classes(sources: list[SourceFile]) -> list[SourceFile]:
    """Return sources with the labels of the classes that their paths name.

    Their ids lack the folder that names a class, unless they would not be unique: what is left of
    `train/correct/q1.npz` is `q1`, or `train/q1` if another source has that name.
    """
    by_name = _labels_of_names([source for source in sources if source.export is None])
    labels = [label_of_path(source.folder) for source in sources]
    sources = [
        source if source.export else replace(source, label=by_name.get(source) if label is None else label)
        for source, label in zip(sources, labels, strict=True)
    ]
    paths = {source: source.folder.split("/") for source in sources if source.export is None}
    classes = {s: k for s, path in paths.items() for k, part in enumerate(path) if label_of_path(part) is not None}
    for after in (True, False) if classes else ():
        folders = {s: "/".join([*(() if after else paths[s][:k]), *paths[s][k + 1 :]]) for s, k in classes.items()}
        names = {(folders.get(source, source.folder), source.stem) for source in sources}
        if len(names) == len(sources):
            return [replace(source, id_folder=folders.get(source)) for source in sources]
    return sources


def _labels_of_names(sources: list[SourceFile]) -> dict[SourceFile, float]:
    """Return the labels of files whose names differ in the word of the class: correct_data.h5 and wrong_data.h5."""
    found: dict[tuple[str, ...], dict[SourceFile, float]] = defaultdict(dict)
    for source in sources:
        words = re.split(r"[._\-]", source.stem)
        for k, word in enumerate(words):
            word = {"true": "correct", "false": "incorrect"}.get(word.lower(), word)
            if (score := score_of_word(word, None)) is not None:
                found[source.folder, *words[:k], "", *words[k + 1 :]][source] = 1 - score
    pairs = [labels for labels in found.values() if len(set(labels.values())) == 2]
    return {source: label for labels in pairs for source, label in labels.items()}


def find_sources(arguments: list[Path], store: Path) -> list[SourceFile]:
    """Find the trace files among paths and below folders.

    Parameters
    ----------
    arguments : list of Path
        Files, which are accepted whatever their name is, and folders, which are walked.
    store : Path
        Folder of the store; never searched.

    Returns
    -------
    list of SourceFile
        In the order of the arguments; the files of a folder in natural order of their names.

    Raises
    ------
    UsageError
        If an argument does not exist or a folder holds no trace file.
    """
    found: list[SourceFile] = []
    for argument in arguments:
        if argument.is_dir():
            names = [_source(f, argument) for f in _walk(argument, store) or _walk(argument, store, is_text=True)]
            if not names:
                suffixes = ", ".join((*_PICKLES, *(f"...{packed}" for packed in _COMPRESSED), *torch_file.SUFFIXES))
                advice = _advice_of(argument) or "name a file of another suffix"
                raise UsageError(f"{argument}: no trace file in this folder ({suffixes}); {advice}")
            found += sorted(names, key=lambda s: natural_key(s.name))
        elif os.path.lexists(argument):
            found.append(_source(_found_file(argument), argument.parent))
        else:
            raise UsageError(f"{argument}: no such file or folder")
    unique: dict[Path, SourceFile] = {}
    for source in found:
        unique.setdefault(source.path.absolute(), source)
    return list(unique.values())


def _advice_of(folder: Path) -> str | None:
    """Return what to do with the first file or folder of another container that a folder holds; None without one."""
    for path, folders, names in os.walk(folder):
        for name in sorted((*folders, *names), key=natural_key):
            suffix = next((s for s in _OTHERS if name.endswith(s)), None)
            if suffix is not None:
                inside = (Path(path) / name).relative_to(folder).as_posix()
                return f"{inside}: {_OTHERS[suffix]}"
    return None


def _source(found: FoundSource, top: Path) -> SourceFile:
    name = found.path.relative_to(top).as_posix()
    name = top.absolute().name if name == "." else name
    return SourceFile(found.path, name, found.parts, found.table, found.is_trace, export=found.export)


def _found_file(path: Path) -> FoundSource:
    """Return the source of a file that an argument names, with a table next to it, or the export that it is part of."""
    if (exported := exported_file(path)) is not None:
        return FoundSource(path, export=exported)
    if not path.name.endswith(registry.SUFFIXES):
        return FoundSource(path)
    tables = [p.name for p in path.parent.iterdir() if p.is_file() and p.stem == path.stem and p != path]
    return sources_of_folder(path.parent, [path.name, *tables], lambda _: False)[0]._replace(path=path, parts=())


def _walk(top: Path, store: Path, *, is_text: bool = False) -> list[FoundSource]:
    """Return the sources below a folder, without stores and hidden names; with `is_text`, also .bin and files of text.

    Links to folders are followed; each folder is visited once.
    """

    def refuse(error: OSError) -> None:
        raise UsageError(f"{error.filename}: cannot be read: {error.strerror}")

    # A model's weights are .bin files, too, so that these are read where nothing else is.
    suffixes = (*PICKLE_SUFFIXES, ".bin") if is_text else PICKLE_SUFFIXES
    seen = {top.resolve()}
    found: list[FoundSource] = []
    exported: list[ExportedFile] = []
    own_paths: set[Path] = set()  # of exports
    apart: list[Path] = []
    for name, folders, files in os.walk(top, followlinks=True, onerror=refuse):
        here = Path(name)
        inside = []
        for folder in sorted(folders):
            real = (here / folder).resolve()
            is_store = real == store.resolve() or (real / "manifest").is_dir()
            if not folder.startswith(".") and not is_store and real not in seen:
                seen.add(real)
                inside.append(folder)
        folders[:] = inside
        is_data_folder = here == top and here.name == DATA_FOLDER
        for place in (here, here.parent) if is_data_folder else (here,):
            export = read_export(place)
            exported += export.files
            own_paths |= export.paths
        files = [f for f in files if here / f not in own_paths]
        own = sources_of_folder(here, files, lambda f: f.endswith(suffixes), is_text=is_text)
        apart += [here / f for f in sorted(files) if not own and is_table(here / f)]
        found += own
    found = join_folders(top, found, apart)
    pickles: dict[Path, list[FoundSource]] = defaultdict(list)
    for source in found:
        if source.table is None and not source.parts and source.path.name.endswith(PICKLE_SUFFIXES):
            pickles[source.path.parent].append(source)
    tables = {s.path: s.table for here, group in pickles.items() for s in tables_of_pickles(here, group)}
    found = [source._replace(table=tables.get(source.path, source.table)) for source in found]
    return found + [FoundSource(file.path, export=file) for file in exported]


def find_provenance_files(arguments: list[Path]) -> dict[Path, Path]:
    """Return provenance.json of each folder among the arguments that has such a file directly in it."""
    files = {argument: argument / PROVENANCE_FILE for argument in arguments}
    return {folder: path for folder, path in files.items() if path.is_file()}


def read_provenance(path: Path) -> Provenance:
    """Read a file like provenance.json; raise UsageError with the path if it is invalid."""
    try:
        return Provenance.from_json(fsio.read_json(path, _MAX_PROVENANCE_BYTES))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path}: {escape_unprintable(str(error), 300)}") from None


class Identity(NamedTuple):
    """Size, fingerprint and modification time of a source."""

    size: int
    fingerprint: str
    modified_ns: int

    def matches(self, source: SourceFile) -> bool:
        """Return whether the files have not been written to since."""
        try:
            found = [os.stat(path) for path in source.files]
        except OSError:
            return False
        size, modified_ns = sum(s.st_size for s in found), max(s.st_mtime_ns for s in found)
        return (size, modified_ns) == (self.size, self.modified_ns)


def source_fingerprint(source: SourceFile) -> tuple[int, str]:
    """Return size and fingerprint of the files of a source, and of its rows of a table."""
    if source.export is not None:
        size, text = fingerprint(source.path)
        return size, hashlib.blake2b(f"{text} {source.export.facts.digest}".encode(), digest_size=16).hexdigest()
    if not source.parts and source.table is None:
        return fingerprint(source.path)
    digest, size = hashlib.blake2b(digest_size=16), 0
    if source.described is not None:
        digest.update(source.described.fingerprint)
    for path in source.files:
        num_bytes, text = fingerprint(path)
        digest.update(f"{path.name}\0{text}\0".encode())
        size += num_bytes
    if source.table is not None:
        source.table.load().update_digest(digest)
    return size, digest.hexdigest()


def fingerprint(path: Path) -> tuple[int, str]:
    """Return the size and a digest of the size and of evenly spaced samples, the last bytes included.

    The cost does not depend on the size of the file.
    """
    mapped = MappedFile(path)
    size = len(mapped)
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    step = max(_SAMPLE_BYTES, size // _SAMPLES)
    for begin in [*range(0, size, step), max(0, size - _SAMPLE_BYTES)]:
        digest.update(mapped.read(begin, min(size, begin + _SAMPLE_BYTES)))
    return size, digest.hexdigest()
