"""The test traces that a detector gets most wrong, as cards."""

from collections.abc import Mapping, Sequence

import numpy as np

from tracestore.data.tokens.answers import answer_span
from tracestore.evaluation.evaluate import RunScores
from tracestore.evaluation.metrics import probability
from tracestore.pages.elements import Html, card, cards, command, element, facts, join, paragraph, tokens
from tracestore.store.html import view_command
from tracestore.store.read.store import TraceStore
from tracestore.store.read.trace import Trace

COUNT = 12
_MAX_TEXT = 600
_MAX_TOKENS = 80
# Names under which files hold the expected answer.
_REFERENCES = ("reference", "reference_answer", "references", "correct_answer", "correct_answers", "gold_answer",
               "answers", "ground_truth")  # fmt: skip


def mean_probabilities(runs: Sequence[RunScores]) -> dict[int, tuple[float, float, int]]:
    """Return the mean probability, the mean distance of the logit above the threshold, and the label by trace."""
    found: dict[int, list[tuple[float, float, int]]] = {}
    for run in runs:
        margins = run.logit - run.threshold
        values = zip(run.trace.tolist(), probability(run.logit), margins, run.y.tolist(), strict=True)
        for trace, p, margin, label in values:
            found.setdefault(trace, []).append((float(p), float(margin), label))
    return {
        trace: (float(np.mean([v[0] for v in of])), float(np.mean([v[1] for v in of])), of[0][2])
        for trace, of in found.items()
    }


def mistake_cards(store: TraceStore, models: Mapping[str, Sequence[RunScores]], name: str) -> Html:
    """Return cards of the wrong predictions that are farthest from the threshold, the most confident first.

    Parameters
    ----------
    store : TraceStore
        The store that the detectors were tested on.
    models : mapping of str to sequence of RunScores
        Test scores of every detector; each card lists all their probabilities.
    name : str
        The detector whose mistakes are shown.
    """
    by_model = {model: mean_probabilities(runs) for model, runs in models.items()}
    wrong = [(trace, v) for trace, v in by_model[name].items() if (v[1] >= 0) != bool(v[2])]
    wrong.sort(key=lambda item: (-abs(item[1][0] - item[1][2]), item[0]))
    if not wrong:
        return paragraph(f"{name} classifies every test trace correctly.")
    shown = [_card(store, trace, label, by_model) for trace, (_, _, label) in wrong[:COUNT]]
    total = len(by_model[name])
    return join([
        paragraph(f"{name} misclassifies {len(wrong):,} of {total:,} test traces; {len(shown)} are shown."),
        cards(shown),
    ])  # fmt: skip


def _card(
    store: TraceStore, index: int, label: int, by_model: Mapping[str, Mapping[int, tuple[float, float, int]]]
) -> Html:
    trace = store[index]
    kind, predicted = ("hallucinated", "correct") if label else ("correct", "hallucinated")
    reference = next((v for v in map(trace.extras.get, _REFERENCES) if v), None)
    if isinstance(reference, list):
        reference = "; ".join(map(str, reference))
    texts = {"Question": trace.question, "Answer": trace.answer, "Reference": reference}
    lines = [
        paragraph(element("strong", f"{name}: "), _cut(str(text))) for name, text in texts.items() if text is not None
    ]
    probabilities = {model: f"{of[index][0]:.3f}" for model, of in by_model.items() if index in of}
    title = f"{trace.question_id}, sample {trace.sample}" if trace.sample else trace.question_id
    return card(
        title, *lines, _token_values(trace), paragraph("Probability of a hallucination:", kind="note"),
        facts(probabilities), command(view_command(store, index)), badge=f"{kind}, predicted {predicted}", kind=kind,
    )  # fmt: skip


def _token_values(trace: Trace) -> Html:
    """Return the tokens of the answer, colored by log-probability; nothing if the trace lacks them."""
    texts, values = trace.tokens_decoded, trace.token_logprob
    if texts is None or values is None:
        return Html("")
    begin, end = answer_span(trace, len(values)) or (0, len(values))
    end = min(end, begin + _MAX_TOKENS)
    texts, values = texts[begin:end], values[begin:end]
    low = min(-4.0, float(np.nanmin(values))) if np.isfinite(values).any() else -4.0
    return tokens(texts, values.tolist(), label="log-probability", low=0.0, high=low)


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} …"
