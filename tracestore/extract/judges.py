"""Judges: functions that compare an answer with the accepted ones, and return a score from 0 to 1."""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence

import tracestore
from tracestore.store.format.labels import ScoreField
from tracestore.words import squad_words

_ARTICLES = ("a", "an", "the")
# Numbers with separators of thousands, and with decimals; no lists, dates or versions such as 1,2,3 and 12.5.1990.
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!,?\d)")
_DECIMALS = re.compile(r"(?<![\d.,])(?:(\d+)\.(\d+)|(\d{1,3}),(\d{1,2}))(?![.,]?\d)")
# Stands for the decimal point, as no punctuation.
_POINT = "\N{DECIMAL SEPARATOR KEY SYMBOL}"
# Punctuation besides ASCII that the evaluation of TriviaQA removes.
_TRIVIAQA_PUNCTUATION = string.punctuation + "‘’´`"


def loose_words(text: str) -> list[str]:
    """Return the words in lower case without accents, punctuation and articles. A number such as 1,500 or 2.5 is a word."""
    text = unicodedata.normalize("NFKD", text.lower())
    text = "".join(c for c in text if not unicodedata.combining(c))
    text = _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    text = _DECIMALS.sub(lambda number: re.sub("[.,]", _POINT, number[0]), text)
    text = re.sub(f"[{re.escape(string.punctuation)}’‘“”–—]", " ", text)
    return [word for word in text.split() if word not in _ARTICLES]


def triviaqa_words(text: str) -> list[str]:
    """Return the words in lower case without articles, split at punctuation.

    `normalize_answer` in the evaluation script of TriviaQA (Joshi et al., 2017) joins them with spaces.
    """
    text = "".join(" " if c in _TRIVIAQA_PUNCTUATION else c for c in text.lower())
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def exact_match(answer: str, accepted: Sequence[str]) -> float:
    """Return 1 if the answer equals an accepted answer after the normalization of SQuAD, else 0."""
    return float(any(squad_words(answer) == squad_words(candidate) for candidate in accepted))


def triviaqa_match(answer: str, accepted: Sequence[str]) -> float:
    """Return 1 if the answer equals an accepted answer (alias) after the normalization of TriviaQA, else 0."""
    return float(any(triviaqa_words(answer) == triviaqa_words(candidate) for candidate in accepted))


def containment(answer: str, accepted: Sequence[str]) -> float:
    """Return 1 if the answer contains the words of an accepted answer, in sequence, else 0.

    Accents count as absent.
    """
    words = loose_words(answer)
    for candidate in accepted:
        wanted = loose_words(candidate)
        if wanted and any(words[k : k + len(wanted)] == wanted for k in range(len(words) - len(wanted) + 1)):
            return 1.0
    return 0.0


def token_f1(answer: str, accepted: Sequence[str]) -> float:
    """Return the highest F1 score of shared words over the accepted answers, as SQuAD 2.0 defines it."""
    return max((_f1(squad_words(answer), squad_words(candidate)) for candidate in accepted), default=0.0)


def _f1(words: Sequence[str], wanted: Sequence[str]) -> float:
    if not words or not wanted:
        return float(words == wanted)
    return 2 * (Counter(words) & Counter(wanted)).total() / (len(words) + len(wanted))


def rouge_l(answer: str, accepted: Sequence[str]) -> float:
    """Return the highest ROUGE-L over the accepted answers.

    ROUGE-L (Lin, 2004) is the F1 score of the longest common subsequence of words. Words consist of letters and
    digits in lower case, without stemming.
    """
    words = re.findall(r"[^\W_]+", answer.lower())
    best = 0.0
    for candidate in accepted:
        wanted = re.findall(r"[^\W_]+", candidate.lower())
        if words and wanted:
            best = max(best, 2 * _common_subsequence(words, wanted) / (len(words) + len(wanted)))
    return best


def _common_subsequence(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the length of the longest common subsequence."""
    lengths = [0] * (len(other) + 1)
    for word in one:
        previous = lengths
        lengths = [0]
        for k, candidate in enumerate(other):
            lengths.append(previous[k] + 1 if word == candidate else max(previous[k + 1], lengths[k]))
    return lengths[-1]


def containment_f1(answer: str, accepted: Sequence[str]) -> float:
    """Return 1 if the answer contains an accepted answer, else the highest token F1."""
    return containment(answer, accepted) or token_f1(answer, accepted)


# Scores an answer, given the accepted answers.
Judge = Callable[[str, Sequence[str]], float]
JUDGES: dict[str, Judge] = {
    judge.__name__: judge for judge in (containment_f1, containment, token_f1, exact_match, triviaqa_match, rouge_l)
}
DEFAULT_JUDGES = ("containment_f1", "containment", "token_f1")


def judge_answer(names: Sequence[str], answer: str, accepted: Sequence[str]) -> dict[str, float]:
    """Return the score of each judge by its name, with six decimals."""
    return {name: round(JUDGES[name](answer, accepted), 6) for name in names}


def score_field(name: str) -> ScoreField:
    """Return the description of the scores of a judge in a store."""
    return ScoreField(source=f"tracestore extract, judge {name}", version=tracestore.__version__)
