"""tracestore.create: appending traces from one's own code."""

import math
import os
from collections.abc import Mapping
from typing import Any

from tracestore.errors import UsageError
from tracestore.store.format import labels, schema
from tracestore.store.write.record import record_from_dict
from tracestore.store.write.writer import StoreWriter


class TraceWriter:
    """Appends dicts of the pickle schema to a store of its own; see tracestore.create."""

    def __init__(self, writer: StoreWriter, score_direction: str = labels.CORRECT) -> None:
        self._writer, self._score_direction = writer, score_direction
        self._open = False
        self._count = 0

    def append(
        self,
        trace: Mapping[str, Any],
        *,
        score: float | None = None,
        label: float | None = None,
        group: str = "",
    ) -> None:
        """Adds one trace (numpy arrays or torch tensors). InvalidInputError where it
        is not of the schema; what was appended before stays."""
        writer = self._writer
        start = writer.manifest.num_traces + writer.num_pending
        name = f"append-{start:010d}"
        need = writer.attributes.options["attention"] != "none"
        record = record_from_dict(trace, source_name=name, position=0, need_attention=need)
        record.label = label
        if score is not None:
            writer.set_score_direction(self._score_direction)
        writer.begin_source(name, 0, "")
        try:
            packed = writer.pack(record)
            writer.append_packed(packed, score=math.nan if score is None else float(score), group=group)
        except BaseException:
            writer.abort_source()
            raise
        writer.end_source()

    def flush(self) -> None:
        """Commits what was appended so far."""
        self._writer.commit()

    def close(self) -> None:
        """Commits and releases the store; with overwrite=True it takes the place of the old one."""
        self._close(is_done=True)

    def _close(self, *, is_done: bool) -> None:
        try:
            self._writer.commit()
            if is_done:
                self._writer.replace_existing()
        finally:
            self._writer.close()

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Also after an exception: the traces appended before it are whole. They do not replace a
        # store that is.
        self._close(is_done=kind is None)


def create(
    path: str | os.PathLike[str],
    *,
    attention: str = "mean",
    dtype: str = "float16",
    codec: str = "none",
    overwrite: bool = False,
    append: bool = False,
    score_direction: str = labels.CORRECT,
) -> TraceWriter:
    """A new store to append traces to, one dict of the pickle schema at a time.

    attention: "mean" stores the mean over the heads, "heads" every head, "none"
    nothing. dtype: "float16", or "keep" for the source's own. codec: "none",
    "blosc-zstd", "blosc-lz4" or "zstd". append=True continues an existing store. score_direction:
    what a high score says of an answer, "correct" or "hallucination".
    Raises UsageError where the path cannot be used, StoreLockedError where
    another writer holds it. Use as a context manager: leaving it commits.
    """
    for value, allowed in (
        (attention, schema.ATTENTION_MODES),
        (dtype, ("float16", "keep")),
        (codec, schema.CODECS),
        (score_direction, labels.DIRECTIONS),
    ):
        if value not in allowed:
            raise UsageError(f"found {value!r}, expected one of {', '.join(allowed)}")
    return TraceWriter(
        StoreWriter(path, attention=attention, dtype=dtype, codec=codec, overwrite=overwrite, exist_ok=append),
        score_direction,
    )
