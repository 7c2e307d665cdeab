"""The list of the files of an export, which is written last: an export without it is unfinished.

The list is EXPORT_FILE in the folder of the export. While the export runs, the file states it and lists nothing. The
arrays of the traces are in the listed files; everything else is in TABLE_FILE, a line per trace in the same order,
and what all traces share is in STORE_FILE.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from tracestore._core.kernels import crc32c
from tracestore._core.mapping import MappedFile
from tracestore.errors import InvalidInputError
from tracestore.ingest.exports import EXPORT_FILE, STORE_FILE
from tracestore.store.format.labels import ScoreField, score_fields
from tracestore.store.format.provenance import Provenance
from tracestore.store.io import fsio

TABLE_FILE, SCORES_FILE = "traces.jsonl", "scores.csv"
VERSION = 1
UNFINISHED, COMPLETE = "unfinished", "complete"
# Folder of the files of a data set, below that of the export.
DATA_FOLDER = "data"
_MAX_BYTES = 1 << 30  # of a list of a file for each of some million traces


@dataclass(frozen=True)
class DataFile:
    """A file with the arrays of consecutive traces.

    Attributes
    ----------
    name : str
        Path below the folder of the export.
    num_bytes, crc32c, num_traces : int
        Its size and CRC-32C, and how many traces it holds.
    provenance : int or None
        Position of the provenance of its traces in STORE_FILE.
    table_begin : int
        Where the line of its first trace begins in TABLE_FILE.
    """

    name: str
    num_bytes: int
    crc32c: int
    num_traces: int
    provenance: int | None
    table_begin: int


@dataclass(frozen=True)
class SideFile:
    """A file next to those with the arrays, by name, size and CRC-32C."""

    name: str
    num_bytes: int
    crc32c: int


@dataclass(frozen=True)
class ExportManifest:
    """List the files of an export and the arguments that it was made with.

    Attributes
    ----------
    store : str
        Digest of the generation of the store. An interrupted export continues only with the same one.
    format : str
        The format of the data files.
    traces_per_file, num_traces : int
        Largest number of traces in a file, and number of all traces.
    score_columns : dict of str
        The named score that each column of scores of TABLE_FILE holds.
    state : {"unfinished", "complete"}
    files, side_files : tuple
        Empty while the export is unfinished.
    """

    store: str
    format: str
    traces_per_file: int
    num_traces: int
    score_columns: dict[str, str]
    state: str = UNFINISHED
    files: tuple[DataFile, ...] = ()
    side_files: tuple[SideFile, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Return whether the export has ended."""
        return self.state == COMPLETE

    def complete(self, folder: Path, files: Iterable[DataFile], names: Iterable[str]) -> None:
        """Write the list of a complete export with its data files; `names` are those of the files next to them."""
        side_files = tuple(side_file(folder / name) for name in names)
        replace(self, state=COMPLETE, files=tuple(files), side_files=side_files).write(folder)

    def write(self, folder: Path) -> None:
        """Write the list into the folder of the export, atomically."""
        text = json.dumps({"tracestore_export": VERSION} | asdict(self), indent=1)
        fsio.replace_file(folder / EXPORT_FILE, text.encode())

    @classmethod
    def read(cls, folder: Path) -> "ExportManifest | None":
        """Return the list in a folder; None if the folder has none.

        Raises
        ------
        InvalidInputError
            If it is damaged, or of another version.
        """
        path = folder / EXPORT_FILE
        try:
            data = fsio.read_json(path, _MAX_BYTES)
            if not isinstance(data, dict) or data.pop("tracestore_export", None) != VERSION:
                raise ValueError("of another version")
            data["files"] = tuple(DataFile(**entry) for entry in data["files"])
            data["side_files"] = tuple(SideFile(**entry) for entry in data["side_files"])
            return cls(**data)._checked()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InvalidInputError(f"cannot be read: {error.strerror}", source=str(path)) from None
        except (ValueError, TypeError, KeyError) as error:
            reason = f"damaged list of an export: {' '.join(str(error).split())[:100]}; export the store again"
            raise InvalidInputError(reason, source=str(path)) from None

    def _checked(self) -> "ExportManifest":
        """Return the list; raise ValueError for values of another kind."""
        texts = [self.store, self.format, *self.score_columns, *self.score_columns.values()]
        numbers = [self.traces_per_file, self.num_traces]
        listed: list[DataFile | SideFile] = [*self.files, *self.side_files]
        for file in listed:
            folder, _, name = file.name.rpartition("/")
            if folder not in ("", DATA_FOLDER) or name in ("", ".", ".."):
                raise ValueError(f"the name {file.name!r:.60}")
            numbers += [n for key, n in vars(file).items() if key != "name" and (key, n) != ("provenance", None)]
        if not all(isinstance(text, str) for text in texts) or not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError("values of another kind")
        if self.state not in (UNFINISHED, COMPLETE):
            raise ValueError(f"the state {self.state!r:.40}")
        return self


class ExportFacts(NamedTuple):
    """Hold the values that the traces of an export share.

    Attributes
    ----------
    folder : Path
    manifest : ExportManifest
    scores : dict of ScoreField
        The named scores.
    default_score : str or None
    provenances : tuple of Provenance
    is_head_mean : bool
        Whether the attention in its files is the mean over heads.
    """

    folder: Path
    manifest: ExportManifest
    scores: Mapping[str, ScoreField]
    default_score: str | None
    provenances: tuple[Provenance, ...]
    is_head_mean: bool

    @property
    def digest(self) -> str:
        """Digest of the table, so that an export with the same arrays and other values is another source."""
        return next((f"{file.crc32c:08x}" for file in self.manifest.side_files if file.name == TABLE_FILE), "")

    def check_scores_file(self) -> None:
        """Raise InvalidInputError if the table of scores is not that of the export, whose values are used."""
        path = self.folder / SCORES_FILE
        listed = next((file for file in self.manifest.side_files if file.name == SCORES_FILE), None)
        if listed is not None and (not path.is_file() or side_file(path) != listed):
            raise InvalidInputError(
                f"{path.name} is not that of the export; to use a table of your own: --scores FILE, to use the scores "
                f"of the export: restore {path.name}",
                source=str(self.folder),
            )


class ExportedFile(NamedTuple):
    """A data file of a complete export.

    `has_values`: its labels, scores and groups are used, because no scores file replaces them.
    """

    facts: ExportFacts
    file: DataFile
    has_values: bool = True

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self.facts.folder / self.file.name

    def check(self) -> None:
        """Raise InvalidInputError if the content of the file is not that of the export."""
        if side_file(self.path).crc32c != self.file.crc32c:
            raise InvalidInputError(_changed(self.file.name))

    @property
    def stated(self) -> frozenset[str]:
        """The fields of the scores, the label and the group that a trace of the file has, or else none."""
        names = self.facts.manifest.score_columns.values()
        return frozenset({"group", "label", *(f"correctness.{name}" for name in names)} if self.has_values else ())

    @property
    def provenance(self) -> Provenance | None:
        """Provenance of its traces."""
        return None if self.file.provenance is None else self.facts.provenances[self.file.provenance]


def find_export(folder: Path) -> tuple[list[ExportedFile], frozenset[Path]] | None:
    """Return the files with arrays of the export in a folder, and the paths of all of its files; None without an export.

    Raises
    ------
    InvalidInputError
        If it is unfinished, or one of its files is missing or was changed; SCORES_FILE may be.
    """
    if not os.path.lexists(folder / EXPORT_FILE):
        return None
    manifest, where = ExportManifest.read(folder), str(folder)
    if manifest is None or not manifest.is_complete:
        raise InvalidInputError(
            "an unfinished export; run the same `tracestore export` again to complete it, or remove the folder",
            source=where,
        )
    listed: list[DataFile | SideFile] = [*manifest.files, *manifest.side_files]
    for file in (file for file in listed if file.name != SCORES_FILE):
        path = folder / file.name
        is_same = path.is_file() and path.stat().st_size == file.num_bytes
        if not is_same or (isinstance(file, SideFile) and side_file(path) != file):
            raise InvalidInputError(_changed(file.name, is_there=path.is_file()), source=where)
    facts = _facts(folder, manifest)
    names = (EXPORT_FILE, *(file.name for file in listed))
    return [ExportedFile(facts, file) for file in manifest.files], frozenset(folder / name for name in names)


def _facts(folder: Path, manifest: ExportManifest) -> ExportFacts:
    path = folder / STORE_FILE
    try:
        data: Any = fsio.read_json(path, _MAX_BYTES)
        scores, default = score_fields(data["scores"]), data["default_score"]
        provenances = tuple(map(Provenance.from_json, data["provenance"]))
        if not scores.keys() >= set(manifest.score_columns.values()) or default not in (scores or (None,)):
            raise ValueError("scores that are not described")
        if any((file.provenance or -1) >= len(provenances) for file in manifest.files):
            raise ValueError("a provenance that is not described")
        return ExportFacts(folder, manifest, scores, default, provenances, data.get("attention") == "mean")
    except (ValueError, TypeError, KeyError) as error:
        reason = f"damaged: {' '.join(str(error).split())[:100]}; export the store again"
        raise InvalidInputError(reason, source=str(path)) from None


def _changed(name: str, *, is_there: bool = True) -> str:
    return (
        f"{name} {'has changed' if is_there else 'is missing'} since the export; restore it, or export the store again"
    )


def side_file(path: Path) -> SideFile:
    """Return the entry of a file next to the data files."""
    mapped = MappedFile(path)
    return SideFile(path.name, len(mapped), crc32c(memoryview(mapped)))
