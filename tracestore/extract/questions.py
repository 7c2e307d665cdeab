"""Question files."""

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tracestore.errors import InvalidInputError, UsageError

# Name of the question file of this package: 1,653 questions with short answers, in 28 groups.
FACTS = "package:facts"


@dataclass(frozen=True)
class Question:
    """A question with its accepted answers.

    Attributes
    ----------
    question_id, text : str
        Id and text.
    answers : tuple of str
        Accepted answers.
    template : str
        Group of the question.
    earlier : tuple of str
        What the user writes in the turns before the question, each of which the model answers.
    sample : int
        Number of the answer, from 0, among several to the same question.
    """

    question_id: str
    text: str
    answers: tuple[str, ...]
    template: str = ""
    earlier: tuple[str, ...] = ()
    sample: int = 0


def with_samples(questions: Sequence[Question], count: int) -> list[Question]:
    """Return each question `count` times, with the samples 0 to count - 1."""
    return [replace(question, sample=k) for question in questions for k in range(count)]


def questions_file(name: str) -> Path:
    """Return the path of a question file. FACTS names the file of this package."""
    return Path(__file__).with_name("facts.csv") if name == FACTS else Path(name)


def read_questions(path: Path) -> list[Question]:
    """Return the questions of a file.

    Parameters
    ----------
    path : Path
        CSV file with the columns question_id, question, answers (separated by |) and optionally group,
        or JSON lines (.jsonl) with the same names, where answers is a list, and question may be a list: what the
        user writes in each turn of a conversation. The accepted answers are those to the last turn.

    Raises
    ------
    UsageError
        There is no such file.
    InvalidInputError
        The file is no such file of questions. The message names the question.
    """
    if not path.is_file():
        raise UsageError(f"{path}: no such file of questions")
    rows: list[Any] = []
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
        if not isinstance(row, dict):
            found = type(row).__name__
            raise InvalidInputError(f"question {number}: found {found}, expected an object", source=path.name)
        missing = [k for k in ("question_id", "question", "answers") if not row.get(k)]
        if missing:
            raise InvalidInputError(f"question {number}: missing {', '.join(missing)}", source=path.name)
        answers = row["answers"]
        accepted = answers if isinstance(answers, list) else str(answers).split("|")
        key = str(row["question_id"])
        if key in seen:
            raise InvalidInputError(f"question {number}: duplicate question_id {key!r}", source=path.name)
        seen.add(key)
        turns = row["question"] if isinstance(row["question"], list) else [row["question"]]
        *earlier, text = map(str, turns)
        group = str(row.get("group") or "")
        questions.append(Question(key, text, tuple(map(str, accepted)), group, tuple(earlier)))
    if not questions:
        raise InvalidInputError("the file holds no question", source=path.name)
    return questions
