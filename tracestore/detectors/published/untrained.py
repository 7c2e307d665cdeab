"""Scores without trained weights: uncertainty of the answer's tokens and of several answers, LLM-Check, and controls.

Semantic entropy and EigenScore give each answer the score of its question. It is computed from all answers in the store,
labeled or not, and is NaN for a question with one answer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

import numpy as np

from tracestore.detectors.published.linear import Fitted, Unfitted
from tracestore.detectors.published.probes import mean_logprob, usable
from tracestore.evaluation.metrics import auroc
from tracestore.features.feature_table import features
from tracestore.features.trace_features import STATISTICS, log_determinant
from tracestore.store.read.store import TraceStore
from tracestore.words import squad_words

# A low log-probability, a high perplexity or entropy and a long answer mark a hallucination.
_SIGNS = {"mean_logprob": -1, "min_logprob": -1, "perplexity": 1, "mean_entropy": 1, "length": 1}
_REFERENCES = {
    "mean_logprob": "Guerreiro et al. 2023, arXiv:2208.05309 (length-normalized log-probability)",
    "min_logprob": "Manakul et al. 2023, arXiv:2303.08896 (maximum of -log p)",
    "perplexity": "Ren et al. 2023, arXiv:2209.15558 (exp(-mean log p))",
    "mean_entropy": "Manakul et al. 2023, arXiv:2303.08896 (average of the entropy)",
    "length": "number of tokens of the answer",
}


@dataclass
class TokenStatistic(Unfitted):
    """A statistic of the answer's tokens.

    It is -mean log p, -min log p, exp(-mean log p), the mean entropy, or the number of tokens.

    Parameters
    ----------
    statistic : {"mean_logprob", "min_logprob", "perplexity", "mean_entropy", "length"}
    """

    statistic: str = "mean_logprob"

    cost: ClassVar[str] = "none beyond generation"

    def __post_init__(self) -> None:
        read = {"length": (), "mean_entropy": ("token_entropy",)}.get(self.statistic, ("token_logprob",))
        self.kind = "control" if self.statistic in ("length", "mean_logprob") else "untrained"  # type: ignore[misc]
        self.fields = ("answer", *read)  # type: ignore[misc]
        self.reference = _REFERENCES[self.statistic]  # type: ignore[misc]

    def score(self, store: TraceStore, indices: np.ndarray) -> np.ndarray:
        """Return the statistic, negative where a low one marks a hallucination."""
        found: np.ndarray = features(store, "tokens")["tokens"][indices, STATISTICS.index(self.statistic)]
        return _SIGNS[self.statistic] * found


@dataclass
class LLMCheck(Fitted):
    """LLM-Check: a log-determinant of the hidden states or the attention of one layer.

    The score is the mean log-eigenvalue of Z J Z^T + 0.001 I, with the answer's states Z and the centering J over
    columns, or the mean log-diagonal of the answer's attention, summed over the heads; of the head mean where no other
    attention is stored. The layer and the sign are those with the largest |AUROC - 0.5| on the training traces.

    Parameters
    ----------
    score_of : {"hidden", "attention"}
    """

    score_of: Literal["hidden", "attention"] = "hidden"
    _layer: int = field(default=-1, init=False, repr=False)
    _sign: int = field(default=1, init=False, repr=False)
    _num_heads: int = field(default=0, init=False, repr=False)

    kind = "untrained"
    layers: ClassVar[str] = "one, chosen on the training traces"
    gives_logits: ClassVar[bool] = False
    reference: ClassVar[str] = "Sriramanan et al. 2024, LLM-Check, NeurIPS (hidden score, attention score)"

    def __post_init__(self) -> None:
        is_hidden = self.score_of == "hidden"
        self.fields = ("hidden_states" if is_hidden else "attention", "answer")  # type: ignore[misc]
        self.cost = "a Gram matrix and its determinant" if is_hidden else "a sum over the diagonal"  # type: ignore[misc]

    def _values(self, store: TraceStore, indices: np.ndarray) -> np.ndarray:
        if self.score_of == "hidden":
            values = features(store, "hidden")["hidden_logdet"]
        else:
            values = features(store, "attention")["attention_logdet"].sum(2)
        chosen: np.ndarray = values[indices].astype(np.float64)
        return chosen

    def fit(self, store: TraceStore, indices: np.ndarray, labels: np.ndarray) -> Self:
        """Choose the layer and the sign."""
        values = self._values(store, indices)
        kept = usable(labels, ~np.isnan(values).all(1), f"a score of {self.score_of}")
        values, y = values[kept], labels[kept]
        columns = [auroc(y, column) if np.isfinite(column).all() else 0.5 for column in values.T]
        self._layer = int(np.argmax(np.abs(np.array(columns) - 0.5)))
        self._sign = 1 if columns[self._layer] >= 0.5 else -1
        self._num_heads = store.num_stored_heads if self.score_of == "attention" else 0
        return self

    def score(self, store: TraceStore, indices: np.ndarray) -> np.ndarray:
        """Return the score of the layer, with the sign."""
        return self._sign * self._values(store, indices)[:, self._layer]

    @property
    def chosen(self) -> dict[str, Any]:
        """The layer and the sign."""
        return {} if self._layer < 0 else {"layers": [self._layer], "sign": self._sign}


@dataclass
class GroupRate(Fitted):
    """Share of hallucinations among the training traces of the same group.

    A trace without a group, or of one that training has not seen, gets the share of all training traces.
    """

    _rates: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _rate: float = field(default=0.5, init=False, repr=False)

    kind = "control"
    fields: ClassVar[tuple[str, ...]] = ("group",)
    layers: ClassVar[str] = "none"
    gives_logits: ClassVar[bool] = False
    cost: ClassVar[str] = "none"
    reference: ClassVar[str] = "a detector at this level has learned the groups only"

    def fit(self, store: TraceStore, indices: np.ndarray, labels: np.ndarray) -> Self:
        """Count hallucinations by group."""
        by_group: dict[str, list[int]] = {}
        for k, label in zip(indices.tolist(), labels.tolist(), strict=True):
            by_group.setdefault(store.group(k), []).append(label)
        by_group.pop("", None)  # questions without a group are not alike
        self._rates, self._rate = {name: float(np.mean(of)) for name, of in by_group.items()}, float(np.mean(labels))
        return self

    def score(self, store: TraceStore, indices: np.ndarray) -> np.ndarray:
        """Return the shares."""
        return np.array([self._rates.get(store.group(int(k)), self._rate) for k in indices])


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
