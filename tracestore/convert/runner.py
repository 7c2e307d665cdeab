"""Files of traces into a store."""

import argparse
import errno
import math
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tracestore import process
from tracestore.console import Output, Progress, format_size
from tracestore.errors import InvalidInputError, TruncatedFileError, UsageError
from tracestore.ingest.byte_source import TRUNCATED_WHILE_READING
from tracestore.ingest.cluster import ClusterStream, read_sources_on_cluster
from tracestore.ingest.reading import AheadOptions, PackOptions, SourceStream, read_sources
from tracestore.ingest.scores import Scores, read_scores
from tracestore.ingest.sources import find_scores, find_sources, fingerprint
from tracestore.store.format import paths
from tracestore.store.format.labels import CORRECT, DEFAULT_THRESHOLD, describe
from tracestore.store.io import fsio
from tracestore.store.io.files import local_dir, parse_location
from tracestore.store.read.index import SourceEntry
from tracestore.store.write.writer import StoreWriter

# What becomes of a trace whose key is there with other content.
ON_CONFLICT = {"error": "refused", "keep-first": "left out", "keep-last": "put in the place of the first"}
# How long a thread may keep the interpreter from another one that wants it: the one that
# inflates wants it for an instant each 4 ms, and must not wait longer than that.
_SWITCH_INTERVAL_S = 0.0005


@dataclass
class Summary:
    """What a conversion did; the JSON document of --json."""

    store: str
    num_sources: int = 0
    num_sources_skipped_existing: int = 0
    num_sources_skipped: int = 0
    num_sources_modified: int = 0
    num_traces_read: int = 0
    num_traces_new: int = 0
    num_duplicates: int = 0
    num_conflicts: int = 0
    num_nonfinite: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    seconds: float = 0.0
    scores_file: str | None = None
    num_unscored: int = 0
    labels: str | None = None
    num_scores_without_trace: int = 0
    num_traces: int = 0
    num_segments: int = 0
    generation: int = 0
    skipped: list[dict[str, str]] = field(default_factory=list)


class Conversion:
    """One run of convert over a list of sources."""

    def __init__(self, args: argparse.Namespace, output: Output) -> None:
        self.args, self.output = args, output
        self._interrupted = False
        self.store = parse_location(args.dst)
        self.folder = local_dir(args.dst)
        sources = [Path(s) for s in args.src]
        self.sources = find_sources(sources, self.folder)
        scores_path = Path(args.scores) if args.scores else find_scores(sources)
        self.scores: Scores | None = None
        if scores_path is not None:
            self.scores = read_scores(scores_path, args.score_column, args.group_column, args.score_direction)
            output.info(f"scores: {scores_path}, column {self.scores.column}, {len(self.scores.values):,} questions")
        elif args.score_column or args.group_column or args.score_direction:
            flags = {"--score-column": args.score_column, "--group-column": args.group_column}
            flag = next((flag for flag, value in flags.items() if value), "--score-direction")
            raise UsageError(f"{flag} names a column, but there is no scores file")
        self.summary = Summary(str(self.store), scores_file=None if scores_path is None else str(scores_path))
        self.total_bytes = sum(s.path.stat().st_size for s in self.sources if s.path.is_file())

    def run(self) -> Summary:
        """Convert the sources, and return what was done."""
        # SIGINT is checked between traces. Raised anywhere else, Python may print a traceback from a
        # clean-up, or end by the signal.
        with (
            process.signal_handler(signal.SIGINT, self._interrupt),
            process.switch_interval(_SWITCH_INTERVAL_S),
            process.frozen_garbage(),  # imported modules need not be scanned again with every trace
        ):
            return self._run()

    def _run(self) -> Summary:
        args = self.args
        committed = 0
        try:
            self.announce()
            with StoreWriter(
                self.store,
                attention=args.attention,
                dtype=args.dtype,
                codec=args.codec,
                overwrite=args.overwrite,
                can_resume=self._is_source,
                on_conflict=args.on_conflict,
                expected_bytes=self.total_bytes,
            ) as writer:
                before = writer.manifest.num_traces
                if self.scores is not None:
                    writer.set_score_direction(self.scores.direction)
                progress = Progress(self.output)
                try:
                    self._convert_all(writer, progress)
                    self._fill_scores(writer)
                finally:
                    committed = writer.manifest.num_traces
                    progress.clear()
                self.summary.num_traces_new = committed - before
                self._finish(writer, progress.elapsed_s)
                writer.replace_existing()
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"interrupted; {committed:,} traces are committed, the same command continues"
            ) from None
        return self.summary

    def _is_source(self, source: SourceEntry) -> bool:
        """Whether a committed source is one of these files as they are now."""
        for own in self.sources:
            if own.name == source.path:
                return fingerprint(own.path) == (source.size, source.fingerprint)
        return False

    def _interrupt(self, *_: object) -> None:
        if self._interrupted:
            raise KeyboardInterrupt  # asked twice: at once
        self._interrupted = True

    def _check_interrupt(self) -> None:
        if self._interrupted:
            raise KeyboardInterrupt

    def announce(self) -> None:
        free = fsio.free_bytes(self.folder)
        self.output.info(
            f"{len(self.sources):,} files, {format_size(self.total_bytes)} -> {self.store}: "
            f"at most about {format_size(self.total_bytes)} if the files are not gzipped, "
            f"{format_size(free)} free; memory {format_size(self.args.memory_budget)}, {self.args.workers} workers"
        )

    def _convert_all(self, writer: StoreWriter, progress: Progress) -> None:
        summary, options = self.summary, writer.attributes.options
        pack_options = PackOptions(
            attention=options["attention"],
            keep_dtype=options["dtype"] == "keep",
            max_memory=self.args.memory_budget // (4 * max(4, self.args.workers)),
            scratch=writer.path,
            # With one worker it evens out the pace; with more it is how far the others come
            # while it is not their turn.
            max_waiting=self.args.memory_budget // (8 if self.args.workers == 1 else 2),
        )
        waiting: dict[str, Any] = {"is_known": writer.has_source, "on_wait": self._check_interrupt}
        streams: Iterator[SourceStream | ClusterStream]
        if self.args.dask is not None:
            streams = read_sources_on_cluster(
                self.sources, pack_options, address=self.args.dask, workers=self.args.workers, **waiting
            )
        else:
            ahead = None
            # One worker has nobody to be ahead of, and what is coded is not what a segment has.
            if self.args.workers > 1 and options["codec"] == "none":
                ahead = AheadOptions(
                    writer.path / paths.SPOOL_FOLDER,
                    writer.close_bytes,
                    writer.split_bytes,
                    lambda: writer.pending_bytes,
                )
            streams = read_sources(self.sources, pack_options, workers=self.args.workers, ahead=ahead, **waiting)
        with closing(streams):  # type: ignore[type-var]
            for stream in streams:
                try:
                    self._convert_one(writer, stream, progress)
                except InvalidInputError as error:
                    error = error.with_location(source=stream.source.name)
                    if not self.args.skip_bad:
                        # The whole sources before it are good and stay.
                        writer.commit()
                        raise error from None
                    progress.clear()
                    self.output.info(f"skipped {error}")
                    summary.num_sources_skipped += 1
                    summary.skipped.append({"source": stream.source.name, "reason": str(error)})
        writer.commit()

    def _convert_one(self, writer: StoreWriter, stream: SourceStream | ClusterStream, progress: Progress) -> None:
        summary, name = self.summary, stream.source.name
        identity = stream.identity()
        size, digest = identity.size, identity.fingerprint
        if writer.has_source(name, size, digest):
            summary.num_sources_skipped_existing += 1
            summary.bytes_in += size
            return
        if writer.has_source_named(name):
            progress.clear()
            summary.num_sources_modified += 1
            self.output.info(
                f"{name}: another file of this name was committed before; what is new in this one is added, "
                f"a trace that differs is {ON_CONFLICT[self.args.on_conflict]}"
            )
        writer.begin_source(name, size, digest)
        added = duplicates = nonfinite = 0
        with fsio.map_os_errors(writer.path, lambda: writer.pending_bytes + size):
            try:
                for packed in stream:
                    score, group = math.nan, ""
                    if self.scores is not None:
                        score, group = self.scores.lookup(packed.record.question_id, packed.record.sample)
                    nonfinite += packed.num_nonfinite > 0
                    self._check_interrupt()
                    if writer.append_packed(packed, score=score, group=group):
                        added += 1
                    else:
                        duplicates += 1
                    progress.update(lambda s: self._line(s, summary.num_traces_read + added, summary.bytes_in))
                writer.flush_source()
                if not identity.matches(stream.source.path):
                    raise InvalidInputError("another program wrote to it while it was read", source=name)
            except BaseException as error:
                writer.abort_source()
                # What write(2) says of bytes that are gone.
                if isinstance(error, TruncatedFileError) or (
                    isinstance(error, OSError) and error.errno == errno.EFAULT
                ):
                    raise InvalidInputError(TRUNCATED_WHILE_READING, source=name) from None
                raise
        summary.num_conflicts += writer.num_source_conflicts
        writer.end_source()
        summary.num_sources += 1
        summary.num_traces_read += added
        summary.num_duplicates += duplicates
        summary.num_nonfinite += nonfinite
        summary.bytes_in += size

    def _line(self, elapsed_s: float, traces: int, done_bytes: int) -> str:
        share = done_bytes / max(1, self.total_bytes)
        left = f"{elapsed_s * (1 - share) / share:,.0f} s left" if share > 0.01 else "..."
        rate = max(elapsed_s, 1e-9)
        return (
            f"{traces:,} traces, {traces / rate:,.0f} traces/s, {done_bytes / rate / 1e6:,.0f} MB/s, "
            f"{100 * share:.0f} %, {left}"
        )

    def _fill_scores(self, writer: StoreWriter) -> None:
        """Gives committed traces without a score the one the file has; differing scores
        are left and counted."""
        if self.scores is None or writer.manifest.num_scored == writer.manifest.num_traces:
            return
        columns = writer.read_columns()
        updates = {}
        for index in [int(k) for k in range(len(columns)) if math.isnan(columns.scores[k])]:
            score, group = self.scores.lookup(writer.index.question_id(index), writer.index.row(index).sample)
            if not math.isnan(score):
                updates[index] = (score, math.nan, group or None)
        writer.update_values(updates)
        writer.commit()

    def _finish(self, writer: StoreWriter, elapsed_s: float) -> None:
        summary, manifest = self.summary, writer.manifest
        summary.seconds = round(elapsed_s, 3)
        summary.bytes_out = manifest.num_bytes
        summary.num_traces, summary.num_segments = manifest.num_traces, manifest.num_segments
        summary.generation = manifest.generation
        summary.num_unscored = manifest.num_traces - manifest.num_scored
        if self.scores is not None:
            missing = sum(writer.index.find(q, s) < 0 for q, s in self.scores.values)
            summary.num_scores_without_trace = missing
        if manifest.num_scored:
            direction = writer.attributes.score_direction or CORRECT
            summary.labels = describe(writer.read_columns().scores, DEFAULT_THRESHOLD, direction)
        if manifest.num_traces == 0:
            raise InvalidInputError(f"no file could be converted: {summary.num_sources_skipped} refused")
        self._say_summary()

    def _say_summary(self) -> None:
        s, say = self.summary, self.output.info
        say(
            f"{s.num_traces_new:,} traces added from {s.num_sources:,} files in {s.seconds:.1f} s "
            f"({s.num_sources_skipped_existing:,} files already there, {s.num_duplicates:,} duplicates and "
            f"{s.num_sources_skipped:,} files skipped)"
        )
        say(
            f"{s.store}: {s.num_traces:,} traces in {s.num_segments:,} segments, "
            f"{format_size(s.bytes_in)} in, {format_size(s.bytes_out)} out, {s.num_unscored:,} without a score"
        )
        if s.labels is not None:
            say(s.labels)
        if s.num_conflicts:
            say(f"{s.num_conflicts:,} traces had the key of another one: {ON_CONFLICT[self.args.on_conflict]}")
        if s.num_nonfinite:
            say(f"{s.num_nonfinite:,} traces hold NaN or infinite values; training on them stops with their name")
        if s.num_scores_without_trace:
            say(f"{s.num_scores_without_trace:,} scores belong to no trace")
