"""`tracestore convert --dry-run`: what the first traces of each file hold, and what would be stored."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from tracestore.console import Output, plural
from tracestore.convert.defaults import MAX_TRACES, DefaultAttention, has_attention, is_index_id
from tracestore.convert.options import ConvertOptions
from tracestore.convert.scoring import Scoring
from tracestore.errors import InvalidInputError, NoTracesError
from tracestore.ingest.packing import PackOptions
from tracestore.ingest.roles.inspection import Inspection, inspect_source
from tracestore.ingest.sources import SourceFile, find_sources
from tracestore.store.io.files import local_dir
from tracestore.store.read.store import open_store


@dataclass
class AlikeFiles:
    """Files whose first traces have the same keys with the same roles."""

    files: list[str]
    keys: list[dict[str, str]]
    missing: dict[str, str]
    stored: list[str]
    refused: str | None

    def lines(self) -> Iterator[str]:
        """Yield the description as lines of text."""
        more = f" and {len(self.files) - 1:,} more files" if len(self.files) > 1 else ""
        yield f"{self.files[0]}{more}:"
        widths = [max((len(key[name]) for key in self.keys), default=0) for name in ("key", "found")]
        for key in self.keys:
            yield f"  {key['key']:{widths[0]}}  {key['found']:{widths[1]}}  -> {key['role']}"
        for name, text in self.missing.items():
            yield f"  no {name}: {text}"
        for number, text in enumerate(self.stored):
            yield f"  trace {number} would be stored: {text}"
        if self.refused is not None:
            yield f"  refused: {self.refused}"


@dataclass
class DryRunReport:
    """The JSON document of `tracestore convert --dry-run --json`."""

    store: str
    attention: str  # mean, heads or none
    num_sources: int = 0
    num_sources_refused: int = 0
    files: list[AlikeFiles] = field(default_factory=list)


def dry_run(sources: list[Path], store: str, options: ConvertOptions, output: Output) -> DryRunReport:
    """Describe the first traces of each source without writing anything.

    Parameters
    ----------
    sources : list of Path
        Trace files, and folders that are searched for them.
    store : str
        The destination, whose options apply if it exists.
    options : ConvertOptions
        Options of the conversion.
    output : Output
        Receives the descriptions.

    Raises
    ------
    InvalidInputError
        After all descriptions, if a source is refused and `skip_bad` is false.
    """
    folder = local_dir(store)
    scoring = Scoring(sources, find_sources(sources, folder), options, output)
    found = scoring.sources
    attention: str | None
    attention, dtype = options.attention, options.dtype or "float16"
    if "://" not in store and (folder / "zarr.json").is_file():
        with open_store(store) as existing:
            stored = existing.internals.attributes.options
            attention, dtype = options.attention or stored["attention"], options.dtype or stored["dtype"]
    keys = replace(scoring.keys, is_index_id=is_index_id(found, scoring.keys), axes=options.axes)
    default_attention = DefaultAttention(partial(has_attention, found, keys))
    attention = attention or default_attention.of_new_store()
    pack_options = PackOptions(
        attention=attention,
        keep_dtype=dtype == "keep",
        keys=keys,
        refuse_attention=options.attention is None and default_attention.is_refused(attention),
    )
    report = DryRunReport(store, attention=attention, num_sources=len(found))
    groups: dict[object, AlikeFiles] = {}
    refused: list[InvalidInputError] = []
    for source in found:
        scoring.begin_source(source)
        inspection = inspect_source(source, pack_options, MAX_TRACES, partial(scoring.add_ids, source=source.name))
        refused += [] if inspection.refused is None else [inspection.refused]
        _add(groups, source, inspection)
    report.files, report.num_sources_refused = list(groups.values()), len(refused)
    for files in report.files:
        for line in files.lines():
            output.info(line)
    for line in scoring.lines_of_ids():
        output.info(line)
    if options.attention is None and (note := default_attention.note(attention)):
        output.info(note)
    output.info(f"{plural(len(found), 'file')}, {len(refused):,} refused; nothing was written")
    errors = [error for error in refused if not isinstance(error, NoTracesError)]
    if refused and not options.skip_bad and (errors or len(refused) == len(found)):
        raise (errors or refused)[0]
    return report


def _add(groups: dict[object, AlikeFiles], source: SourceFile, found: Inspection) -> None:
    reason = None if found.refused is None else found.refused.reason
    alike = (tuple((key.key, key.role) for key in found.keys), tuple(found.missing), reason)
    if alike in groups:
        groups[alike].files.append(source.name)
        return
    groups[alike] = AlikeFiles(
        [source.name],
        [{"key": key.key, "found": key.found, "role": key.role} for key in found.keys],
        found.missing,
        found.stored,
        None if found.refused is None else str(found.refused),
    )
