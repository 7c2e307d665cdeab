"""Convert trace files into a store."""

import errno
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from tracestore import process
from tracestore.console import Output, Progress, format_size
from tracestore.convert.options import ON_CONFLICT, ConvertOptions
from tracestore.convert.report import ConvertReport
from tracestore.errors import ClusterError, InvalidInputError, TruncatedFileError, UsageError, escape_unprintable
from tracestore.ingest.byte_source import TRUNCATED_WHILE_READING
from tracestore.ingest.cluster import ClusterStream, read_sources_on_cluster
from tracestore.ingest.packing import PackOptions
from tracestore.ingest.reading import AheadOptions, SourceStream, read_sources
from tracestore.ingest.scores import Scores, read_scores
from tracestore.ingest.sources import (
    SourceFile,
    find_provenance_files,
    find_scores,
    find_sources,
    read_provenance,
    source_fingerprint,
)
from tracestore.store.format import paths
from tracestore.store.format.labels import DEFAULT_THRESHOLD, describe
from tracestore.store.format.provenance import Provenance
from tracestore.store.io import fsio
from tracestore.store.io.files import local_dir, parse_location
from tracestore.store.read.columns import TraceValues
from tracestore.store.read.index import SourceEntry
from tracestore.store.write.writer import StoreWriter

# The interpreter switches threads after this time. The thread that inflates needs the interpreter
# for an instant every 4 ms, and must not wait longer than that.
_SWITCH_INTERVAL_S = 0.0005


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
    only : callable
        Return whether a source is converted.

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
        only: Callable[[SourceFile], bool] = lambda _: True,
    ) -> None:
        self._options, self._output = options, output
        self.is_interrupted = False
        self.store = parse_location(store)
        self.folder = local_dir(store)
        self.sources = [source for source in find_sources(sources, self.folder) if only(source)]
        self.scores = self._read_scores(sources)
        self._score_name = ""  # the score of the store that they become
        self._provenances = self._read_provenances(sources)
        self.report = ConvertReport(str(self.store), scores_file=str(self.scores.path) if self.scores else None)
        self.total_bytes = sum(source.file_bytes() for source in self.sources)

    def _read_scores(self, sources: list[Path]) -> Scores | None:
        options = {name: getattr(self._options, name) for name in ("score_column", "group_column", "score_direction")}
        path = self._options.scores or find_scores(sources)
        if path is None:
            for name in (name for name, value in options.items() if value is not None):
                raise UsageError(f"--{name.replace('_', '-')} needs a scores file: give --scores")
            return None
        scores = read_scores(Path(path), **options)
        self._output.info(f"scores: {path}, column {scores.column}, {len(scores.values):,} questions")
        return scores

    def _read_provenances(self, sources: list[Path]) -> dict[Path, Provenance]:
        """Return the known provenances by source argument."""
        path = self._options.provenance
        files = find_provenance_files(sources) if path is None else dict.fromkeys(sources, Path(path))
        found = {file: read_provenance(file) for file in dict.fromkeys(files.values())}
        for file, provenance in found.items():
            self._output.info(f"provenance: {file}, model {escape_unprintable(provenance.model or 'unknown', 100)}")
        return {source: found[file] for source, file in files.items()}

    def _provenance(self, source: SourceFile) -> Provenance | None:
        return next((p for path, p in self._provenances.items() if source.path.is_relative_to(path)), None)

    def run(self) -> ConvertReport:
        """Convert the sources.

        Returns
        -------
        ConvertReport

        Raises
        ------
        InvalidInputError
            If a source is refused and `skip_bad` is false. The sources before it are committed.
        ClusterError
            If the workers of a Dask cluster fail. The sources before the failed one are committed.
        KeyboardInterrupt
            After Ctrl-C, between two traces; the message gives the number of committed traces.
        """
        # SIGINT is checked between traces. Raised anywhere else, Python may print a traceback from a
        # clean-up, or end by the signal.
        with (
            process.signal_handler(signal.SIGINT, self._interrupt),
            process.switch_interval(_SWITCH_INTERVAL_S),
            process.frozen_garbage(),  # imported modules need not be scanned again with every trace
        ):
            return self._run()

    def _run(self) -> ConvertReport:
        options = self._options
        committed = 0
        try:
            self.report_plan()
            with StoreWriter(
                self.store,
                attention=options.attention,
                dtype=options.dtype,
                codec=options.codec,
                overwrite=options.overwrite,
                can_resume=self._is_current_source,
                on_conflict=options.on_conflict,
                allow_mixed_provenance=options.allow_mixed_provenance,
                expected_bytes=self.total_bytes,
            ) as writer:
                writer.check_provenance(self._provenances.values())
                before = writer.manifest.num_traces
                if self.scores is not None:
                    self._score_name = writer.attributes.default_score or self.scores.name
                    writer.define_score(self._score_name, self.scores.score_field)
                progress = Progress(self._output)
                try:
                    self._convert_all(writer, progress)
                    self._fill_scores(writer)
                finally:
                    committed = writer.manifest.num_traces
                    progress.clear()
                self.report.num_traces_new = committed - before
                self._finish(writer, progress.elapsed_s)
                writer.replace_existing()
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"interrupted: {committed:,} traces are committed; run the same command to continue"
            ) from None
        return self.report

    def _is_current_source(self, committed: SourceEntry) -> bool:
        """Return whether a committed source is an unchanged file of this conversion."""
        for source in self.sources:
            if source.name == committed.path:
                is_same = source_fingerprint(source) == (committed.size, committed.fingerprint)
                return is_same and committed.provenance == self._provenance(source)
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
        self._output.info(
            f"{len(self.sources):,} files, {format_size(self.total_bytes)} -> {self.store}: "
            f"at most about {format_size(self.total_bytes)} if the files are not gzipped, "
            f"{format_size(free)} free; memory {format_size(self._options.memory_budget)}, {self._options.workers} workers"
        )

    def _convert_all(self, writer: StoreWriter, progress: Progress) -> None:
        report, workers = self.report, self._options.workers
        stored = writer.attributes.options
        pack_options = PackOptions(
            attention=stored["attention"],
            keep_dtype=stored["dtype"] == "keep",
            max_memory=self._options.memory_budget // (4 * max(4, workers)),
            scratch=writer.path,
            # A single worker needs a small queue only. With several, the queue decides how far the
            # others get while the first file is written.
            max_waiting=self._options.memory_budget // (8 if workers == 1 else 2),
        )
        callbacks: dict[str, Any] = {"is_known": writer.has_source, "on_wait": self._check_interrupt}
        streams: Iterator[SourceStream | ClusterStream]
        if self._options.dask is not None:
            streams = read_sources_on_cluster(
                self.sources, pack_options, address=self._options.dask, workers=workers, **callbacks
            )
        else:
            ahead = None
            # Writing ahead needs a second worker, and rows that a segment holds without compression.
            if workers > 1 and stored["codec"] == "none":
                ahead = AheadOptions(
                    writer.path / paths.SPOOL_FOLDER,
                    writer.commit_bytes,
                    writer.split_bytes,
                    lambda: writer.pending_bytes,
                )
            streams = read_sources(self.sources, pack_options, workers=workers, ahead=ahead, **callbacks)
        with closing(streams):  # type: ignore[type-var]
            for stream in streams:
                try:
                    self._convert_one(writer, stream, progress)
                except (InvalidInputError, ClusterError) as error:
                    if isinstance(error, InvalidInputError):
                        error = error.with_location(source=stream.source.name)
                    if isinstance(error, ClusterError) or not self._options.skip_bad:
                        # The complete sources before it are valid: keep them.
                        writer.commit()
                        raise error from None
                    progress.clear()
                    self._output.info(f"skipped {error}")
                    report.num_sources_skipped += 1
                    report.skipped.append({"source": stream.source.name, "reason": str(error)})
        writer.commit()

    def _convert_one(self, writer: StoreWriter, stream: SourceStream | ClusterStream, progress: Progress) -> None:
        report, name = self.report, stream.source.name
        identity = stream.identity()
        size, digest = identity.size, identity.fingerprint
        if writer.has_source(name, size, digest):
            report.num_sources_skipped_existing += 1
            report.bytes_in += size
            return
        if writer.has_source_named(name):
            progress.clear()
            report.num_sources_modified += 1
            self._output.info(
                f"{name}: the file has changed since it was committed; new traces are added, "
                f"a trace with different content is {ON_CONFLICT[self._options.on_conflict]}"
            )
        writer.begin_source(name, size, digest, self._provenance(stream.source))
        added = duplicates = nonfinite = 0
        rounded_from: str | None = None
        with fsio.map_os_errors(writer.path, lambda: writer.pending_bytes + size):
            try:
                for packed in stream:
                    scores: dict[str, float] = {}
                    group = ""
                    if self.scores is not None:
                        score, group = self.scores.lookup(packed.record.question_id, packed.record.sample)
                        scores = {self._score_name: score}
                    nonfinite += packed.num_nonfinite > 0
                    self._check_interrupt()
                    if writer.append_packed(packed, scores=scores, group=group):
                        added += 1
                        rounded_from = rounded_from or packed.rounded_from
                        report.num_without_embeddings += packed.record.is_without_embeddings
                    else:
                        duplicates += 1
                    progress.update(lambda s: self._line(s, report.num_traces_read + added, report.bytes_in))
                writer.flush_source()
                if not identity.matches(stream.source):
                    raise InvalidInputError("another program modified the file while it was read", source=name)
            except BaseException as error:
                writer.abort_source()
                # write(2) fails with EFAULT if the mapped bytes of the source are gone.
                if isinstance(error, TruncatedFileError) or (
                    isinstance(error, OSError) and error.errno == errno.EFAULT
                ):
                    raise InvalidInputError(TRUNCATED_WHILE_READING, source=name) from None
                raise
        report.num_conflicts += writer.num_source_conflicts
        writer.end_source()
        report.num_sources += 1
        report.num_traces_read += added
        report.num_duplicates += duplicates
        report.num_nonfinite += nonfinite
        if rounded_from is not None:
            rounded = report.num_sources_rounded
            rounded[rounded_from] = rounded.get(rounded_from, 0) + 1
        report.bytes_in += size

    def _line(self, elapsed_s: float, traces: int, done_bytes: int) -> str:
        share = done_bytes / max(1, self.total_bytes)
        left = f"{elapsed_s * (1 - share) / share:,.0f} s left" if share > 0.01 else "..."
        rate = max(elapsed_s, 1e-9)
        return (
            f"{traces:,} traces, {traces / rate:,.0f} traces/s, {done_bytes / rate / 1e6:,.0f} MB/s, "
            f"{100 * share:.0f} %, {left}"
        )

    def _fill_scores(self, writer: StoreWriter) -> None:
        """Set the scores of committed traces that have none."""
        if self.scores is None:
            return
        updates = {}
        for index in np.flatnonzero(np.isnan(writer.read_columns().score(self._score_name))).tolist():
            score, group = self.scores.lookup(writer.index.question_id(index), writer.index.row(index).sample)
            if not math.isnan(score):
                updates[index] = TraceValues({self._score_name: score}, group=group or None)
        writer.update_values(updates)
        writer.commit()

    def _finish(self, writer: StoreWriter, elapsed_s: float) -> None:
        report, manifest = self.report, writer.manifest
        report.seconds = round(elapsed_s, 3)
        report.bytes_out = manifest.num_bytes
        report.num_traces, report.num_segments = manifest.num_traces, manifest.num_segments
        report.generation = manifest.generation
        report.num_unscored = manifest.num_traces - manifest.num_scored
        if self.scores is not None:
            missing = sum(writer.index.find(q, s) < 0 for q, s in self.scores.values)
            report.num_scores_without_trace = missing
        if manifest.num_scored:
            name = writer.attributes.default_score or ""
            direction = writer.attributes.scores[name].direction
            report.labels = f"{name}: {describe(writer.read_columns().score(name), DEFAULT_THRESHOLD, direction)}"
        if manifest.num_traces == 0:
            raise InvalidInputError(f"no file could be converted: {report.num_sources_skipped} refused")
        for line in report.lines(self._options.on_conflict):
            self._output.info(line)
