"""Question files, and generated questions."""

import calendar
import csv
import datetime
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tracestore.errors import InvalidInputError, UsageError
from tracestore.extract.judges import containment
from tracestore.store.io.fsio import open_csv, open_regular

# Name of the question file of this package: 1,653 questions with short answers, in 28 groups.
FACTS = "package:facts"
# Generated questions of each template.
_PER_TEMPLATE = 50


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


def read_questions(source: str | Path) -> list[Question]:
    """Return the questions of a file or of this package.

    Parameters
    ----------
    source : str or Path
        FACTS, a key of GENERATED, perhaps followed by a colon and a seed, or the path of a file: a CSV file with the
        columns question_id, question, answers (separated by |) and optionally group, or JSON lines (.jsonl) with the
        same names, where answers is a list, and question may be a list: what the user writes in each turn of a
        conversation. The accepted answers are those to the last turn.

    Raises
    ------
    UsageError
        There is no such file or set of questions.
    InvalidInputError
        The file is no such file of questions. The message names the question.
    """
    if str(source).startswith("package:") and source != FACTS:
        return _generated(str(source))
    path = Path(__file__).with_name("facts.csv") if source == FACTS else Path(source)
    if not path.is_file():
        raise UsageError(f"{path}: no such file of questions")
    rows: list[Any] = []
    try:
        with open_csv(open_regular(path), "utf-8-sig", "strict") as file:
            if path.suffix == ".jsonl":
                rows = [json.loads(line) for line in file if line.strip()]
            else:
                rows = list(csv.DictReader(file))
    except (ValueError, csv.Error) as error:
        raise InvalidInputError(f"cannot be read: {error}", source=path.name) from None
    questions = []
    seen: set[str] = set()
    for number, row in enumerate(rows):
        try:
            questions.append(_question(row))
            if questions[-1].question_id in seen:
                raise ValueError(f"duplicate question_id {questions[-1].question_id!r}")
        except ValueError as error:
            raise InvalidInputError(f"question {number}: {error}", source=path.name) from None
        seen.add(questions[-1].question_id)
    if not questions:
        raise InvalidInputError("the file holds no question", source=path.name)
    return questions


def _question(row: Any) -> Question:
    """Return the question of a row; ValueError if its values are not those of one."""
    if not isinstance(row, dict):
        raise ValueError(f"found {type(row).__name__}, expected an object")
    if None in row:
        raise ValueError("more cells than columns; put texts with a comma in quotes")
    if missing := [name for name in ("question_id", "question", "answers") if row.get(name) in (None, "", [])]:
        raise ValueError(f"missing {', '.join(missing)}")
    answers = row["answers"].split("|") if isinstance(row["answers"], str) else row["answers"]
    *earlier, text = _texts("question", row["question"])
    (key,), (group,) = _texts("question_id", [row["question_id"]]), _texts("group", [row.get("group") or ""])
    return Question(key, text, tuple(_texts("answers", answers)), group, tuple(earlier))


def _texts(name: str, values: Any) -> list[str]:
    """Return a text or number, or a list of them, as texts; ValueError for other values, such as objects in JSON."""
    values = values if isinstance(values, list) else [values]
    for value in values:
        if not isinstance(value, str | int | float):
            raise ValueError(f"{name}: found {value!r:.60}, expected a text")
    return list(map(str, values))


# Returns a question and its answer for values that are drawn from ranges.
_Template = tuple[Callable[..., tuple[str, object]], tuple[range, ...]]
_SMALL, _TEENS, _TENS = range(2, 10), range(11, 20), range(21, 100)
# Those of the module calendar depend on the locale.
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)


def _convert(many: str, few: str, factor: int) -> _Template:
    return (lambda n: (f"How many {many} are in {n} {few}?", n * factor)), (range(2, 100),)


def _shifted(names: Sequence[str], text: str, step: int, counts: range) -> _Template:
    def make(k: int, n: int) -> tuple[str, object]:
        return text.format(n, names[k]), names[(k + step * n) % len(names)]

    return make, (range(len(names)), counts)


def _weekday_of_date(year: int, month: int, day: int) -> tuple[str, object]:
    weekday = _DAYS[datetime.date(year, month + 1, day).weekday()]
    return f"Which day of the week was {_MONTHS[month]} {day}, {year}?", weekday


def _time(hour: int, minute: int, later: int) -> tuple[str, object]:
    end = 60 * hour + minute + later
    return f"What time is it {later} minutes after {hour}:{minute:02}?", f"{end // 60}:{end % 60:02}"


GENERATED: dict[str, dict[str, _Template]] = {
    "package:arithmetic": {
        "add": (lambda a, b: (f"What is {a} plus {b}?", a + b), (range(2, 21), range(2, 21))),
        "add_tens": (lambda a, b: (f"What is {a} plus {b}?", a + b), (_TENS, _TENS)),
        "add_three": (lambda a, b, c: (f"What is {a} plus {b} plus {c}?", a + b + c), (_SMALL, _SMALL, _SMALL)),
        "subtract": (lambda a, b: (f"What is {a} minus {b}?", a - b), (_TEENS, _SMALL)),
        "subtract_tens": (lambda a, b: (f"What is {a + b} minus {b}?", a), (_TENS, _TENS)),
        "multiply": (lambda a, b: (f"What is {a} times {b}?", a * b), (range(2, 11), range(2, 11))),
        "multiply_teens": (lambda a, b: (f"What is {a} times {b}?", a * b), (_TEENS, _SMALL)),
        "divide": (lambda a, b: (f"What is {a * b} divided by {b}?", a), (range(2, 13), range(2, 13))),
        "half": (lambda a: (f"What is half of {2 * a}?", a), (range(4, 100),)),
        "square": (lambda a: (f"What is the square of {a}?", a * a), (range(3, 100),)),
        "percent": (lambda p, a: (f"What is {p} percent of {20 * a}?", p * a // 5), (range(5, 100, 5), _SMALL)),
        "remainder": (lambda a, b: (f"What is the remainder of {a} divided by {b}?", a % b), (_TENS, range(3, 10))),
    },
    "package:dates": {
        "weekday": _shifted(_DAYS, "Which day of the week is {} days after {}?", 1, range(2, 14)),
        "weekday_before": _shifted(_DAYS, "Which day of the week is {} days before {}?", -1, range(2, 14)),
        "month": _shifted(_MONTHS, "Which month is {} months after {}?", 1, range(2, 12)),
        "month_length": (
            lambda month, year: (
                f"How many days does {_MONTHS[month]} {year} have?",
                calendar.monthrange(year, month + 1)[1],
            ),
            (range(12), range(1990, 2030)),
        ),
        "weekday_of_date": (_weekday_of_date, (range(1990, 2025), range(12), range(1, 29))),
        "year": (lambda a, n: (f"Which year is {n} years after {a}?", a + n), (range(1900, 2000), range(3, 60))),
        "time": (_time, (range(1, 11), range(0, 60, 5), range(10, 60, 5))),
        "minutes": _convert("minutes", "hours", 60),
        "hours": _convert("hours", "days", 24),
        "days": _convert("days", "weeks", 7),
        "meters": _convert("meters", "kilometers", 1000),
        "inches": _convert("inches", "feet", 12),
    },
}


def _generated(name: str) -> list[Question]:
    """Return the questions of a generated set, template after template in turns, so that --limit keeps all of them.

    A question that contains its answer is left out, because a repetition of the question would count as correct.
    """
    base, colon, text = name.removeprefix("package:").partition(":")
    templates = GENERATED.get(f"package:{base}")
    if templates is None or (colon and not text.isdecimal()):
        sets = ", ".join((FACTS, *GENERATED))
        raise UsageError(f"no question set {name}, expected {sets}; a seed may follow: {next(iter(GENERATED))}:1")
    seed = int(text or 0)
    by_template = []
    for template, (make, ranges) in templates.items():
        draws, found = random.Random(f"{base}/{template}/{seed}"), dict[str, tuple[str, ...]]()
        while len(found) < _PER_TEMPLATE:
            question, value = make(*(draws.choice(values) for values in ranges))
            answers = (str(value), f"{value:,}") if isinstance(value, int) and value >= 1000 else (str(value),)
            if not containment(question, answers):
                found[question] = answers
        prefix = f"{base}-{seed}-{template}"
        by_template.append([Question(f"{prefix}-{k}", q, a, template) for k, (q, a) in enumerate(found.items())])
    return [question for turn in zip(*by_template, strict=True) for question in turn]
