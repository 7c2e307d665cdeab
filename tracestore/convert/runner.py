"""Convert trace files into a store.

One module of over 400 lines: every step of a conversion uses the state of the one object that runs it.
"""

import math
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tracestore import process
from tracestore.console import Output, Progress
from tracestore.convert.choosing import DefaultAttention, described_run, has_attention
from tracestore.convert.cutting import commits_after, cut
from tracestore.convert.described import DescribedRun
from tracestore.convert.options import ConvertOptions
from tracestore.convert.refused import KEPT, SourceNotes, partial_fingerprint
from tracestore.convert.scoring import Scoring
from tracestore.convert.shared_traces import SharedTraces, UnreadSourceError
from tracestore.convert.summary import ConvertReport, SourceCounts
from tracestore.errors import InvalidInputError, LateConflictError, NoTracesError, escape_unprintable
from tracestore.ingest.execute.axes import LayerIds
from tracestore.ingest.exports import EXPORT_FILE
from tracestore.ingest.left_values import GoneTraces
from tracestore.ingest.packing import PackOptions
from tracestore.ingest.source_streams import TraceStream, read_sources, reading_whole
from tracestore.ingest.sources import SourceFile, source_fingerprint
from tracestore.platform_support import is_in_memory
from tracestore.store.format.provenance import Provenance, equals_but_layers, with_layers
from tracestore.store.io import fsio
from tracestore.store.io.files import parse_location
from tracestore.store.io.local_folders import budget_beside, local_dir
from tracestore.store.io.ownership import has_manifest
from tracestore.store.io.provenance_file import find_provenance_files, read_provenance
from tracestore.store.read.index import SourceEntry
from tracestore.store.write.pack import PackedTrace
from tracestore.store.write.pending import SegmentsAhead
from tracestore.store.write.writer import StoreWriter
from tracestore.store.write.written import TraceBlock
from tracestore.words import format_size, plural

# The interpreter switches threads after this time. The thread that inflates needs the interpreter
# for an instant every 4 ms, and must not wait longer than that.
_SWITCH_INTERVAL_S = 0.0005
# A new store has at least this fraction of the bytes of its sources: the mean over the heads of causal attention and
# float16 instead of float64 make large traces of 64 heads about 60 times smaller.
_MAX_SHRINKAGE = 200
# One thread packs a source while another one inflates the next.
_MIN_THREADS = 2

Writer = TypeVar("Writer", bound=StoreWriter)


def _position(error: InvalidInputError) -> float:
    return math.inf if error.position is None else error.position


# What to do about a trace that does not fit the store, by the field of the error.
_ADVICE = {  # by the field of an error
    "num_layers": "; if the first axis of the states counts tokens, their line of the layout ends with -> S L D; "
    "where that changed, --overwrite converts all files again",
    "question_id": " (a line for question_id may add what tells them apart, see --on-conflict for one trace that changed, "
    "--overwrite after a line that has changed)",
    "question": ' (an answer to another question needs another id, such as question_id = "={folder}_{id}" in a layout; '
    "--overwrite after a question that has changed)",
    "labels": " (--on-conflict replaces or keeps the stored one)",
}


class Conversion:
    """One conversion of a list of sources.

    Parameters
    ----------
    sources : list of Path
        Trace files, and folders that are searched for them.
    store : str
        The store to create or to extend: a folder or a URL of an object store.
    options : ConvertOptions
        Options of the conversion.
    output : Output
        Receives notes and progress.
    whole : set of Path, optional
        The files that are read; another program may still write others, or add some. By default all are.
    new : set of Path, optional
        Those of them that no earlier conversion has read: only sources that depend on one of them are converted.
    described : DescribedRun, optional
        The sources with their layouts, if they are known.
    provenances : Mapping, optional
        What `read_provenances` returns, if it is known.
    scoring : Scoring, optional
        The scores of `described`, if they are known.
    reads_all : bool
        Read the sources that the store has, too.

    Raises
    ------
    UsageError
        If there is no source, the scores file is missing or ambiguous, or a provenance file is invalid.
    InvalidInputError
        If the content of the scores file is invalid.
    """

    def __init__(
        self,
        sources: list[Path],
        store: str,
        options: ConvertOptions,
        output: Output,
        whole: Set[Path] | None = None,
        new: Set[Path] | None = None,
        described: DescribedRun | None = None,
        provenances: Mapping[Path, Provenance] | None = None,
        scoring: Scoring | None = None,
        *,
        reads_all: bool = False,
    ) -> None:
        self._options, self._output, self._reads_all = options, output, reads_all
        self._at_end: Callable[[StoreWriter, ConvertReport], None] = lambda *_: None  # when everything is committed
        self._arguments = (sources, store, options, output, whole)
        self._is_whole = whole is None  # While files are still being written, those with the ids of a table may follow.
        self.is_interrupted = False
        self.store = parse_location(store)
        self.folder = local_dir(store)
        self.described = described or described_run(sources, store, options, output, whole)
        self.scoring = scoring or Scoring(self.described, options, output)
        self.sources = self.scoring.sources
        if new is not None:
            of_sources = {path for source in self.sources for path in source.files}
            # A table may belong to every source.
            if new <= of_sources.union(self.described.score_files.scores):
                self.sources = [source for source in self.sources if not new.isdisjoint(source.files)]
        self._num_named = Counter(source.name for source in self.scoring.sources)
        self._named = {path for path in sources if path.is_file()}
        self.default_attention = DefaultAttention(options.attention, self.has_attention)
        self._seen: set[int] = set()  # committed traces that were read
        self._lacks_texts: dict[int, bool] = {}  # of these, whether no source has had all texts
        self._most_pending = 0  # bytes of sources between two commits
        self.provenances = read_provenances(sources, options, output) if provenances is None else provenances
        self.report = ConvertReport(str(self.store), scores_file=self.scoring.scores_file)
        self._notes = SourceNotes(self.report, options, output)
        self.total_bytes = sum(source.file_bytes() for source in self.sources)

    def _provenance(self, source: SourceFile) -> Provenance | None:
        if source.export is not None and self._options.provenance is None:
            return source.export.provenance
        known = next((p for path, p in self.provenances.items() if source.path.is_relative_to(path)), None)
        # Rule 1b: the layout states the place of the layers.
        what = None if source.described is None else source.described.what
        return known if what is None else replace(known or Provenance(), hidden_states_at=what)

    def known(self) -> dict[str, Any]:
        """Return what another conversion of the same sources need not find again."""
        return {"described": self.described, "provenances": self.provenances, "scoring": self.scoring}

    def known_provenances(self) -> list[Provenance]:
        """Return the provenances of the sources."""
        return [provenance for provenance in map(self._provenance, self.sources) if provenance is not None]

    def has_attention(self) -> bool | None:
        """Return whether the traces have attention; None if none has hidden states of all tokens."""
        if (stated := self.described.states_attention()) is not None:
            return stated
        return has_attention(self.described.probes(), self._check_interrupt)

    def run(self) -> ConvertReport:
        """Convert the sources.

        Returns
        -------
        ConvertReport

        Raises
        ------
        InvalidInputError
            If a source is refused and `skip_bad` is false. The sources before it are committed.
        KeyboardInterrupt
            After Ctrl-C, between two traces; the message gives the number of committed traces.
        """
        # SIGINT is checked between traces. Raised anywhere else, Python may print a traceback from a
        # clean-up, or end by the signal.
        try:
            with (
                process.signal_handler(signal.SIGINT, self._interrupt),
                process.switch_interval(_SWITCH_INTERVAL_S),
                process.frozen_garbage(),  # imported modules need not be scanned again with every trace
            ):
                return self._run()
        except UnreadSourceError:
            self._output.info("all files are read again: unchanged ones may have traces or values of the changed ones")
            self.described.release()
            again = self._again()
            again.report.num_traces_new, again._at_end = self.report.num_traces_new, self._at_end
        try:
            return again.run()
        finally:
            self.report, self.is_interrupted = again.report, again.is_interrupted

    def _again(self) -> "Conversion":
        """Return a conversion of the same sources that reads all of them."""
        return Conversion(*self._arguments, reads_all=True)

    def _run(self) -> ConvertReport:
        options = self._options
        committed = 0
        try:
            self.report_plan()
            with self.open_writer(StoreWriter) as writer:
                self._notes.begin(self.store, is_new=options.overwrite or writer.manifest.num_traces == 0)
                self._begin(writer)
                progress = Progress(self._output, "B")
                try:
                    self._convert_all(writer, progress)
                    self.scoring.fill(writer)
                finally:
                    committed = writer.manifest.num_traces
                    self.report.num_traces_new += writer.num_added
                    progress.clear()
                    self._notes.print_sources()
                self._finish(writer, progress.elapsed_s)
                writer.replace_existing()
                self._at_end(writer, self.report)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"interrupted: {plural(committed, 'trace')} committed; run the same command to continue"
            ) from None
        except InvalidInputError:
            if self.report.num_traces_new and not options.overwrite:
                self._output.info(
                    f"{self.store} keeps {plural(self.report.num_traces_new, 'new trace')} of earlier files"
                )
            raise
        return self.report

    def open_writer(self, writer_type: type[Writer], *, can_resume: bool = True) -> Writer:
        """Return a writer of the store with the options, which continues an interrupted one with `overwrite`."""
        options = self._options
        return writer_type(
            self.store,
            attention=options.attention or self.default_attention.of_new_store,
            dtype=options.dtype,
            codec=options.codec,
            overwrite=options.overwrite,
            can_resume=self._can_continue if can_resume else None,
            on_conflict=options.on_conflict,
            allow_mixed_provenance=options.allow_mixed_provenance,
            commit_bytes=sys.maxsize,
        )

    def _begin(self, writer: StoreWriter) -> None:
        """Check the provenances, and define the scores in the store."""
        writer.check_provenance(self.known_provenances())
        self.scoring.begin(writer)

    def _can_continue(self, writer: StoreWriter) -> bool:
        """Return whether an interrupted conversion had these sources, and the same values in the scores file."""
        return all(map(self._is_current_source, writer.index.sources())) and self.scoring.has_stored(writer)

    def _is_current_source(self, committed: SourceEntry) -> bool:
        """Return whether a committed source is an unchanged file of this conversion."""
        for source in self.sources:
            if source.name == committed.path:
                size, digest = source_fingerprint(source)
                found = (digest, partial_fingerprint(digest), partial_fingerprint(digest, KEPT))
                is_same = committed.size == size and committed.fingerprint in found
                return is_same and equals_but_layers(committed.provenance, self._provenance(source))
        return False

    def _interrupt(self, *_: object) -> None:
        if self.is_interrupted:
            raise KeyboardInterrupt  # the second Ctrl-C takes effect at once
        self.is_interrupted = True

    def _check_interrupt(self) -> None:
        if self.is_interrupted:
            raise KeyboardInterrupt

    def report_plan(self) -> None:
        """Print the sizes of sources, destination and memory."""
        free = fsio.free_bytes(self.folder)
        is_new = self._options.overwrite or not (isinstance(self.store, Path) and has_manifest(self.store))
        if is_new:
            fsio.require_free_bytes(self.folder, self.total_bytes // _MAX_SHRINKAGE, "the store")
        self._output.info(
            f"{plural(len(self.sources), 'file')}, {format_size(self.total_bytes)} -> {self.store}: "
            f"at most about {format_size(self.total_bytes)} of arrays if the files are not gzipped, "
            f"{format_size(free)} free; memory {format_size(self._options.memory_budget)}, "
            f"{plural(self._options.workers, 'worker')}"
        )
        if not isinstance(self.store, Path) and is_in_memory(self.folder):
            self._output.info(f"{self.folder}, where segments wait for their upload, is in memory and counts as such")
        if is_new and self.total_bytes > free:
            self._output.info(
                "the disk may be too small; if it gets full, the committed traces stay and the exit code is 4"
            )

    def _convert_all(self, writer: StoreWriter, progress: Progress) -> None:
        threads = max(_MIN_THREADS, self._options.workers)
        stored = writer.attributes.options
        self._is_known: Callable[[str, int, str], bool] = (
            (lambda *_: False) if self._reads_all else partial(self.is_known, writer)
        )
        ends = self._ends(writer)
        self._shared = SharedTraces(writer, [source.name for source in self.scoring.sources], self._unread)
        if len(self._unread) < len(self.scoring.sources):
            self.described.look_back(self._unread)
        budget = self._budget(writer)
        pack_options = PackOptions(
            attention=stored["attention"],
            keep_dtype=stored["dtype"] == "keep",
            max_memory=budget // (4 * max(4, threads)),
            scratch=writer.target.scratch,
            # The queue decides how far the other threads get while the first file is written.
            max_waiting=budget // 2,
            skip_bad=self._options.skip_bad,
            refuse_attention=self.default_attention.is_refused(stored["attention"]),
        )
        with closing(self._streams(writer, pack_options)) as streams:  # type: ignore[type-var]
            for stream in streams:
                try:
                    self._convert_one(writer, stream, progress)
                except InvalidInputError as error:
                    self._refuse(writer, stream, error.with_location(source=stream.source.name), progress)
                if (commits := ends.get(stream.source.name)) is not None:
                    with fsio.map_os_errors(writer.target.path):
                        writer.end_segments()
                    if commits:
                        self.described.commit(writer)
        progress.clear()
        self._notes.print_without_traces()
        unread = set(self._unread)
        for index in (index for index, lacks in self._lacks_texts.items() if lacks):
            # An unchanged file still has those of its traces.
            owner = writer.source_of(index)
            if self._shared.has_absent(index) or writer.moved.get(owner, owner) not in unread:
                self.described.left.traces.add(index)
        self._close_accounts(writer)
        self.described.commit(writer)

    def _budget(self, writer: StoreWriter) -> int:
        """Return what the segments leave of the memory budget."""
        budget, is_local = self._options.memory_budget, isinstance(self.store, Path)
        return budget if is_local else budget_beside(writer.target.scratch, budget, self._most_pending)

    def _close_accounts(self, writer: StoreWriter) -> None:
        """Close the accounts of the layouts and of the scores file, when all sources are read."""
        if self._unread and self.described.needs_all():
            self._check_interrupt()
            raise UnreadSourceError
        names = {source.name for source in self.scoring.sources}
        self._gone = GoneTraces(writer, names, self.described.read, self._seen)
        self._say(self.described.close(self._gone, self._options.on_conflict))
        self._say(self.scoring.check_ids(writer, can_refuse=self._is_whole and not self.report.num_traces_refused))

    def check_ids(self) -> None:
        """Check the ids of the scores file when no file follows any more, unless some were refused."""
        if self.scoring.file is not None and not self.report.num_traces_refused:
            with StoreWriter(self.store) as writer:
                self._say(self.scoring.check_ids(writer, can_refuse=True))

    def _say(self, lines: Iterable[str]) -> None:
        """Print what was found in all sources."""
        for line in lines:
            self._output.info(line)

    def _ends(self, writer: StoreWriter) -> dict[str, bool]:
        """Return the sources behind which segments end, by name, and whether the conversion commits there."""
        sources = [source for source in self.sources if not self._has(writer, source)]
        self._unread = list((self._num_named - Counter(source.name for source in sources)).elements())
        sizes = [source.file_bytes() for source in sources]
        runs = cut(sizes, [source.shared for source in sources], self.total_bytes)
        self._first = {sources[run[0]].name for run in runs}
        pending = 0
        for k, run in enumerate(runs):
            pending += sum(sizes[run.start : run.stop])
            self._most_pending = max(self._most_pending, pending)
            pending *= not commits_after(k, len(runs))
        return {sources[run[-1]].name: commits_after(k, len(runs)) for k, run in enumerate(runs[:-1])}

    def is_known(self, writer: StoreWriter, name: str, size: int, fingerprint: str) -> bool:
        """Return whether a source need not be read, because the store has it."""
        if not fingerprint or not writer.has_source_named(name):
            return False
        is_last = self._options.on_conflict == "keep-last"
        found = (fingerprint,) if is_last else (fingerprint, partial_fingerprint(fingerprint, KEPT))
        return any(writer.has_source(name, size, text, among=self._num_named[name]) for text in found)

    def _has(self, writer: StoreWriter, source: SourceFile) -> bool:
        with suppress(OSError):  # its turn reports the error
            return writer.has_source_named(source.name) and self._is_known(source.name, *source_fingerprint(source))
        return False

    def _segments_of(self, writer: StoreWriter, source: SourceFile) -> SegmentsAhead | None:
        """Return segments for a source that begins a run, unless the store may have its traces."""
        is_new = source.name in self._first and not writer.has_source_named(source.name)
        return writer.segments_ahead() if is_new and writer.attributes.options["codec"] == "none" else None

    def _refuse(self, writer: StoreWriter, stream: TraceStream, error: InvalidInputError, progress: Progress) -> None:
        """Leave out a source, or raise its error."""
        if isinstance(error, NoTracesError) and self._named.isdisjoint(stream.source.files):
            self._notes.without_traces.append(error)
            return
        if self._reads_all:
            writer.forget_source(stream.source.name)  # it is not read for its own sake
        if isinstance(error, LateConflictError) or not self._options.skip_bad:
            if not writer.replaces_at_commit:  # The complete sources before it are valid: keep them.
                self.described.commit(writer)
            raise error from None
        progress.clear()
        self._notes.refuse(stream, error)

    def _streams(self, writer: StoreWriter, pack_options: PackOptions) -> Iterator[TraceStream]:
        """Yield the packed traces of each source, in order."""
        # Of traces that share a row of a table, --skip-bad keeps the first: one thread reads them in their order.
        is_one_by_one = self._options.skip_bad and any(source.shared is not None for source in self.sources)
        return read_sources(
            self.sources,
            pack_options,
            workers=1 if is_one_by_one else max(_MIN_THREADS, self._options.workers),
            is_known=self._is_known,
            on_wait=self._check_interrupt,
            segments_of=partial(self._segments_of, writer),
        )

    def _traces_to_store(self, stream: TraceStream) -> Iterator[PackedTrace | TraceBlock]:
        """Yield the traces of a source, one by one or in blocks."""
        return iter(stream)

    def _convert_one(self, writer: StoreWriter, stream: TraceStream, progress: Progress) -> None:
        report, name = self.report, stream.source.name
        identity = stream.identity()
        size, digest = identity.size, identity.fingerprint
        if self._is_known(name, size, digest):
            report.num_sources_skipped_existing += 1
            report.bytes_in += size
            known = self._provenance(stream.source)
            if known is not None and not equals_but_layers(writer.last_source(name).provenance, known):
                self._notes.known(name, "the store has another provenance, which stays; --overwrite replaces it")
            return
        if writer.has_source_named(name):
            report.num_sources_modified += 1
            what = "the file or its time has changed since it was committed"
            if stream.source.shared is not None and writer.has_files(name, size, digest):
                what = f"{', '.join(stream.source.shared.tables)} or the layout has changed since it was committed"
            if writer.has_source(name, size, partial_fingerprint(digest)):
                what = "some of its traces were refused"
            elif writer.has_source(name, size, partial_fingerprint(digest, KEPT)):
                what = "stored traces were kept instead of its own"
            elif writer.has_source(name, size, digest):
                what = "another file has changed" if self._reads_all else "its scores may have changed"
            elif writer.has_source(name, size, ""):
                what = "its labels are not all stored"
            self._notes.read_again(name, what)
        added = SourceCounts()
        with fsio.map_os_errors(writer.target.path, lambda: size):
            traces = self._traces_to_store(stream)
            first = next(traces, None)
            facts = first.facts_of(0) if isinstance(first, TraceBlock) else first
            record = None if facts is None else facts.record
            provenance = with_layers(self._provenance(stream.source), None if record is None else record.layer_ids)
            layer_ids = None if provenance is None else provenance.layer_ids
            if record is not None:
                self.described.check_layers(record)
            self.scoring.begin_source(stream.source)
            self.described.begin_source(stream.source, writer)
            self._shared.begin_source(name, size, digest, is_unchanged=writer.has_files(name, size, digest))
            writer.begin_source(name, size, digest, provenance)
            try:
                with reading_whole(stream, identity):
                    whole: Iterator[PackedTrace | TraceBlock] = chain(filter(None, (first,)), traces)
                    for packed in whole:
                        first = None
                        self._check_interrupt()
                        if isinstance(packed, TraceBlock):
                            self._append_block(writer, packed, layer_ids, added)
                        else:
                            self._append(writer, packed, layer_ids, added)
                        # Within a source the arrays so far stand for its bytes. A compressed source has fewer.
                        done = report.bytes_in + min(added.num_bytes, size)
                        num_read = report.num_traces_read + added.num_new
                        progress.update(done, self.total_bytes, lambda: plural(num_read, "trace"))
                        del packed
                    writer.flush_source()
                added.refused = sorted([*added.refused, *stream.refused], key=_position)
                if added.refused and not added.num_new + added.num_duplicates:
                    raise added.refused[0].with_location(source=name)
            except BaseException:
                stream.stop()
                writer.abort_source()
                raise
        report.num_conflicts += writer.keys.num_conflicts
        # A source with refused traces is read again by the next conversion, which may have other options.
        keeps = self._options.on_conflict == "keep-first" and writer.keys.num_conflicts + added.num_removing
        end = partial_fingerprint(digest) if added.refused else partial_fingerprint(digest, KEPT) if keeps else None
        writer.end_source(end)
        self._shared.end_source()
        self.described.read.add(name)
        report.add(size, added)
        self._notes.list_refused(name, added.refused)
        progress.clear()
        self._notes.print_refused([error.with_location(source=name) for error in added.refused])

    def _append(self, writer: StoreWriter, packed: PackedTrace, layer_ids: LayerIds, added: SourceCounts) -> None:
        """Add a trace to the open source, whose layers have these numbers, or to the refused ones."""
        record, conflicts = packed.record, writer.keys.num_conflicts
        key = record.question_id, record.sample
        known, is_pending = writer.index.find(*key), writer.is_pending(key)
        if known >= 0:
            self._seen.add(known)
        try:
            if not self.described.keeps_copies:
                self._shared.check_copy(packed)
            scores, group = self.scoring.values(writer, packed)
            if record.layer_ids is not None and record.layer_ids != layer_ids:
                own, expected = list(record.layer_ids), list(layer_ids or ())
                text = f"found {own!s:.80}, expected {expected!s:.80} as in the first trace"
                raise InvalidInputError(text, position=record.position, field="layer_ids")
            if known < 0 and not is_pending and self._shared.has_under_another_id(packed):
                found = "its file is unchanged, and the store has this trace under another id"
                raise InvalidInputError(f"{found}; --overwrite converts all files again", position=record.position)
            is_new = writer.append_packed(packed, scores=scores, group=group)
            is_conflict = writer.keys.num_conflicts > conflicts
            # A trace that keep-first leaves out gives no values; one whose label alone differs may still add states.
            if is_new or not is_conflict or self._options.on_conflict == "keep-last":
                self.scoring.define(writer, record)
                self.described.added(
                    record,
                    is_new=is_new,
                    is_known=known >= 0 or is_pending,
                    is_replaced=writer.keys.has_replaced,
                    loses=None if known < 0 else not self._shared.has_absent(known),
                )
                if known >= 0:
                    lacks_texts = writer.keys.lacks_texts and not writer.keys.has_replaced
                    self._lacks_texts[known] = lacks_texts and self._lacks_texts.get(known, True)
                    # Other sources may have the trace, too.
                    replaces, removes = self.described.changes(key, known, writer.read_columns())
                    added.num_removing += removes
                    if replaces or self._options.on_conflict == "keep-last":
                        self._shared.check(known, is_changed=replaces or is_conflict, is_last=not replaces)
        except InvalidInputError as error:
            error.reason += _ADVICE.get(error.field or "", "")
            if error.is_whole_source or not self._options.skip_bad:
                raise
            added.refused.append(error)
        else:
            added.count(packed, is_new=is_new)

    def _append_block(self, writer: StoreWriter, block: TraceBlock, layer_ids: LayerIds, added: SourceCounts) -> None:
        """Add traces that are written: all at once if they are new and fit, or else one after the other."""
        fits = all(block.facts[kind].record.layer_ids in (None, layer_ids) for kind in np.unique(block.kinds).tolist())
        if fits and self._shared.fits(block) and self.scoring.fits(block) and writer.fits(block):
            self.scoring.add_block(writer, block)
            writer.append_block(block)
            self.described.added_block(block)
            added.count_block(block)
            return
        for packed in block:
            self._check_interrupt()
            self._append(writer, packed, layer_ids, added)

    def _finish(self, writer: StoreWriter, elapsed_s: float) -> None:
        report, manifest = self.report, writer.manifest
        report.seconds = round(elapsed_s, 3)
        report.bytes_out = manifest.num_bytes
        report.num_traces, report.num_segments = manifest.num_traces, manifest.num_segments
        report.generation = manifest.generation
        report.num_unscored = manifest.num_traces - manifest.num_scored
        report.num_scores_without_trace = self.scoring.num_without_trace
        report.add_labels(writer.read_columns(), writer.attributes)
        self._require_traces(manifest.num_traces)
        report.refused_file = self._notes.refused_file
        report.attention = writer.attributes.options["attention"]
        self._say(self.default_attention.notes(report.attention))
        self._say(report.lines(self._options.on_conflict))
        self._say(self.scoring.lines())
        if self._unread or self._seen:  # else all files are new
            self._say(self._gone.lines())

    def _require_traces(self, num_traces: int) -> None:
        """Raise NoTracesError if the store has no trace at the end."""
        if num_traces == 0:
            if self._notes.without_traces:
                raise self._notes.without_traces[0]
            raise NoTracesError(f"no file could be converted: {self.report.num_sources_skipped} refused")


def read_provenances(sources: list[Path], options: ConvertOptions, output: Output) -> dict[Path, Provenance]:
    """Return the known provenances by source argument."""
    if options.provenance is not None:
        files = dict.fromkeys(sources, Path(options.provenance))
    else:  # exports state the provenance of each of their files
        files = find_provenance_files(sources)
        files = {folder: file for folder, file in files.items() if not (folder / EXPORT_FILE).is_file()}
    found = {file: read_provenance(file) for file in dict.fromkeys(files.values())}
    for file, provenance in found.items():
        output.info(f"provenance: {file}, model {escape_unprintable(provenance.model or 'unknown', 100)}")
    return {source: found[file] for source, file in files.items()}
