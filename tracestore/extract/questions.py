"""Question files, and scores of answers."""

import csv
import json
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tracestore.errors import InvalidInputError, UsageError

# Name of the question file of this package: 1,653 questions with short answers, in 28 groups.
FACTS = "package:facts"


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
    for wanted in (Counter(normalize(candidate)) for candidate in accepted):
        best = max(best, 2 * (words & wanted).total() / max(1, words.total() + wanted.total()))
    return best


def containment_score(answer: str, accepted: Sequence[str]) -> float:
    """Return 1 if the answer contains an accepted answer, else the highest token F1."""
    return 1.0 if contains(answer, accepted) else token_f1(answer, accepted)
