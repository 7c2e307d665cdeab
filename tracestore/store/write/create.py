"""tracestore.create: append traces to a store from Python."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tracestore.errors import InvalidInputError, UsageError
from tracestore.store.format import labels, schema
from tracestore.store.format.provenance import Provenance, with_layers
from tracestore.store.read.columns import TraceValues
from tracestore.store.vocabulary import SCORES, by_precedence
from tracestore.store.write.field_values import check_agreement, field_error, label_value, lens_arrays, score_value
from tracestore.store.write.record import TraceRecord, question_id_text, record_from_dict
from tracestore.store.write.writer import StoreWriter

_CHOICES = schema.OPTION_VALUES | {"score_direction": labels.DIRECTIONS}
# Flags of the command line that are arguments of create(), and their values.
_FLAG = re.compile(
    r"--(attention|dtype|codec|allow-mixed-provenance)(?: (mean|heads|none|float16|keep|zstd|blosc-\w+))?"
)


@contextmanager
def _named_for_programs() -> Iterator[None]:
    """Name the arguments of create() in errors of a block, instead of the flags of commands."""

    def renamed(text: Any) -> str:
        return _FLAG.sub(lambda flag: f"{flag[1].replace('-', '_')}={repr(flag[2]) if flag[2] else True}", str(text))

    try:
        yield
    except (InvalidInputError, UsageError) as error:
        if isinstance(error, InvalidInputError):
            error.reason = renamed(error.reason)
        error.args = tuple(map(renamed, error.args))
        raise


class TraceWriter:
    """Writer that appends traces to a store; tracestore.create() returns it.

    Use it as a context manager: leaving the block commits, also after an exception, because the traces
    appended before it are complete.

    Examples
    --------
    >>> import numpy as np
    >>> import tracestore
    >>> trace = {"question_id": "q0", "hidden_states": [np.zeros((5, 8))] * 3, "tokens": np.arange(5)}
    >>> with tracestore.create("written.zarr", attention="none") as writer:
    ...     writer.define_score("judge", direction="hallucination")
    ...     writer.append(trace, scores={"judge": 0.25}, label=0)
    >>> tracestore.open("written.zarr")[0].scores
    {'judge': 0.25}

    Attributes
    ----------
    extras : Counter of str
        Number of appended traces that had each key that is no field, and is stored in `Trace.extras`.
    """

    def __init__(
        self,
        writer: StoreWriter,
        score_direction: str = labels.CORRECT,
        provenance: Provenance | None = None,
        attention: str | None = None,
    ) -> None:
        self._writer, self._provenance = writer, provenance
        self._fields = {name: labels.ScoreField(direction) for name, direction in SCORES.items()}
        self._fields[labels.DEFAULT_SCORE_NAME] = labels.ScoreField(score_direction)
        # By the first trace, which may lack it; then the traces after it lack it too.
        self._is_chosen = attention is not None or writer.manifest.generation > 0
        self._is_refused = False
        self._changed: dict[tuple[str, int], TraceValues] = {}  # of stored traces, by question id and sample
        self.extras: Counter[str] = Counter()

    def define_score(
        self,
        name: str,
        *,
        direction: str = labels.CORRECT,
        source: str | None = None,
        version: str | None = None,
        default: bool = False,
    ) -> None:
        """Define a named score, such as that of a judge, whose values are passed to `append`.

        Parameters
        ----------
        name : str
            Letters, digits, "_", "-" and ".".
        direction : {"correct", "hallucination"}
            What a high value means.
        source, version : str, optional
            Where the values come from.
        default : bool
            Make it the default score. The first score of a store is in any case.

        Raises
        ------
        UsageError
            If the name is not valid, or the store has scores of this name with the opposite direction.
        """
        if direction not in labels.DIRECTIONS:
            raise UsageError(f"found {direction!r}, expected one of {', '.join(labels.DIRECTIONS)}")
        field = labels.ScoreField(direction, source, version)
        self._writer.define_score(name, field, is_default=default, is_alone=True)

    def set_lens(
        self,
        unembedding: Any,
        norm_weight: Any = None,
        norm_bias: Any = None,
        bias: Any = None,
        *,
        norm: str = "rms",
        eps: float = 1e-6,
    ) -> None:
        """Store the final norm and the unembedding matrix of the language model, for `TraceStore.lens`.

        They are stored once, with the provenance given to `create`. Setting equal ones again has no effect.

        Parameters
        ----------
        unembedding : np.ndarray or torch.Tensor
            Matrix W ``(V, D)``, for a vocabulary of V tokens. It is read and converted in blocks.
        norm_weight, norm_bias : np.ndarray or torch.Tensor, optional
            Weight and bias ``(D,)`` of the final norm, stored in float32.
        bias : np.ndarray or torch.Tensor, optional
            Bias ``(V,)`` of the logits, stored in float32.
        norm : {"rms", "layer", "none"}
            Kind of the final norm; `Lens` has the formulas.
        eps : float
            Constant of the norm, 0 to 1.

        Raises
        ------
        UsageError
            If the store has other ones, or `norm` or `eps` is not valid.
        InvalidInputError
            If an array has the wrong shape or dtype, or float16 cannot hold a value.
        """
        small = {"final_norm_weight": norm_weight, "final_norm_bias": norm_bias, "unembedding_bias": bias}
        with _named_for_programs():
            self._writer.set_lens(lens_arrays(unembedding, small, norm, eps), self._provenance)

    def append(
        self,
        trace: Mapping[str, Any],
        *,
        score: float | None = None,
        scores: Mapping[str, float] | None = None,
        label: float | None = None,
        group: str | int = "",
    ) -> None:
        """Append one trace. The scores and the group of a trace that the store has replace the stored ones.

        Parameters
        ----------
        trace : Mapping[str, Any]
            The fields that docs/fields.md lists, as in files: `hidden_states`, L arrays of shape ``(S, D)`` or one
            ``(L, S, D)``, or `last_token` ``(L, D)``; optionally `attentions`, L arrays of shape ``(H, S, S)`` or
            ``(S, S)``, in all traces or none; `tokens`, ``(T,)`` integers with T = S or S + 1; `question_id`, texts,
            `prompt_length`, data per token, `label`, `is_correct` and other scores. Other keys are stored as extras.
            Arrays are NumPy arrays or torch tensors.
        score : float, optional
            Value of the score "score", whose direction was given to `create`. A key of the trace may give it instead.
        scores : Mapping[str, float], optional
            Values of scores that `define_score` defined or docs/fields.md lists.
        label : float, optional
            1 for a hallucinated answer, 0 for a correct one.
        group : str or int
            Group for splits; traces of one group belong to the same split.

        Raises
        ------
        InvalidInputError
            If the trace has an invalid or impossible value, an argument that differs from its key, or a key that
            looks like a label or score and is no field, or does not fit the store. Earlier traces are kept.
        UsageError
            If a named score is not defined.
        """
        writer = self._writer
        name = f"append-{writer.manifest.num_traces + writer.num_pending:010d}"
        is_first = not self._is_chosen and not writer.manifest.generation
        need = None if is_first or self._is_refused else writer.attributes.options["attention"] != "none"
        with _named_for_programs():
            record = record_from_dict(trace, source_name=name, position=0, need_attention=need)
            if score is not None or scores or label is not None or group not in (None, ""):
                _add_arguments(record, score, scores or {}, label, group)
            check_agreement(record.scores | ({} if record.label is None else {"label": record.label}))
            self._define_scores(record.scores)
            (self._append_first if need is None else self._append)(record)

    def _append_first(self, record: TraceRecord) -> None:
        """Append a record, the first of which decides whether the store has attention."""
        has_states = record.hidden is not None
        if record.attention is not None or record.edges is not None:
            if self._is_refused:
                expected = "none, as in the first trace; --attention none leaves it out"
                raise field_error("attentions", "attention", expected)
        elif has_states and not self._is_chosen:
            self._writer.choose_attention("none")
            try:
                self._append(record)
            except BaseException:
                self._writer.choose_attention("mean")
                raise
            self._is_chosen = self._is_refused = True
            return
        self._append(record)
        self._is_chosen |= has_states

    def _append(self, record: TraceRecord) -> None:
        """Append a record as a source of its own."""
        writer, provenance = self._writer, self._provenance
        if record.layer_ids is not None:
            provenance = with_layers(provenance, record.layer_ids)
            ids = None if provenance is None else provenance.layer_ids
            if record.layer_ids != ids:
                raise field_error("layer_ids", str(list(record.layer_ids)), f"{list(ids or ())} as in the provenance")
        key, has_values = (record.question_id, record.sample), bool(record.scores or record.group)
        if has_values and writer.manifest.generation and writer.is_pending(key):
            writer.commit()  # Another writer may have added another trace of the key, which keeps its own values.
        num_before = writer.num_pending
        writer.begin_source(None, provenance=provenance)
        try:
            has_arrays = writer.append_packed(writer.pack(record), scores=record.scores, group=record.group)
        except BaseException:
            writer.abort_source()
            raise
        is_known = writer.num_pending == num_before and not writer.keys.num_conflicts  # 0 after a commit
        writer.end_source()
        self.extras.update(record.extra_names if has_arrays else ())
        if has_values and is_known:
            scores, _, group = self._changed.get(key, TraceValues())
            self._changed[key] = TraceValues({**scores, **record.scores}, group=record.group or group)

    def _define_scores(self, scores: Mapping[str, float]) -> None:
        """Define the scores whose names state the meaning of a high value. UsageError for any other one."""
        stored = self._writer.attributes.scores
        for name in by_precedence(scores):
            known = self._fields.get(name)
            if known is not None and (name not in stored or stored[name].direction != known.direction):
                self._writer.define_score(name, known)
            elif name not in stored:
                raise UsageError(f"the score {name!r} is not defined: call define_score() first")

    def flush(self) -> None:
        """Commit the traces appended so far."""
        self._writer.commit()
        changed, self._changed = self._changed, {}
        for key, (scores, _, group) in self._writer.joined.items():
            own = changed.get(key, TraceValues())
            changed[key] = TraceValues({**scores, **own.scores}, group=own.group or group)
        self._writer.joined.clear()
        found = {self._writer.index.find(*key): values for key, values in changed.items()}
        found.pop(-1, None)  # of a refused trace
        self._writer.update_values(found)
        self._writer.commit()

    def close(self) -> None:
        """Commit and release the store; with ``overwrite=True`` also replace the existing store."""
        self.__exit__(None)

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an exception the appended traces are committed, but they do not replace an existing store.
        try:
            if kind is None or not self._writer.replaces_at_commit:
                self.flush()
            if kind is None:
                self._writer.replace_existing()
        finally:
            self._writer.close()


def _add_arguments(
    record: TraceRecord, score: float | None, scores: Mapping[str, float], label: float | None, group: str | int
) -> None:
    """Add the arguments of append() to a record; InvalidInputError if they differ from each other or its trace's keys."""
    record.label = _same("label", record.label, None if label is None else label_value(label, "label"))
    given_group = None if group in (None, "") else question_id_text(group, "group")
    record.group = _same("group", record.group or None, given_group) or ""
    for name, value in (*scores.items(), (labels.DEFAULT_SCORE_NAME, score)):
        if value is not None and (number := score_value(value, name)) is not None:
            record.scores[name] = _same(name, record.scores.get(name), number)


def _same(name: str, key: Any, argument: Any) -> Any:
    """Return the value that a key of the trace, an argument or both have; InvalidInputError if they differ."""
    if key is not None and argument is not None and key != argument:
        raise field_error(name, f"{key!r:.40} in the trace", f"{argument!r:.40} as in the argument")
    return key if argument is None else argument


def create(
    path: str | os.PathLike[str],
    *,
    attention: str | None = None,
    dtype: str | None = None,
    codec: str | None = None,
    overwrite: bool = False,
    append: bool = False,
    score_direction: str = labels.CORRECT,
    provenance: Provenance | Mapping[str, Any] | None = None,
    allow_mixed_provenance: bool = False,
) -> TraceWriter:
    """Create a store, or open one with ``append=True``, and return a writer for it.

    Parameters
    ----------
    path : str or os.PathLike
        Path or URL of the store.
    attention : {"mean", "heads", "none"}, optional
        Whether to store the attention averaged over the heads, of every head, or not at all. Default: that of an
        existing store; of a new one "none" if the first trace has hidden states without attention, otherwise "mean".
    dtype : {"float16", "keep"}, optional
        Dtype of the stored arrays; "keep" keeps that of the source. Default: that of an existing store, or "float16".
    codec : {"none", "blosc-zstd", "blosc-lz4", "zstd"}, optional
        Compression of the large arrays. Default: that of an existing store, or "none".
    overwrite : bool
        Replace an existing store when the writer is closed without an exception.
    append : bool
        Append to the store if it exists.
    score_direction : {"correct", "hallucination"}
        What a high value of the score "score" means; `define_score` of the writer defines others.
    provenance : Provenance or mapping, optional
        Model, layers and prompt that the traces come from. A mapping has the names of Provenance as keys.
    allow_mixed_provenance : bool
        Append to a store whose provenance conflicts with `provenance`.

    Returns
    -------
    TraceWriter
        A context manager with a method `append`.

    Raises
    ------
    UsageError
        If the path cannot be used, an option is invalid, or the provenance conflicts with that of the store.
    StoreLockedError
        If another process replaces the store; with `overwrite`, if another writer has it open.

    Examples
    --------
    >>> import numpy as np
    >>> import tracestore
    >>> hidden = np.zeros((3, 5, 8), "float16")  # L, S, D
    >>> attention = np.tril(np.full((3, 2, 5, 5), 0.2, "float16"))  # L, H, S, S
    >>> with tracestore.create("created.zarr") as writer:
    ...     trace = {"question_id": "q0", "hidden_states": list(hidden), "attentions": list(attention)}
    ...     writer.append(trace | {"tokens": np.arange(5)}, score=0.8)
    >>> tracestore.open("created.zarr")[0].attention.shape
    (3, 5, 5)
    """
    with _named_for_programs():
        return open_writer(
            path,
            attention=attention,
            dtype=dtype,
            codec=codec,
            overwrite=overwrite,
            append=append,
            score_direction=score_direction,
            provenance=provenance,
            allow_mixed_provenance=allow_mixed_provenance,
        )


def open_writer(
    path: str | os.PathLike[str],
    *,
    append: bool = False,
    score_direction: str = labels.CORRECT,
    provenance: Provenance | Mapping[str, Any] | None = None,
    **options: Any,
) -> TraceWriter:
    """Return the same as create(), for commands: errors name their flags. `options` are those of StoreWriter."""
    given = options | {"score_direction": score_direction}
    for name, allowed in _CHOICES.items():
        if given.get(name) not in (None, *allowed):
            raise UsageError(f"found {given[name]!r}, expected one of {', '.join(allowed)}")
    try:
        known = provenance if isinstance(provenance, Provenance | None) else Provenance.from_json(provenance)
    except ValueError as error:
        raise UsageError(str(error)) from None
    writer = StoreWriter(path, exist_ok=append, **options)
    try:
        writer.check_provenance([] if known is None else [known])
    except BaseException:
        writer.close()
        raise
    return TraceWriter(writer, score_direction, known, options.get("attention"))
