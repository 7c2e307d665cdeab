"""tracestore.create: append traces to a store from Python."""

import os
from collections.abc import Mapping
from typing import Any

from tracestore.errors import UsageError
from tracestore.store.format import labels, schema
from tracestore.store.format.provenance import Provenance
from tracestore.store.write.record import record_from_dict
from tracestore.store.write.values import lens_arrays
from tracestore.store.write.writer import StoreWriter


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
    """

    def __init__(
        self, writer: StoreWriter, score_direction: str = labels.CORRECT, provenance: Provenance | None = None
    ) -> None:
        self._writer, self._score, self._provenance = writer, labels.ScoreField(score_direction), provenance

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
            Make it the default score, which is used where none is chosen. The first score of a store is
            in any case.

        Raises
        ------
        UsageError
            If the name is not valid, or the store has scores of this name with the opposite direction.
        """
        if direction not in labels.DIRECTIONS:
            raise UsageError(f"found {direction!r}, expected one of {', '.join(labels.DIRECTIONS)}")
        self._writer.define_score(name, labels.ScoreField(direction, source, version), is_default=default)

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
        self._writer.set_lens(lens_arrays(unembedding, small, norm, eps), self._provenance)

    def append(
        self,
        trace: Mapping[str, Any],
        *,
        score: float | None = None,
        scores: Mapping[str, float] | None = None,
        label: float | None = None,
        group: str = "",
    ) -> None:
        """Append one trace.

        Parameters
        ----------
        trace : Mapping[str, Any]
            Fields of the pickle schema: `hidden_states`, L arrays of shape ``(S, D)``; `attentions`, L
            arrays of shape ``(H, S, S)``; `tokens`, ``(T,)`` integers with T = S or S + 1; optionally
            `question_id`, `sample`, `tokens_decoded`, `question`, answers, `prompt_length`, data per
            token such as `token_logprob`, `answer_span`, `spans`, `temperature`, `seed` (docs/ingest.md
            lists all keys) and extra fields. Arrays are NumPy arrays or torch tensors.
        score : float, optional
            Value of the score "score", whose direction was given to `create`.
        scores : Mapping[str, float], optional
            Values of named scores, which `define_score` defined.
        label : float, optional
            1 for a hallucinated answer, 0 for a correct one.
        group : str
            Group for splits; traces of one group belong to the same split.

        Raises
        ------
        InvalidInputError
            If the trace does not conform to the schema or does not fit the store. Traces that were
            appended before are kept.
        UsageError
            If a named score is not defined.
        """
        writer, given = self._writer, dict(scores or {})
        for unknown in given.keys() - writer.attributes.scores.keys():
            raise UsageError(f"the score {unknown!r} is not defined: call define_score() first")
        start = writer.manifest.num_traces + writer.num_pending
        name = f"append-{start:010d}"
        need = writer.attributes.options["attention"] != "none"
        record = record_from_dict(trace, source_name=name, position=0, need_attention=need)
        record.label = label
        if score is not None:
            given[labels.DEFAULT_SCORE_NAME] = float(score)
            if writer.attributes.scores.get(labels.DEFAULT_SCORE_NAME) != self._score:
                writer.define_score(labels.DEFAULT_SCORE_NAME, self._score)
        writer.begin_source(name, 0, "", self._provenance)
        try:
            packed = writer.pack(record)
            writer.append_packed(packed, scores=given, group=group)
        except BaseException:
            writer.abort_source()
            raise
        writer.end_source()

    def flush(self) -> None:
        """Commit the traces appended so far."""
        self._writer.commit()

    def close(self) -> None:
        """Commit and release the store; with ``overwrite=True`` also replace the existing store."""
        self._close(can_replace=True)

    def _close(self, *, can_replace: bool) -> None:
        try:
            self._writer.commit()
            if can_replace:
                self._writer.replace_existing()
        finally:
            self._writer.close()

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an exception the appended traces are committed, but they do not replace an existing store.
        self._close(can_replace=kind is None)


def create(
    path: str | os.PathLike[str],
    *,
    attention: str = "mean",
    dtype: str = "float16",
    codec: str = "none",
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
    attention : {"mean", "heads", "none"}
        Whether to store the attention averaged over the heads, of every head, or not at all.
    dtype : {"float16", "keep"}
        Dtype of the stored arrays; "keep" keeps that of the source.
    codec : {"none", "blosc-zstd", "blosc-lz4", "zstd"}
        Compression of the large arrays.
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
        If another writer holds the store.

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
    for value, allowed in (
        (attention, schema.ATTENTION_MODES),
        (dtype, ("float16", "keep")),
        (codec, schema.CODECS),
        (score_direction, labels.DIRECTIONS),
    ):
        if value not in allowed:
            raise UsageError(f"found {value!r}, expected one of {', '.join(allowed)}")
    try:
        known = provenance if isinstance(provenance, Provenance | None) else Provenance.from_json(provenance)
    except ValueError as error:
        raise UsageError(str(error)) from None
    writer = StoreWriter(
        path,
        attention=attention,
        dtype=dtype,
        codec=codec,
        overwrite=overwrite,
        exist_ok=append,
        allow_mixed_provenance=allow_mixed_provenance,
    )
    try:
        writer.check_provenance([] if known is None else [known])
    except BaseException:
        writer.close()
        raise
    return TraceWriter(writer, score_direction, known)
