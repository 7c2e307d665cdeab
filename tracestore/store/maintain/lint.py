"""Data-quality issues that would disturb a training.

`verify` checks whether the bytes are those that were committed; `lint` checks whether the values are plausible.
Only one trace is in memory at a time.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from tracestore._core import kernels
from tracestore.errors import CorruptStoreError, UsageError, escape_unprintable
from tracestore.store.format import schema
from tracestore.store.format.labels import disagreements
from tracestore.store.maintain.consistency import check_layers, impossible_values
from tracestore.store.read.store import TraceStore, open_store
from tracestore.store.read.trace import Trace
from tracestore.store.trace_fields import PackedEdges
from tracestore.words import plural

# Maximum number of issues of one kind that are listed. All issues are counted.
MAX_EXAMPLES = 100
RARE_CLASS = 0.05
# A length is an outlier if it exceeds the median by more than OUTLIER_SPREADS spreads (a spread is the median
# absolute deviation times 1.4826, the standard deviation of a normal distribution) and exceeds OUTLIER_TIMES
# times the median, because lengths of real answers vary widely.
OUTLIER_SPREADS, OUTLIER_TIMES = 8.0, 3.0

KINDS: dict[str, tuple[str, str]] = {
    "nan": ("error", "leave the trace out of training, or extract it again"),
    "infinite": ("error", "extract it again, or convert with --dtype keep if float16 was too small"),
    "row_sums": ("warning", "check that the attention is the softmax's output, not its input or a thresholded copy"),
    "negative_weight": ("error", "check the extraction: a softmax gives no weight below 0"),
    "large_weight": ("error", "check the extraction: a softmax gives no weight above 1"),
    "not_causal": (
        "warning",
        "if the model is a decoder, check that its mask was on; the store keeps such traces square",
    ),
    "empty_answer": ("warning", "look at the generation, or leave the trace out"),
    "missing_score": (
        "warning",
        "add it with `tracestore score STORE --scores CSV`; without it training leaves the trace out",
    ),
    "invalid_score": ("error", "scores are finite numbers; replace it with `tracestore score`"),
    "label_differs": (
        "warning",
        "the label counts; check which of both is right, and replace the score with `tracestore score`",
    ),
    "conflicting_scores": ("warning", "check the scores file: the same answer to the same question was scored twice"),
    "repeated_score": ("warning", "check the scores file: with a column `sample` each answer gets a score of its own"),
    "open_source": ("error", "its conversion was interrupted: convert the same files again"),
    "score_range": ("error", "choose a score threshold, or store the scores in [0, 1]"),
    "rare_class": ("warning", "choose another score threshold, or collect more of that class"),
    "outlier_length": ("warning", "check that generation stopped; one long trace decides the memory of its batch"),
    "impossible_value": ("error", "no trace can have it: check what wrote the store, and convert the source again"),
    "one_token": ("warning", "check the source: a graph of one token has no structure"),
}


@dataclass(frozen=True)
class LintIssue:
    """A data-quality issue. `index` and `question_id` are None if it concerns the whole store."""

    kind: str
    severity: str
    index: int | None
    question_id: str | None
    found: str
    advice: str


@dataclass
class LintReport:
    """Issues of a store.

    `counts` holds the number of issues of each kind; `findings` lists at most MAX_EXAMPLES of a kind, in store order.
    """

    num_traces: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    findings: list[LintIssue] = field(default_factory=list)

    def add(self, kind: str, trace: Trace | None, found: str) -> None:
        """Count an issue, and keep the first of each kind as examples."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if self.counts[kind] <= MAX_EXAMPLES:
            severity, advice = KINDS[kind]
            index, question_id = (None, None) if trace is None else (trace.index, trace.question_id)
            self.findings.append(LintIssue(kind, severity, index, question_id, found, advice))


def row_tolerance(num_tokens: int) -> float:
    """Return the permitted distance from 1 of the sum of a stored softmax row, or of a mean of such rows.

    The weights of a row are at least 0 and sum to 1. Rounding with a relative error of at most u therefore changes
    the sum by at most u, whatever the length of the row. The coarsest dtype of models is bfloat16, u = 2**-8. The
    mean is stored as float16, u = 2**-11; a weight below float16's normal range has an error of up to 2**-25.
    The factor of 2 allows for a softmax that was rounded before it was normalized.
    """
    return 2 * (2.0**-8 + 2.0**-11 + num_tokens * 2.0**-25)


class _Linter:
    def __init__(self, store: TraceStore) -> None:
        self.store, self.report = store, LintReport(len(store))
        # NaN and infinite values of the arrays of one trace, which are one issue.
        self.nonfinite: dict[str, list[str]] = {"nan": [], "infinite": []}

    def count(self, name: str, array: np.ndarray) -> None:
        """Count NaN and infinite values of an array."""
        for kind, count in (("nan", int(np.isnan(array).sum())), ("infinite", int(np.isinf(array).sum()))):
            if count:
                self.nonfinite[kind].append(f"{count:,} of {array.size:,} values of {name}")

    def hidden(self, trace: Trace, name: str) -> None:
        """Check hidden states for values that are not finite. Few traces have any: the scan for checksums counts them first."""
        dtype = self.store.hidden_dtype
        values = np.ascontiguousarray(getattr(trace, f"{name}_bits"))
        if kernels.checksum_scan([values], schema.dtype_code(dtype), values.size)[0]:
            values = getattr(self.store.private_trace(trace.index), f"{name}_bits")
            self.count(name, schema.as_float32(values, dtype))

    def weights(self, trace: Trace, wide: np.ndarray) -> None:
        """Check that weights are between 0 and 1. Every dtype represents 1 exactly, so rounding gives nothing above it."""
        below, large = int((wide < 0).sum()), wide[(wide > 1) & np.isfinite(wide)]
        if below:
            self.report.add("negative_weight", trace, f"{below:,} attention weights below 0")
        if len(large):
            found = f"{len(large):,} attention weights above 1, the largest {large.max():.4g}"
            self.report.add("large_weight", trace, found)

    def attention(self, trace: Trace) -> None:
        packed, num_tokens = self.store.private_trace(trace.index).attention_packed_bits, trace.num_tokens
        if isinstance(packed, PackedEdges):
            self.edges(trace, packed)
            return
        wide = schema.as_float32(packed, self.store.attention_dtype).reshape(-1, packed.shape[-1])
        self.count("attention", wide)
        self.weights(trace, wide)
        if trace.attention_layout == "causal":
            starts = np.arange(num_tokens) * np.arange(1, num_tokens + 1) // 2
        else:
            starts = np.arange(num_tokens) * num_tokens
            upper = wide.reshape(-1, num_tokens, num_tokens)[:, *np.triu_indices(num_tokens, 1)]
            if upper.any():
                count = int(np.count_nonzero(upper))
                self.report.add("not_causal", trace, f"{count:,} weights on tokens that come later")
        sums = np.add.reduceat(wide, starts, axis=1, dtype=np.float64)
        off = np.abs(sums - 1)
        wrong = off > row_tolerance(num_tokens)
        if wrong.any():
            worst = float(sums.flat[int(np.argmax(np.where(wrong, off, 0)))])
            self.report.add("row_sums", trace, f"{int(wrong.sum()):,} of {wrong.size:,} rows, one of them {worst:.4g}")

    def edges(self, trace: Trace, packed: PackedEdges) -> None:
        wide = schema.as_float32(packed.weight, self.store.attention_dtype)
        self.count("edge weights", wide)
        self.weights(trace, wide)
        source, target = packed.edge_index[:, 0], packed.edge_index[:, 1]
        later = int((source > target).sum())
        if later:
            self.report.add("not_causal", trace, f"{plural(later, 'edge')} from tokens that come later")

    def trace(self, trace: Trace) -> None:
        if trace.num_tokens:
            self.hidden(trace, "hidden_states")
        if not any(self.nonfinite.values()):  # the last token of these states, or one of its own
            self.hidden(trace, "last_token")
        if trace.attention_layout is not None:
            self.attention(trace)
        for kind, found in self.nonfinite.items():
            if found:
                self.report.add(kind, trace, ", ".join(found))
                found.clear()
        answer = trace.answer
        if answer is not None and not answer.strip():
            self.report.add(
                "empty_answer", trace, "an answer of no characters" if not answer else "an answer of blanks"
            )

    def impossible(self) -> None:
        """Check for values that no trace can have, such as a prompt that is longer than the trace.

        CorruptStoreError if checksums of layers, by which layers of remote stores are verified, are not those of the
        files.
        """
        internals, found = self.store.internals, dict[tuple[int, int], str]()
        for number in range(internals.manifest.num_segments):
            check_layers(internals.segment(number))
            found |= {(number, row): reason for row, reason in impossible_values(internals.segment(number))}
        for index in range(len(self.store)) if found else ():
            if reason := found.get(internals.index.row(index).primary_location):
                self.report.add("impossible_value", self.store[index], reason)

    def scores(self, threshold: float | None) -> None:
        """Check for missing scores, and for scores that do not fit the label or several samples of one question.

        These are one answer with two scores, and different answers with one fractional score, as when a file without
        samples scored all of them at once.
        """
        store, scores = self.store, self.store.scores
        for index in np.flatnonzero(np.isnan(scores) & np.isnan(store.labels)):
            self.report.add("missing_score", store[int(index)], "neither a score nor a label")
        for index in np.flatnonzero(np.isinf(scores)):
            self.report.add("invalid_score", store[int(index)], f"score {scores[index]}")
        for index in np.flatnonzero(disagreements(scores, store.labels, threshold, store.score_direction)):
            found = f"label {store.labels[index]:g}, score {scores[index]:g}"
            self.report.add("label_differs", store[int(index)], found)
        samples = store.internals.index.read_column("sample")
        if samples.any():
            stores = np.repeat(np.arange(len(store.internals.members)), np.diff(store.internals.first_traces)).tolist()
            of_question: dict[tuple[int, str], list[int]] = {}
            for index in np.argsort(samples, kind="stable").tolist():
                of_question.setdefault((stores[index], store.question_ids[index]), []).append(index)
            for indices in of_question.values():
                self._samples(store[index] for index in (indices if len(indices) > 1 else ()))

    def _samples(self, traces: Iterable[Trace]) -> None:
        """Compare the samples of a question with the first ones of the same answer and of the same score."""
        of_answer: dict[str, Trace] = {}
        of_score: dict[float, Trace] = {}
        for trace in traces:
            if trace.answer is None:
                continue
            first = of_answer.setdefault(trace.answer, trace)
            if not np.array_equal((first.score, first.label), (trace.score, trace.label), equal_nan=True):
                found = f"the answer of trace {first.index}, sample {first.sample}, has another score or label"
                self.report.add("conflicting_scores", trace, found)
            first = of_score.setdefault(trace.score, trace)
            if trace.answer != first.answer and not trace.score.is_integer():
                found = f"score {trace.score:g}, as trace {first.index}, sample {first.sample}, whose answer is another"
                self.report.add("repeated_score", trace, found)

    def open_sources(self) -> None:
        """Check for sources whose labels and scores are not all stored."""
        for member in self.store.internals.members:
            for number in member.attributes.open_numbers():
                path = escape_unprintable(member.index.source(number).path, 80)
                self.report.add("open_source", None, f"labels and scores of {path} are not all stored")

    def classes(self, score_threshold: float | None) -> None:
        try:
            score_threshold = self.store.internals.score_threshold(score_threshold)
        except UsageError as error:
            self.report.add("score_range", None, str(error).removeprefix(f"{self.store.path}: "))
            return
        targets = self.store.targets(score_threshold)
        targets = targets[~np.isnan(targets)]
        for value, name in ((0.0, "0 (right)"), (1.0, "1 (hallucination)")):
            count = int((targets == value).sum())
            if len(targets) and count < RARE_CLASS * len(targets):
                found = f"class {name}: {count:,} of {len(targets):,} at threshold {score_threshold}"
                self.report.add("rare_class", None, found)

    def lengths(self) -> None:
        lengths = self.store.num_tokens
        known = lengths[lengths > 0]
        if not len(known):
            return
        middle = float(np.median(known))
        spread = 1.4826 * float(np.median(np.abs(known - middle)))
        limit = max(middle + OUTLIER_SPREADS * spread, OUTLIER_TIMES * middle)
        for index in np.flatnonzero(lengths > limit):
            self.report.add(
                "outlier_length",
                self.store[int(index)],
                f"{plural(lengths[index], 'token')}, the median is {middle:,.0f}",
            )
        for index in np.flatnonzero(lengths == 1):
            self.report.add("one_token", self.store[int(index)], "a trace of one token")


def lint_store(
    path: str | os.PathLike[str],
    *,
    score: str | None = None,
    score_threshold: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LintReport:
    """Check every value of every trace, and the classes that a named score gives.

    Raises
    ------
    UsageError
        If there is no store.
    CorruptStoreError
        If a file of the store is damaged.
    """
    with open_store(path, score=score) as store:
        return lint_traces(store, score_threshold, progress)


def lint_traces(
    store: TraceStore, score_threshold: float | None = None, progress: Callable[[int, int], None] | None = None
) -> LintReport:
    """Check an open store; see lint_store()."""
    linter = _Linter(store)
    for index in range(len(store)):
        try:
            linter.trace(store[index])
        except (ValueError, IndexError) as error:
            raise CorruptStoreError(f"{store.path}: trace {index}: {error}") from error
        if progress is not None:
            progress(index + 1, len(store))
    linter.impossible()
    linter.open_sources()
    linter.scores(score_threshold)
    linter.classes(score_threshold)
    linter.lengths()
    return linter.report
