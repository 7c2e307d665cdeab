"""Question files, and scores of answers."""

import csv
import json
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tracestore.errors import InvalidInputError, UsageError

# Name of the question file of this package: 1,653 questions with short answers, in 28 groups.
FACTS = "package:facts"

# Scores an answer against the accepted answers, from 0 to 1.
Scorer = Callable[[str, Sequence[str]], float]


@dataclass(frozen=True)
class Question:
    """A question with its accepted answers. `template` is the group of the question."""

    question_id: str
    text: str
    answers: tuple[str, ...]
    template: str = ""


def questions_file(name: str) -> Path:
    """Return the path of a question file. FACTS names the file of this package."""
    return Path(__file__).with_name("facts.csv") if name == FACTS else Path(name)


def read_questions(path: Path) -> list[Question]:
    """Return the questions of a file.

    Parameters
    ----------
    path : Path
        CSV file with the columns question_id, question, answers (separated by |) and optionally group,
        or JSON lines (.jsonl) with the same names, where answers is a list.

    Raises
    ------
    UsageError
        There is no such file.
    InvalidInputError
        The file is no such file of questions. The message names the question.
    """
    if not path.is_file():
        raise UsageError(f"{path}: no such file of questions")
    rows: list[dict[str, object]] = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            if path.suffix == ".jsonl":
                rows = [json.loads(line) for line in file if line.strip()]
            else:
                rows = list(csv.DictReader(file))
    except (ValueError, csv.Error) as error:
        raise InvalidInputError(f"cannot be read: {error}", source=path.name) from None
    questions = []
    seen: set[str] = set()
    for number, row in enumerate(rows):
        missing = [k for k in ("question_id", "question", "answers") if not row.get(k)]
        if missing:
            raise InvalidInputError(f"question {number}: missing {', '.join(missing)}", source=path.name)
        answers = row["answers"]
        accepted = answers if isinstance(answers, list) else str(answers).split("|")
        key = str(row["question_id"])
        if key in seen:
            raise InvalidInputError(f"question {number}: duplicate question_id {key!r}", source=path.name)
        seen.add(key)
        questions.append(Question(key, str(row["question"]), tuple(map(str, accepted)), str(row.get("group") or "")))
    if not questions:
        raise InvalidInputError("the file holds no question", source=path.name)
    return questions


def normalize(text: str) -> list[str]:
    """Return the words in lower case without accents, punctuation and articles, as SQuAD's evaluation does."""
    text = unicodedata.normalize("NFKD", text.lower())
    text = "".join(c for c in text if not unicodedata.combining(c))
    text = re.sub(f"[{re.escape(string.punctuation)}’‘“”–—]", " ", text)
    return [word for word in text.split() if word not in ("a", "an", "the")]


def contains(answer: str, accepted: Sequence[str]) -> bool:
    """Return whether the answer contains the words of an accepted answer, in sequence."""
    words = normalize(answer)
    for candidate in accepted:
        wanted = normalize(candidate)
        if wanted and any(words[k : k + len(wanted)] == wanted for k in range(len(words) - len(wanted) + 1)):
            return True
    return False


def token_f1(answer: str, accepted: Sequence[str]) -> float:
    """Return the highest F1 score of shared words over the accepted answers."""
    words = Counter(normalize(answer))
    best = 0.0
    for candidate in accepted:
        wanted = Counter(normalize(candidate))
        shared = sum((words & wanted).values())
        if shared:
            best = max(best, 2 * shared / (sum(words.values()) + sum(wanted.values())))
    return best


def containment_score(answer: str, accepted: Sequence[str]) -> float:
    """Return 1 if the answer contains an accepted answer, else the highest token F1."""
    return 1.0 if contains(answer, accepted) else token_f1(answer, accepted)


def make_scorer(name: str) -> Scorer:
    """Return the scorer "containment" or "bleurt", which needs the package bleurt-pytorch and its weights."""
    if name == "containment":
        return containment_score
    try:
        import torch
        from bleurt_pytorch import BleurtForSequenceClassification, BleurtTokenizer  # type: ignore[import-not-found]
    except ImportError:
        raise UsageError("--scorer bleurt needs the package bleurt-pytorch, which is not installed") from None
    model = BleurtForSequenceClassification.from_pretrained("lucadiliello/BLEURT-20").eval()
    tokenizer = BleurtTokenizer.from_pretrained("lucadiliello/BLEURT-20")

    def bleurt(answer: str, accepted: Sequence[str]) -> float:
        inputs = tokenizer(list(accepted), [answer] * len(accepted), padding="longest", return_tensors="pt")
        with torch.no_grad():
            return float(model(**inputs).logits.max())

    return bleurt
