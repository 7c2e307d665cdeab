"""Uncertainty of several answers to a question: semantic entropy and EigenScore.

Each answer has the score of its question. It is computed from all answers in the store, labeled or not, and is NaN for a
question with one answer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from tracestore.detectors.published.linear import Unfitted
from tracestore.detectors.published.probes import mean_logprob
from tracestore.features.feature_table import features
from tracestore.features.hidden_features import log_determinant
from tracestore.store.read.store import TraceStore
from tracestore.words import squad_words


def _by_question(store: TraceStore, indices: np.ndarray, value: Callable[[np.ndarray], float]) -> np.ndarray:
    """Return for each trace `value` of the store indices of all answers to its question."""
    answers: dict[str, list[int]] = {}
    for k, question in enumerate(store.question_ids.take(np.arange(len(store)))):
        answers.setdefault(question, []).append(k)
    questions = store.question_ids.take(indices)
    values = {q: value(np.array(answers[q])) if len(answers[q]) > 1 else np.nan for q in dict.fromkeys(questions)}
    return np.array([values[q] for q in questions])


@dataclass
class SemanticEntropy(Unfitted):
    """Semantic entropy: entropy over clusters of the answers to a question that mean the same.

    The entropy is -sum_c p_c log p_c in nats. Answers are in one cluster if they are equal after the normalization of
    SQuAD (case, punctuation and articles do not count). The papers ask an entailment model instead, which also joins
    paraphrases: answers of whole sentences are hardly ever equal, so that this detector is meant for short answers.

    Parameters
    ----------
    weights : {"likelihood", "count"}
        "likelihood": p_c is proportional to the sum of exp(mean log-probability of the tokens) over the answers of the
        cluster. "count": p_c is the share of the answers (discrete semantic entropy).
    """

    weights: Literal["likelihood", "count"] = "likelihood"

    cost: ClassVar[str] = "none beyond the generation of K answers"
    reference: ClassVar[str] = (
        "Kuhn et al. 2023, arXiv:2302.09664; Farquhar et al. 2024, Nature 630 (length-normalized likelihoods, summed "
        "over a cluster and normalized over clusters)"
    )

    @property
    def fields(self) -> tuple[str, ...]:  # type: ignore[override]
        """Several answers with texts, and log-probabilities for likelihoods."""
        fields = ("samples", "answer_text")
        return fields if self.weights == "count" else (*fields, "answer", "token_logprob")

    def score(self, store: TraceStore, indices: np.ndarray) -> np.ndarray:
        """Return the entropy of each trace's question; NaN if one of the answers lacks its text or probability."""
        logprob = mean_logprob(store) if self.weights == "likelihood" else np.zeros(len(store))

        def entropy(answers: np.ndarray) -> float:
            texts = [store[k].answer for k in answers.tolist()]
            if None in texts or np.isnan(logprob[answers]).any():
                return np.nan
            _, cluster = np.unique([" ".join(squad_words(text or "")) for text in texts], return_inverse=True)
            p = np.bincount(cluster, np.exp(logprob[answers] - logprob[answers].max()))
            p = p[p > 0] / p.sum()
            return float(-(p * np.log(p)).sum())

        return _by_question(store, indices, entropy)


@dataclass
class EigenScore(Unfitted):
    """EigenScore: mean log-eigenvalue of the covariance of the last tokens of the answers to a question.

    With the states Z (D, K) of the K answers' last tokens in the middle layer, it is log det(Z^T J Z + 0.001 I) / K,
    where J = I - 1 1^T / D centers each state over its columns.
    """

    fields: ClassVar[tuple[str, ...]] = ("samples", "last_token")
    layers: ClassVar[str] = "the middle one"
    cost: ClassVar[str] = "a determinant of size K, beyond the generation of K answers"
    reference: ClassVar[str] = "Chen et al. 2024, INSIDE, arXiv:2402.03744 (EigenScore)"

    def score(self, store: TraceStore, indices: np.ndarray) -> np.ndarray:
        """Return the EigenScore of each trace's question; NaN if a state is not finite."""
        states = features(store, "last")["last"][store.num_layers // 2]

        def eigenscore(answers: np.ndarray) -> float:
            z = states[answers]
            return float(log_determinant(z[None])[0]) if np.isfinite(z).all() else np.nan

        return _by_question(store, indices, eigenscore)
