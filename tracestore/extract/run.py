"""Extraction of many questions into files or a store, continuing after a stop."""

import csv
import io
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracestore.errors import UsageError
from tracestore.export.pickle_list import PickleListWriter
from tracestore.extract.questions import Question
from tracestore.store.format.paths import TEMPORARY_PREFIX
from tracestore.store.io import fsio
from tracestore.store.io.files import RemoteURL
from tracestore.store.read.store import open_store
from tracestore.store.write.create import create

INSTRUCTION = "Give the correct answer in a few words."

AnswerFn = Callable[[Sequence[Question]], list[dict[str, Any]]]
Scorer = Callable[[str, Sequence[str]], float]
COMMIT_INTERVAL_S = 60.0
_PART_FOLDER = ".scores"


@dataclass(frozen=True)
class QuestionBatch:
    """The questions of one file."""

    number: int
    name: str
    questions: tuple[Question, ...]


def plan_batches(
    questions: Sequence[Question], per_file: int, shard: tuple[int, int], prefix: str
) -> list[QuestionBatch]:
    """Consecutive questions a file; shard (i, n) takes files i, i + n, ..., so that the
    files are the same for any number of machines."""
    batches = []
    for number, begin in enumerate(range(0, len(questions), per_file)):
        if number % shard[1] == shard[0]:
            name = f"{prefix}_batch_{number:04d}.pkl"
            batches.append(QuestionBatch(number, name, tuple(questions[begin : begin + per_file])))
    return batches


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_name(TEMPORARY_PREFIX + path.name)
    temporary.write_text(text, encoding="utf-8")
    temporary.rename(path)


def _merge_scores(folder: Path) -> None:
    """scores.csv from the parts of all finished files, whichever machine wrote them."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["question_id", "score", "contained", "token_f1", "template", "answer"])
    for part in sorted((folder / _PART_FOLDER).glob("*.json")):
        writer.writerows(json.loads(part.read_text(encoding="utf-8")))
    _write_text(folder / "scores.csv", out.getvalue())


def _require_own_files(folder: Path, batches: Sequence[QuestionBatch]) -> None:
    """Raise UsageError where a file that would be replaced has no part in `.scores`: somebody else wrote it."""
    parts = folder / _PART_FOLDER
    foreign = [folder / b.name for b in batches if not (parts / f"{b.name}.json").exists()]
    if not any(parts.glob("*.json")):
        foreign.append(folder / "scores.csv")
    for path in foreign:
        if path.exists():
            raise UsageError(f"{path}: exists and was not written by tracestore extract; choose another --out")


def _ids(part: Path) -> list[str]:
    """The questions of a finished file: a file of fewer (--limit) is made again."""
    return [row[0] for row in json.loads(part.read_text(encoding="utf-8"))]


def _score_row(question: Question, answer: str, scorer: Scorer) -> list[Any]:
    from tracestore.extract.questions import contains, token_f1

    return [
        question.question_id,
        round(scorer(answer, question.answers), 6),
        int(contains(answer, question.answers)),
        round(token_f1(answer, question.answers), 6),
        question.template,
        answer,
    ]


def _traces(
    questions: Sequence[tuple[int, Question]], answer: AnswerFn, batch: int, batch_size: int
) -> Iterator[tuple[int, Question, dict[str, Any]]]:
    """(position, question, trace) of each, batch_size of them answered at once."""
    for begin in range(0, len(questions), batch_size):
        chosen = questions[begin : begin + batch_size]
        found = answer([question for _, question in chosen])
        found.reverse()
        for position, question in chosen:
            trace = found.pop()  # what was written is not held
            trace |= {"question_id": question.question_id, "example_id": position, "batch_number": batch}
            yield position, question, trace


def extract_to_folder(
    folder: Path, batches: Sequence[QuestionBatch], answer: AnswerFn, scorer: Scorer, *, batch_size: int = 1
) -> Iterator[tuple[int, int, bool | None]]:
    """Writes the files that are not there yet, and scores.csv; `answer` gets batch_size questions
    at once. Yields after each trace
    (batch number, position, whether it was scored right); None for a file that was there."""
    _require_own_files(folder, batches)
    try:
        (folder / _PART_FOLDER).mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise UsageError(f"{folder}: cannot be used as the folder of traces: {error.strerror}") from None
    with fsio.map_os_errors(folder):
        for batch in batches:
            path = folder / batch.name
            part = folder / _PART_FOLDER / f"{batch.name}.json"
            if path.exists() and part.exists() and _ids(part) == [q.question_id for q in batch.questions]:
                yield batch.number, len(batch.questions), None
                continue
            rows = []
            with fsio.atomic_write(path) as file:
                writer = PickleListWriter(file)
                questions = list(enumerate(batch.questions))
                for position, question, trace in _traces(questions, answer, batch.number, batch_size):
                    writer.append(trace)
                    rows.append(_score_row(question, trace["generated_answer_clean"], scorer))
                    yield batch.number, position, rows[-1][1] >= 0.5
                writer.finish()
                _write_text(part, json.dumps(rows))
        _merge_scores(folder)


def extract_to_store(
    path: Path | RemoteURL,
    questions: Sequence[Question],
    answer: AnswerFn,
    scorer: Scorer,
    *,
    attention: str,
    codec: str = "none",
    commit_interval_s: float = COMMIT_INTERVAL_S,
    batch_size: int = 1,
) -> Iterator[tuple[int, int, bool | None]]:
    """Appends the traces of questions that the store does not have yet, with their scores. A kill
    loses what came after the last commit: `commit_interval_s`, or a twentieth of the time so far
    where that is more, so that a long run leaves few segments; 0: after each trace."""
    done: set[str] = set()
    # No store yet, or one without a commit: create() makes it, or says what is wrong.
    with suppress(UsageError), open_store(path) as store:
        done = {q.question_id for q in questions if q.question_id in store}
    began = committed = time.monotonic()
    with create(path, attention=attention, codec=codec, append=True) as writer:
        wanted = []
        for position, question in enumerate(questions):
            if question.question_id in done:
                yield 0, position, None
            else:
                wanted.append((position, question))
        for position, question, trace in _traces(wanted, answer, 0, batch_size):
            score = scorer(trace["generated_answer_clean"], question.answers)
            writer.append(trace, score=score)
            now = time.monotonic()
            if commit_interval_s == 0 or now - committed >= max(commit_interval_s, (now - began) / 20):
                writer.flush()
                committed = now
            yield 0, position, score >= 0.5
