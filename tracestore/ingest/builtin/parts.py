"""Parts of a conversion: layouts with their files, structures of built-in layouts, exports, and files of none."""

import shlex
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import KW_ONLY, InitVar, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tracestore.errors import InvalidInputError, NoTracesError, UsageError
from tracestore.ingest.builtin.claiming import Claims, claim
from tracestore.ingest.builtin.library import Builtin, builtins_near
from tracestore.ingest.execute.accounts import looks_like_label
from tracestore.ingest.execute.claims import is_other, list_files
from tracestore.ingest.execute.execution import Execution
from tracestore.ingest.execute.values import holds_array
from tracestore.ingest.exports.export_manifest import find_export
from tracestore.ingest.exports.exported_records import read_preprocessed
from tracestore.ingest.layout.language import Layout
from tracestore.ingest.layout.places import plan_of
from tracestore.ingest.readers.looks import FirstLooks
from tracestore.ingest.readers.opening import PICKLES, open_tree
from tracestore.ingest.readers.text import SUFFIXES as TEXT_SUFFIXES
from tracestore.ingest.readers.tree import Items, Value
from tracestore.ingest.sources import Described, SourceFile, short_digest
from tracestore.store.format.labels import HALLUCINATION
from tracestore.store.write.record import TraceRecord

_TRACES = (*PICKLES, ".gz", ".bz2", ".xz", ".zst")
# Returns the layout of files that no built-in layout describes, or the error that reports why there is none.
Proposer = Callable[[Mapping[str, Path]], Layout | InvalidInputError]


def preprocessed_file(path: Path) -> Described:
    """Return what reads a file of sequences or graphs."""
    return Described(lambda _, scratch, on_refused: read_preprocessed(path, scratch, on_refused), b"preprocessed")


def unknown_file(error: InvalidInputError) -> Described:
    """Return what stands for a file that no layout describes: reading it raises the error."""

    def read(*_: Any) -> Iterator[TraceRecord]:
        raise error.with_location()  # a copy each time: the frames of the caller stay out of it
        yield

    return Described(read, error=error)


@dataclass(eq=False)
class Part:
    """Files that one layout describes.

    Parameters
    ----------
    layout : Layout or None
        None: `others` are read without one.
    files : Mapping
        Paths by their names below SRC.
    owned : tuple of Path
        Files that are read for another purpose.
    builtin : Builtin, optional
        The built-in layout that the files belong to.
    others : Mapping
        Sources without a layout, by the names of their files.
    has_scores_file : bool
    looks : FirstLooks, optional
        As for `Execution`.
    origin : str
        Where the layout comes from, in words.

    Attributes
    ----------
    execution : Execution or None
        What reads the files by the layout.
    """

    layout: Layout | None
    files: Mapping[str, Path]
    owned: tuple[Path, ...] = ()
    builtin: Builtin | None = None
    others: Mapping[str, SourceFile] = field(default_factory=dict)
    _: KW_ONLY
    has_scores_file: bool = False
    looks: InitVar[FirstLooks | None] = None
    origin: str = ""

    def __post_init__(self, looks: FirstLooks | None) -> None:
        own, check, self.execution = self.builtin, None, None
        if own is not None:
            check, self.origin = self._checked, f"built-in layout {own.name}"
        if self.layout is not None:
            plan = plan_of(self.layout) if own is None else own.plan
            known = self.layout.settings if own is None else {*own.settings, *own.lines}
            self.execution = Execution(
                plan, self.files, self.owned, check, has_scores_file=self.has_scores_file, known=known, looks=looks
            )

    def probe(self) -> "Part":
        """Return the part for a look at its first traces; see `Execution.probe`."""
        probe = copy(self)
        probe.execution = None if self.execution is None else self.execution.probe()
        return probe

    @property
    def directions(self) -> dict[str, str]:
        """Return what a high value of each score means, by field."""
        return {"label": HALLUCINATION} if self.layout is None else self.layout.known_directions()

    @property
    def kept_text(self) -> str | None:
        """The layout that the store keeps; None for a built-in one, which files show again."""
        return None if self.layout is None or self.builtin is not None else self.layout.to_toml()

    @property
    def digest(self) -> str:
        """The digest of the layout that the store keeps, "" for a built-in one."""
        return "" if self.kept_text is None else short_digest(self.kept_text.encode())

    @property
    def states_attention(self) -> bool | None:
        """Return whether the layout states attention; None if the traces may have it."""
        if self.layout is None or self.builtin is not None:
            return None
        return "attentions" in self.layout.addresses or (None if self.layout.records else False)

    def sources(self) -> Iterator[tuple[Path, SourceFile]]:
        """Yield the sources with the path of the first file of each."""
        yield from ((source.path, source) for source in self.others.values())
        if self.execution is None:
            return
        fingerprint = self.execution.fingerprint()
        what = self.execution.layout.settings.get("L.what")
        tables = self.execution if self.execution.tables else None
        stated = frozenset({*self.directions, *({"group"} & self.execution.layout.addresses.keys())})
        if self.builtin is not None:  # a missing `label` counts as unchanged
            stated = frozenset() if self.has_scores_file else stated - {"label"}
        for group in self.execution.groups:
            may_be_empty = bool(self.execution.plan.kept_names)
            read = partial(self.execution.read, group)
            described = Described(
                read, fingerprint, self.digest, what, tables, may_be_empty=may_be_empty, stated=stated
            )
            # A file of a built-in layout is known by its bytes alone, unless it has tables or options add to the layout.
            is_plain = self.builtin is not None and not (self.builtin.lines or self.builtin.settings or tables)
            parts = () if is_plain and len(group.paths) == 1 else group.paths
            yield group.paths[0], SourceFile(group.paths[0], group.name, parts=parts, described=described)

    def _checked(self, text: str, name: str, root: Value) -> Value:
        assert self.builtin is not None
        return self.builtin.signatures[text].checked(root, self.builtin.name)


def sources_in_order(parts: Sequence[Part], order: Mapping[Path, int]) -> list[SourceFile]:
    """Return the sources of all parts in the order of their first files."""
    found = [(order[path], source) for part in parts for path, source in part.sources()]
    return [source for _, source in sorted(found, key=lambda pair: pair[0])]


def builtin_parts(
    files: Mapping[str, Path],
    arguments: Sequence[Path],
    owned: Iterable[Path],
    lines: Mapping[str, str],
    rest: Proposer,
    *,
    settings: Mapping[str, Any] | None = None,
    has_scores_file: bool,
) -> list[Part]:
    """Return the parts that built-in layouts and exports describe, and those of the other files.

    Parameters
    ----------
    files : Mapping
        Paths by their names below SRC.
    arguments : sequence of Path
        The files and folders that the user named.
    owned : iterable of Path
        Files that are read for another purpose.
    lines : Mapping
        Keys of fields in the items of built-in layouts.
    rest : callable
        Called with the files that no built-in layout describes, if they may hold traces; with all files, if a table or
        arrays lie next to those of built-in layouts, to which they may belong.
    settings : Mapping, optional
        What else is known of the axes of built-in layouts.
    has_scores_file : bool
        As for `Execution`.

    Raises
    ------
    InvalidInputError
        If nothing describes a table or arrays next to the traces, which may belong to them.
    """
    sources, taken = exported_sources(files)
    taken |= {path.absolute() for path in owned}
    left = {n: p for n, p in files.items() if n not in sources and p.absolute() not in taken and not is_other(n)}
    looks = FirstLooks()
    claims = claim(left, [builtin.extended(lines, settings or {}) for builtin in builtins_near(left)], looks)
    errors, found = _of_rest(claims, left, {path.absolute() for path in arguments}, rest)
    parts = []
    if found is not None:
        layout, described = found
        origin = "layout that the files prove"
        parts.append(Part(layout, described, has_scores_file=has_scores_file, origin=origin))
        left = {name: path for name, path in left.items() if name not in described}
    for builtin, own in claims.owned.items():
        own = {name: path for name, path in own.items() if name in left}
        if own and builtin.reader is None:
            parts.append(Part(builtin.layout, own, builtin=builtin, has_scores_file=has_scores_file, looks=looks))
        else:
            sources |= {n: SourceFile(path, n, described=preprocessed_file(path)) for n, path in own.items()}
    sources |= {n: SourceFile(left[n], n, described=unknown_file(error)) for n, error in errors.items()}
    return [*parts, Part(None, {}, others=sources)]


def exported_sources(files: Mapping[str, Path]) -> tuple[dict[str, SourceFile], set[Path]]:
    """Return the sources that are files of exports, and all files that exports describe."""
    folders = {folder for path in files.values() for folder in list(path.parents)[:2]}
    exports = [export for folder in folders if (export := find_export(folder)) is not None]
    exported = {file.path: file for found, _ in exports for file in found}
    sources = {n: SourceFile(path, n, export=exported[path]) for n, path in files.items() if path in exported}
    return sources, {path.absolute() for _, paths in exports for path in paths}


def find_sources(arguments: list[Path], store: Path) -> list[SourceFile]:
    """Return the files of traces that built-in layouts or exports describe; reading any other one is refused.

    Parameters
    ----------
    arguments : list of Path
        Files and folders.
    store : Path
        Folder that is not searched.

    Raises
    ------
    UsageError
        If a path does not exist, or a folder holds no traces.
    InvalidInputError
        If an export is damaged.
    """
    files = list_files(arguments, store)
    tables = [path for path in files.values() if path.name.endswith(TEXT_SUFFIXES)]

    error = InvalidInputError("no built-in layout describes it; convert it by a layout of its own")
    parts = builtin_parts(files, arguments, tables, {}, lambda _: error, has_scores_file=False)
    sources = sources_in_order(parts, {path: k for k, path in enumerate(files.values())})
    if not sources:
        raise UsageError(f"{arguments[0]}: no trace file in this folder")
    return sources


def _of_rest(
    claims: Claims, files: Mapping[str, Path], named: Container[Path], propose: Proposer
) -> tuple[dict[str, InvalidInputError], tuple[Layout, dict[str, Path]] | None]:
    """Return why files that no built-in layout describes are not read, and the layout of the others with its files."""
    errors = {name: error for name, error in claims.rest.items() if error is not None}
    others = {name: files[name] for name, error in claims.rest.items() if error is None}
    unknown = [name for name, path in others.items() if path.absolute() in named or not _holds_nothing(path)]
    # Rule 8: tables and arrays next to traces may belong to them; of a pickle its own traces are missing at most.
    beside = next((name for name in unknown if not name.endswith(_TRACES)), None)
    described = others if beside is None else {name: path for name, path in files.items() if name not in errors}
    found = propose(described) if unknown else NoTracesError("holds no array")
    if isinstance(found, Layout):
        return errors, (found, described)
    if beside is not None:
        for unread, error in list(errors.items())[:1]:  # it may hold the arrays
            found = type(found)(f"{found}; {unread}: {error}")
        # A line takes these characters for its own.
        for builtin in list(claims.owned)[:1] if set("*{\\:").isdisjoint(beside) else ():
            line = shlex.quote("ignore = " + beside)
            found = type(found)(f"{found}; next to files of {builtin.name}: --field {line} leaves it out")
        raise claims.explained(beside, found).with_location(source=beside)
    reasons = {n: claims.explained(n, found if n in unknown else NoTracesError("holds no array")) for n in others}
    return errors | reasons, None


def _holds_nothing(path: Path) -> bool:
    """Return whether a file holds neither arrays nor rows, and its name is none of labels."""
    with suppress(InvalidInputError), open_tree(path) as root:
        value: Value = next(iter(root), None) if isinstance(root, Items) and root.is_stream else root
        is_table = isinstance(root, Items) and path.suffix not in PICKLES
        return not (is_table or holds_array(value, 6) or looks_like_label(path.stem))
    return False
