"""Choose the layouts that describe the files of a conversion: stated, kept, built-in or proposed; and its attention."""

import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from tracestore.console import Output
from tracestore.convert.described import DescribedRun
from tracestore.convert.options import ConvertOptions
from tracestore.errors import InvalidInputError, UsageError
from tracestore.ingest.builtin.kept import KeptLayouts
from tracestore.ingest.builtin.parts import Part, builtin_parts, exported_sources
from tracestore.ingest.execute.claims import is_other, list_files
from tracestore.ingest.layout.language import Layout, parse_layout, read_layout
from tracestore.ingest.layout.patterns import literal_key
from tracestore.ingest.score_files import FoundFiles, direction_of, find_score_files, score_name, scores_advice
from tracestore.ingest.sources import SourceFile, read_traces
from tracestore.store.format.labels import HALLUCINATION
from tracestore.store.io.local_folders import local_dir
from tracestore.store.vocabulary import JUDGMENTS, SCORES

WITHOUT_ATTENTION = "no attention in the source: stored without edges; detectors that need graphs cannot train on it"
LEFT_OUT = "the store has no attention: that of the source was left out"
# How much is read to decide. If that is without attention, a later trace with attention is refused.
MAX_TRACES = 3  # of each file
_MAX_FILES = 64
_NO_FILE = "{}: no trace file in this folder; name a file of another suffix"
Group = tuple[list[Path], dict[str, Path]]  # arguments with their files by name


class NoSourceError(UsageError):
    """A folder holds no trace file."""


def described_run(
    arguments: list[Path], store: str, options: ConvertOptions, output: Output, whole: Container[Path] | None = None
) -> DescribedRun:
    """Return the conversion of files by the layout of the options, or by those that are found.

    Parameters
    ----------
    arguments : list of Path
        Files and folders.
    store : str
        The store, whose folder is not searched.
    options : ConvertOptions
    output : Output
        Receives what is proposed for files that no other layout describes.
    whole : container of Path, optional
        The files that are read; another program may still write the others. By default all are.

    Raises
    ------
    UsageError
        If an option is wrong; NoSourceError if a folder holds no file.
    InvalidInputError
        If files do not fit the layout.
    """
    layout, folder = layout_of_options(options.layout, options.field), local_dir(store)
    is_stated = layout is not None and not layout.is_filter  # it may name files of any suffix
    for argument in arguments if whole is None and len(arguments) > 1 else ():
        if argument.is_dir() and all(not is_stated and is_other(name) for name in list_files([argument], folder)):
            raise NoSourceError(_NO_FILE.format(argument))
    if layout is not None and is_stated:
        files = list_files(arguments, folder).items()
        whole_files = {name: path for name, path in files if whole is None or path in whole}
        return _stated_run(_with_padding(layout, options), whole_files, options)
    groups = _groups(arguments, folder, layout, whole)
    paths = [path for _, files in groups for path in files.values()]
    found = find_score_files(arguments, paths, options.scores)
    parts = _kept_parts(store, groups, found, _lines(options, found), options)
    of_kept = {path for part in parts for path in part.files.values()}
    groups = [(named, {n: p for n, p in files.items() if p not in of_kept}) for named, files in groups]
    groups = [group for group in groups if group[1]]
    parts += _found_parts(groups, found, options, output, is_all=not parts)
    run = DescribedRun(parts, {path: k for k, path in enumerate(paths)}, found, finds_layouts=True)
    if not run.sources:
        raise NoSourceError(_NO_FILE.format(arguments[0]))
    return run


def input_files(arguments: list[Path], store: str, options: ConvertOptions) -> tuple[set[Path], set[Path]]:
    """Return the files that may hold data of traces, and the scores files among them, without reading more."""
    layout = layout_of_options(options.layout, options.field)
    is_stated = layout is not None and not layout.is_filter
    groups = _groups(arguments, local_dir(store), None if is_stated else layout, None)
    files = {path for _, own in groups for name, path in own.items() if not is_other(name)}
    if is_stated:
        return files, set() if options.scores is None else {Path(options.scores)}
    paths = [path for _, own in groups for path in own.values()]
    return files, set(find_score_files(arguments, paths, options.scores).scores)


def _stated_run(layout: Layout, files: Mapping[str, Path], options: ConvertOptions) -> DescribedRun:
    """Return the conversion of files by a stated layout."""
    found = FoundFiles([] if options.scores is None else [Path(options.scores)], [])
    if lines := _lines(options, found):
        raise UsageError(f"{_flags(lines)} adds lines to built-in layouts; add them to the layout with --field")
    part = Part(layout, files, tuple(found.scores), origin="stated layout")
    return DescribedRun([part], {path: k for k, path in enumerate(files.values())}, found)


def _lines(options: ConvertOptions, found: FoundFiles) -> dict[str, str]:
    """Return the fields of built-in layouts that --id-column and --score-column add, by the keys that hold them.

    Next to a scores file, the options name its columns.
    """
    if found.scores:
        return {}
    lines = {} if options.id_column is None else {"question_id": literal_key(options.id_column)}
    if options.score_column is not None:
        direction = options.score_direction or direction_of(options.score_column)
        if options.score_column in JUDGMENTS and direction != SCORES[options.score_column]:
            raise UsageError(
                f"--score-column {options.score_column}: 1 means the opposite under this name; a layout names it otherwise"
            )
        name = "hallucination" if direction == HALLUCINATION else "correctness"
        lines[f"{name}.{score_name(options.score_column)}"] = literal_key(options.score_column)
    return lines


def _flags(lines: Mapping[str, str]) -> str:
    return " and ".join("--id-column" if name == "question_id" else "--score-column" for name in lines)


def _with_padding(layout: Layout, options: ConvertOptions) -> Layout:
    """Return a layout with the line that --padding none writes, if it says nothing of padding."""
    if options.padding != "none" or "S.padding" in layout.settings:
        return layout
    return replace(layout, settings={**layout.settings, "S.padding": "none"})


def _kept_parts(
    store: str, groups: Sequence[Group], found: FoundFiles, lines: Mapping[str, str], options: ConvertOptions
) -> list[Part]:
    """Return the parts of the files that layouts of the store read."""
    kept, owned, parts = KeptLayouts.load(store), (*found.scores, *found.unread), list[Part]()
    for layout, own in chain.from_iterable(map(kept.divide, _together(groups) if kept.layouts else ())):
        if lines:
            raise UsageError(f"{_flags(lines)}: a layout that the store keeps reads the files; state another layout")
        parts.append(Part(_with_padding(layout, options), own, owned, origin="layout that the store keeps"))
    return parts


class _AllProveError(Exception):
    """Ends the search for a layout of each argument: the files of all of them prove one."""


def _found_parts(
    groups: Sequence[Group], found: FoundFiles, options: ConvertOptions, output: Output, *, is_all: bool
) -> list[Part]:
    """Return the parts of files by built-in layouts, or by those that are proved; print what is proposed.

    Where some files prove none, all files may: a table may lie apart from its traces. Lines to paste are for all files,
    as a stated layout is, unless two have one name, or some are of an export or, without `is_all`, of a kept layout.
    """
    owned, lines, has_scores_file = (*found.scores, *found.unread), _lines(options, found), bool(found.scores)
    settings = {"S.padding": "none"} if options.padding == "none" else {}
    given = layout_of_options(options.layout, options.field)  # of nothing but `ignore`
    ignored = [] if given is None else given.to_entries()["ignore"]
    parts: list[Part] = []
    messages: list[str] = []

    @cache
    def all_files() -> dict[str, Path]:
        together = _together(groups)
        is_one = is_all and len(together) == 1 and not exported_sources(together[0])[0]
        left_out = {path.absolute() for path in owned}
        files = together[0].items() if is_one else ()
        return {name: path for name, path in files if path.absolute() not in left_out and not is_other(name)}

    def rest(files: Mapping[str, Path]) -> Layout | InvalidInputError:
        # Imported here, because most conversions need no proposal, and its modules take a tenth of a start.
        from tracestore.ingest.propose.proposal import propose

        proposal, alone = propose(files, settings), ""
        if proposal.layout is None and len(all_files()) > len(files):
            proposal = propose(all_files(), settings)
            if proposal.layout is not None and not lines:
                messages[:] = [proposal.message(ignored=ignored)]
                if len(groups) > 1:
                    raise _AllProveError(proposal.layout)
                return InvalidInputError(
                    "all files prove the printed layout, which reads those of the tool, too; --field states it"
                )
        elif not all_files():
            alone = f"; the lines are for {next(iter(files.values()))} and the like: convert them alone"
        messages.append(proposal.message(ignored=ignored))
        if proposal.layout is not None and not lines:
            return proposal.layout
        if proposal.layout is not None:
            return InvalidInputError(f"{_flags(lines)} adds lines to built-in layouts; state this one with --field")
        tables = ((path, partial(proposal.observation.ids, name)) for name, path in files.items())
        advice = next((text for path, ids in tables if (text := scores_advice(path, ids)) is not None), None)
        also = "" if advice is None else f"; {advice} takes the scores of this table by id"
        return InvalidInputError(proposal.refusal() + alone * bool(proposal.candidates) + also)

    try:
        for named, files in groups:
            parts += builtin_parts(files, named, owned, lines, rest, settings=settings, has_scores_file=has_scores_file)
    except _AllProveError as proved:
        origin = "layout that the files prove"
        parts = [Part(proved.args[0], all_files(), has_scores_file=has_scores_file, origin=origin)]
    finally:
        for text in dict.fromkeys(messages):
            output.info(text)
    return parts


def _together(groups: Sequence[Group]) -> list[dict[str, Path]]:
    """Return the files of all arguments as one group; those of each if two have one name."""
    files = {name: path for _, own in groups for name, path in own.items()}
    return [files] if len(files) == sum(len(own) for _, own in groups) else [own for _, own in groups]


def _groups(arguments: list[Path], folder: Path, layout: Layout | None, whole: Container[Path] | None) -> list[Group]:
    """Return the files of each folder among the arguments, and of files behind each other with different names.

    Without those that a layout of nothing but `ignore` leaves out, and those that are not `whole`.
    """
    groups: list[Group] = []
    seen: set[str] = set()
    for argument in arguments:
        files = {n: p for n, p in list_files([argument], folder).items() if os.path.realpath(p) not in seen}
        seen |= {os.path.realpath(path) for path in files.values()}
        if groups and not (argument.is_dir() or groups[-1][0][0].is_dir() or groups[-1][1].keys() & files.keys()):
            groups[-1][0].append(argument)
            groups[-1][1].update(files)
        else:
            groups.append(([argument], files))
    left_out: set[str] = set()
    for address in () if layout is None else layout.ignore:
        names = {name for _, files in groups for name in files if address.files.match(name) is not None}
        if address.path:
            raise UsageError(f"ignore: {address}: without lines of states, whole files alone are left out")
        if not names:
            raise InvalidInputError(f"{address}: no file is left out by it; remove the entry", field="ignore")
        left_out |= names
    return [
        (named, {n: p for n, p in files.items() if n not in left_out and (whole is None or p in whole)})
        for named, files in groups
    ]


def layout_of_options(layout: Any, lines: Sequence[str] | None) -> Layout | None:
    """Return the layout of the options `layout` and `field`, None without them.

    Parameters
    ----------
    layout : Layout, mapping, str, Path or None
        A layout, its entries, or the path of a TOML file.
    lines : sequence of str or None
        Lines of `--field`.
    """
    if isinstance(layout, Layout | Mapping):
        if lines:
            raise UsageError("field lines extend the file of a layout; add them to the mapping")
        return layout if isinstance(layout, Layout) else parse_layout(layout)
    if layout is None and not lines:
        return None
    return read_layout(None if layout is None else Path(layout), lines or ())


class DefaultAttention:
    """The attention of a conversion.

    Parameters
    ----------
    chosen : str or None
        That of `--attention`.
    find : callable
        Return whether the traces have attention, as `has_attention` does; called at most once.
    """

    def __init__(self, chosen: str | None, find: Callable[[], bool | None]) -> None:
        self._is_chosen, self._has_attention = chosen is not None, cache(find)

    def of_new_store(self) -> str:
        """Return "none" if the first traces have hidden states without attention, "mean" in every other case."""
        return "none" if self._has_attention() is False else "mean"

    def is_refused(self, stored: str) -> bool:
        """Return whether a store with the option `stored` refuses traces with attention, so that none is lost."""
        return stored == "none" and not self._is_chosen and not self._has_attention()

    def notes(self, stored: str) -> Iterator[str]:
        """Yield what must be known about a store with the option `stored`, unless the user has chosen it."""
        if stored == "none" and not self._is_chosen and (found := self._has_attention()) is not None:
            yield LEFT_OUT if found else WITHOUT_ATTENTION


def has_attention(sources: list[SourceFile], before_file: Callable[[], None] = lambda: None) -> bool | None:
    """Return whether one of the first traces has attention; None if none of them has hidden states of all tokens.

    The result depends on the sources alone. At most 64 files, evenly spaced, are read; the conversion reports what is
    refused.

    Parameters
    ----------
    sources : list of SourceFile
        The sources in their order, at least one.
    before_file : callable
        Called before each file; may raise.
    """
    is_without = False
    for source in sources[:: max(1, -(-len(sources) // _MAX_FILES))]:
        before_file()
        records = read_traces(source, None, on_refused=lambda _: None)
        with suppress(InvalidInputError), closing(records):  # type: ignore[type-var]
            for record in islice(records, MAX_TRACES):
                if record.attention is not None or record.edges is not None:
                    return True
                is_without |= record.hidden is not None
    return False if is_without else None
