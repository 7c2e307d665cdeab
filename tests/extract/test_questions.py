"""Test the questions that files and the package hold."""

import calendar
import hashlib
import json
import math
import re
from datetime import datetime, timedelta
from fractions import Fraction

import pytest

from tests.helpers import ROOT
from tracestore.errors import InvalidInputError, UsageError
from tracestore.extract.judges import containment
from tracestore.extract.questions import FACTS, GENERATED, Question, read_questions


def test_facts_are_unique_questions():
    questions = read_questions(FACTS)
    assert len(questions) >= 800 and len({q.template for q in questions}) >= 5
    assert len({q.text for q in questions}) == len(questions)
    with pytest.raises(InvalidInputError):
        read_questions(ROOT / "LICENSE")


DAYS, MONTHS = list(calendar.day_name), list(calendar.month_name)[1:]


def by_formula(question):
    """Return the answer to a generated question, from the numbers and names in its text."""
    template, text = question.template, question.text
    n = [int(number) for number in re.findall(r"\d+", text)]
    days = [d for d in DAYS if d in text]
    months = [m for m in MONTHS if m in text]
    units = {"minutes": 60, "hours": 24, "days": 7, "meters": 1000, "inches": 12}
    if template in units:
        return str(n[0] * units[template])
    numbers = {
        **dict.fromkeys(("add", "add_tens", "add_three", "year"), sum),
        **dict.fromkeys(("subtract", "subtract_tens"), lambda n: n[0] - n[1]),
        **dict.fromkeys(("multiply", "multiply_teens"), math.prod),
        "divide": lambda n: Fraction(n[0], n[1]),
        "half": lambda n: Fraction(n[0], 2),
        "square": lambda n: n[0] ** 2,
        "percent": lambda n: Fraction(n[0] * n[1], 100),
        "remainder": lambda n: n[0] % n[1],
    }
    if template in numbers:
        return str(numbers[template](n))
    if template in ("weekday", "weekday_before"):
        return DAYS[(DAYS.index(days[0]) + (n[0] if template == "weekday" else -n[0])) % 7]
    if template == "month":
        return MONTHS[(MONTHS.index(months[0]) + n[0]) % 12]
    if template == "time":
        end = datetime(2000, 1, 1, n[1], n[2]) + timedelta(minutes=n[0])
        return f"{end.hour}:{end.minute:02}"
    year, month = n[-1], MONTHS.index(months[0]) + 1
    if template == "month_length":
        return str(calendar.monthrange(year, month)[1])
    return DAYS[calendar.weekday(year, month, n[0])]


@pytest.mark.parametrize("name", GENERATED)
def test_generated_questions_have_exact_answers(name):
    questions = read_questions(name)
    assert len(questions) == 600 and len({q.text for q in questions}) == len({q.question_id for q in questions}) == 600
    assert [q.template for q in questions[:12]] == list(GENERATED[name])
    for question in questions:
        assert question.answers[0] == by_formula(question), question
        assert containment(question.text, question.answers) == 0
    assert ("4000", "4,000") in {q.answers for q in read_questions("package:dates:3")} or name != "package:dates"


def test_generated_questions_are_a_function_of_the_seed():
    first = read_questions("package:arithmetic")
    assert first == read_questions("package:arithmetic:0") and first[0].question_id == "arithmetic-0-add-0"
    assert not {q.question_id for q in first} & {q.question_id for q in read_questions("package:arithmetic:1")}
    content = json.dumps([[q.question_id, q.text, q.answers] for name in GENERATED for q in read_questions(name)])
    assert hashlib.sha256(content.encode()).hexdigest()[:12] == "ce33609fcebb"
    for unknown in ("package:math", "package:dates:x"):
        with pytest.raises(UsageError, match="expected package:facts, package:arithmetic, package:dates; a seed may"):
            read_questions(unknown)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answers": {"text": ["Paris"], "answer_start": [3]}}, "answers: found .*, expected a text"),
        ({"answers": [["Paris", "paris"]]}, "answers: found"),
        ({"answers": [{"aliases": ["Paris"]}]}, "answers: found"),
        ({"answers": ["Paris", None]}, "answers: found None"),
        ({"question": [{"role": "user", "content": "Where?"}]}, "question: found"),
        ({"question": {"text": "Where?"}}, "question: found"),
        ({"question": ["Where?", None]}, "question: found None"),
        ({"question": [["Where?"]]}, "question: found"),
        ({"question_id": ["q"]}, "question_id: found"),
        ({"question_id": {"id": 1}}, "question_id: found"),
        ({"group": ["a", "b"]}, "group: found"),
        ({"group": {"name": "a"}}, "group: found"),
        ({"answers": []}, "missing answers"),
        ({"question": ""}, "missing question"),
        ({"question_id": None}, "missing question_id"),
    ],
)
def test_values_of_questions_are_texts(tmp_path, row, message):
    """An object or a nested list would become a text of Python, which no answer contains and no user asks."""
    (tmp_path / "q.jsonl").write_text(
        json.dumps({"question_id": "q", "question": "Where?", "answers": ["Paris"]} | row)
    )
    with pytest.raises(InvalidInputError, match=f"question 0: {message}"):
        read_questions(tmp_path / "q.jsonl")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("q.jsonl", "[1]", "expected an object"),
        # A comma in a text without quotes would move the answers.
        (
            "q.csv",
            "question_id,question,answers\nq0,Where is Rome?,Italy\nq1,Where is Paris, France?,Europe\n",
            "question 1: more cells than columns",
        ),
        ("q.csv", "question_id,question\nq,what?\n", "answers"),
    ],
    ids=["list", "more cells", "no answers"],
)
def test_files_of_other_rows_are_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidInputError, match=message):
        read_questions(tmp_path / name)


def test_turns_are_texts_and_numbers_become_texts(tmp_path):
    rows = [
        {"question_id": 0, "question": "How many?", "answers": [4, 4.5, "four"], "group": 3},
        {"question_id": 1, "question": ["How many?", 7], "answers": 8},
    ]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_questions(tmp_path / "q.jsonl") == [
        Question("0", "How many?", ("4", "4.5", "four"), "3"),
        Question("1", "7", ("8",), earlier=("How many?",)),
    ]
