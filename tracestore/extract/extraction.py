"""Resumable extraction of many questions into files or into a store."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tracestore.errors import UsageError
from tracestore.export.file_formats import pickled_list
from tracestore.extract.judges import DEFAULT_JUDGES, JUDGES, judge_answer, score_field
from tracestore.extract.questions import Question
from tracestore.store.format.provenance import Provenance, require_compatible
from tracestore.store.io import fsio
from tracestore.store.io.files import RemoteURL
from tracestore.store.io.provenance_file import PROVENANCE_FILE, read_provenance, write_provenance
from tracestore.store.read.columns import TraceValues
from tracestore.store.read.store import TraceStore, open_store
from tracestore.store.write.create import open_writer
from tracestore.store.write.writer import StoreWriter

INSTRUCTION = "Give the correct answer in a few words."
COMMIT_INTERVAL_S = 60.0
_FIRST_COMMIT_S = 10.0
# Score from which on an answer counts as correct.
_CORRECT_SCORE = 0.5
# Folder with the scores of each finished file, which scores.csv is merged from.
_SCORES_FOLDER = ".scores"

# Answers some questions with one trace each, in the pickle schema.
AnswerFn = Callable[[Sequence[Question]], list[dict[str, Any]]]


@dataclass
class ExtractReport:
    """Counts of an extraction; the JSON document of the command."""

    out: str
    made: int = 0
    already_there: int = 0
    rejudged: int = 0
    right: int = 0


@dataclass(frozen=True)
class QuestionBatch:
    """The questions whose traces go into one file."""

    number: int
    questions: Sequence[Question]

    @property
    def name(self) -> str:
        """Name of the file."""
        return f"traces_batch_{self.number:04d}.pkl"


def plan_batches(questions: Sequence[Question], per_file: int, shard: tuple[int, int] = (0, 1)) -> list[QuestionBatch]:
    """Return the batches of one shard, each with consecutive questions.

    Parameters
    ----------
    questions : sequence of Question
        All questions.
    per_file : int
        Number of questions in a file.
    shard : (int, int)
        Shard (i, n) holds the files i, i + n, and so on. The files are the same for any n.
    """
    index, count = shard
    begins = range(0, len(questions), per_file)
    return [QuestionBatch(k, questions[b : b + per_file]) for k, b in enumerate(begins) if k % count == index]


def extract_to_folder(
    folder: Path,
    batches: Sequence[QuestionBatch],
    answer: AnswerFn,
    *,
    batch_size: int = 1,
    judges: Sequence[str] = DEFAULT_JUDGES,
    provenance: Provenance | None = None,
    allow_mixed_provenance: bool = False,
) -> Iterator[bool | None]:
    """Write the missing files of a folder, scores.csv and provenance.json.

    Parameters
    ----------
    folder : Path
        Destination. Created if missing.
    batches : sequence of QuestionBatch
        The files to write.
    answer : AnswerFn
        Answers up to `batch_size` questions at once.
    batch_size : int
        Number of questions per call of `answer`.
    judges : sequence of str
        Names in JUDGES. The first one gives the column "score", the others columns of their names.
    provenance : Provenance, optional
        That of the traces.
    allow_mixed_provenance : bool
        Accept a folder with a provenance.json that conflicts. The file then keeps the values on which both agree.

    Yields
    ------
    bool or None
        For each trace, whether its answer is correct; None if it existed before.

    Raises
    ------
    UsageError
        The folder cannot be used, its provenance conflicts, it holds a file of the same name that extraction did not
        write, or an earlier run had other judges, or answers that its file would lose.
    """
    _require_own_files(folder, batches)
    _require_compatible_files(folder, batches, judges)
    try:
        (folder / _SCORES_FOLDER).mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise UsageError(f"{folder}: cannot be used as the folder of traces: {error.strerror}") from None
    with fsio.map_os_errors(folder):
        if provenance is not None:
            _write_provenance(folder / PROVENANCE_FILE, provenance, allow_mixed_provenance)
        for batch in batches:
            path, scores = folder / batch.name, _scores_path(folder, batch)
            if path.exists() and scores.exists() and _is_finished(scores, batch, judges):
                yield from [None] * len(batch.questions)
                continue
            rows = []
            with fsio.atomic_write(path) as file:
                with pickled_list(file) as write:
                    questions = list(enumerate(batch.questions))
                    for question, trace in _traces(questions, answer, batch.number, batch_size):
                        write(trace)
                        text = trace["generated_answer_clean"]
                        values = judge_answer(judges, text, question.answers)
                        row = [question.question_id, question.sample, values, question.template, text]
                        rows.append([*row, question.text, list(question.answers)])
                        yield values[judges[0]] >= _CORRECT_SCORE
                # Until the file is replaced, its scores are those of no question: a killed run writes both again.
                _write_rows(scores, [])
            _write_rows(scores, rows)
        _merge_scores(folder)


def extract_to_store(
    path: Path | RemoteURL,
    questions: Sequence[Question],
    answer: AnswerFn,
    *,
    attention: str,
    codec: str = "none",
    commit_interval_s: float = COMMIT_INTERVAL_S,
    batch_size: int = 1,
    judges: Sequence[str] = DEFAULT_JUDGES,
    provenance: Provenance | None = None,
    allow_mixed_provenance: bool = False,
    lens: Mapping[str, Any] | None = None,
) -> Iterator[bool | Literal["rejudged"] | None]:
    """Append the missing traces of a store, with their scores. Other processes may do the same.

    Parameters
    ----------
    path : Path or RemoteURL
        The store. Created if missing.
    questions : sequence of Question
        The questions. Those whose id is in the store are skipped.
    answer : AnswerFn
        Answers up to `batch_size` questions at once.
    attention, codec : str
        Options of the store, see `tracestore.create`.
    commit_interval_s : float
        Seconds between commits, or a twentieth of the time so far if that is more, so that a long run
        makes few segments. The first commit comes after ten seconds, and the time so far doubles between commits until
        they are this far apart. A kill loses the traces since the last commit. 0: commit after each trace.
    batch_size : int
        Number of questions per call of `answer`.
    judges : sequence of str
        Names in JUDGES. Each gives a named score; the first one is the default if the store has none. Existing traces
        get the scores of their stored answers.
    provenance, allow_mixed_provenance : Provenance, bool
        See `tracestore.create`.
    lens : mapping, optional
        Arguments of `TraceWriter.set_lens`.

    Yields
    ------
    bool, "rejudged" or None
        For each question, whether the answer is correct; if its trace existed before, "rejudged" or, with equal scores,
        None.

    Raises
    ------
    UsageError
        The store cannot be used, has another question under an id, or scores that the judges would mix with theirs.
    """
    stored: dict[tuple[str, int], dict[str, float]] = {}
    try:
        store = open_store(path)
    except UsageError:
        pass  # A missing store, or one without a commit: open_writer() makes the store, or reports the problem.
    else:
        with store:
            stored = _judge_stored(store, questions, judges)
    began = committed = time.monotonic()
    with open_writer(
        path,
        provenance=provenance,
        attention=attention,
        codec=codec,
        append=True,
        on_conflict="keep-first",  # another process has answered the question meanwhile
        allow_mixed_provenance=allow_mixed_provenance,
    ) as writer:
        if lens is not None:
            writer.set_lens(**lens)
        for name in judges:
            writer.define_score(name, **asdict(score_field(name)))
        if any(stored.values()):
            writer.flush()  # the definitions
            _replace_scores(path, stored)
        missing = [(k, question) for k, question in enumerate(questions) if _key(question) not in stored]
        yield from ["rejudged" if changed else None for changed in stored.values()]
        for question, trace in _traces(missing, answer, 0, batch_size):
            values = judge_answer(judges, trace["generated_answer_clean"], question.answers)
            writer.append(trace, scores=values)
            now = time.monotonic()
            if commit_interval_s == 0 or now - committed >= _commit_distance(now - began, commit_interval_s):
                writer.flush()
                committed = now
            yield values[judges[0]] >= _CORRECT_SCORE


def _commit_distance(elapsed_s: float, interval_s: float) -> float:
    """Return the seconds between commits, which grow from _FIRST_COMMIT_S to the interval, and then with the time."""
    return max(min(interval_s, max(_FIRST_COMMIT_S, elapsed_s / 2)), elapsed_s / 20)


def _judge_stored(
    store: TraceStore, questions: Sequence[Question], judges: Sequence[str]
) -> dict[tuple[str, int], dict[str, float]]:
    """Return the new scores of the existing traces, by their keys: those that the judges give their stored answers now.

    Scores that earlier runs have of other judges are included. UsageError as extract_to_store().
    """
    fields, default = store.score_fields, store.score_name
    own = {name for name in JUDGES if name in fields and fields[name].source == score_field(name).source}
    if default in own and default != judges[0]:
        flags = " ".join(f"--judge {name}" for name in dict.fromkeys((default, *judges)))
        reason = f"its default score is of the judge {default}, not {judges[0]}"
        raise UsageError(f"{store.path}: {reason}; pass {flags}, or extract into another store")
    for name in judges:
        if name in fields and name not in own:
            reason = f"its score {name} is of {fields[name].source!r:.80}, not of this judge"
            raise UsageError(f"{store.path}: {reason}; pass another --judge, or extract into another store")
    found: dict[tuple[str, int], dict[str, float]] = {}
    for question in questions:
        if (index := store.internals.index.find(*_key(question))) < 0:
            continue
        trace = store[index]
        if (text := trace.question) not in (None, question.text):
            where = f"{store.path}: its question {question.question_id!r} is {text[:60]!r}, not {question.text[:60]!r}"
            raise UsageError(f"{where}; give this one another id, or extract into another store")
        scores, answer = trace.scores, trace.text("generated_answer_clean")
        names = () if answer is None else (*judges, *(own & scores.keys()))
        values = judge_answer(names, answer or "", question.answers)
        found[_key(question)] = {name: value for name, value in values.items() if scores.get(name) != value}
    return found


def _replace_scores(path: Path | RemoteURL, scores: Mapping[tuple[str, int], Mapping[str, float]]) -> None:
    """Replace defined scores of stored traces."""
    with StoreWriter(path) as writer:
        found = {writer.index.find(*key): TraceValues(values) for key, values in scores.items() if values}
        found.pop(-1, None)  # of a store that was replaced meanwhile
        writer.update_values(found)
        writer.commit()


def _traces(
    questions: Sequence[tuple[int, Question]], answer: AnswerFn, batch_number: int, batch_size: int
) -> Iterator[tuple[Question, dict[str, Any]]]:
    """Yield each question with its trace, given (position, question). Answer `batch_size` questions at once."""
    for begin in range(0, len(questions), batch_size):
        chosen = questions[begin : begin + batch_size]
        traces = answer([question for _, question in chosen])
        traces.reverse()
        for position, question in chosen:
            trace = traces.pop()  # popped, so that the memory of a written trace is released
            trace |= {"question_id": question.question_id, "sample": question.sample}
            trace |= {"example_id": position, "batch_number": batch_number}
            yield question, trace


def _write_provenance(path: Path, provenance: Provenance, allow_mixed: bool) -> None:
    """Write the provenance that all traces of a folder share."""
    if path.exists():
        known = read_provenance(path)
        if not allow_mixed:
            require_compatible([known], [provenance], str(path))
        provenance = known.agreement(provenance)
    write_provenance(path, provenance)


def _scores_path(folder: Path, batch: QuestionBatch) -> Path:
    return folder / _SCORES_FOLDER / f"{batch.name}.json"


def _key(question: Question) -> tuple[str, int]:
    return question.question_id, question.sample


def _is_finished(scores: Path, batch: QuestionBatch, judges: Sequence[str]) -> bool:
    """Return whether a file has the traces of a batch, with these scores; with a lower --limit it has more.

    With a higher --limit, other judges, questions or accepted answers, it has not, and is rewritten.
    """
    rows = json.loads(scores.read_text(encoding="utf-8"))[: len(batch.questions)]
    wanted = [[*_key(q), list(judges), q.text, list(q.answers)] for q in batch.questions]
    return [[*row[:2], list(row[2]), *row[5:]] for row in rows] == wanted


def _write_rows(path: Path, rows: Sequence[Sequence[Any]]) -> None:
    fsio.write_atomic(path, json.dumps(rows).encode())


def _require_own_files(folder: Path, batches: Sequence[QuestionBatch]) -> None:
    """Raise UsageError if a file to be replaced was not written by an extraction."""
    foreign = [folder / batch.name for batch in batches if not _scores_path(folder, batch).exists()]
    if not any((folder / _SCORES_FOLDER).glob("*.json")):
        foreign.append(folder / "scores.csv")
    for path in foreign:
        if path.exists():
            raise UsageError(f"{path}: exists and was not written by tracestore extract; choose another --output")


def _require_compatible_files(folder: Path, batches: Sequence[QuestionBatch], judges: Sequence[str]) -> None:
    """Raise UsageError if a file would lose an answer, or scores.csv would mix judges in its first column."""
    planned = {_scores_path(folder, batch): batch for batch in batches}
    for path in sorted((folder / _SCORES_FOLDER).glob("*.json")):
        rows, batch = json.loads(path.read_text(encoding="utf-8")), planned.get(path)
        if batch is None:
            others = sorted({judge for row in rows for judge in list(row[2])[:1]} - {judges[0]})
            reason = f"has scores of the judge {others[0]}, not {judges[0]}" if others else ""
        else:
            kept = {_key(question) for question in batch.questions}
            lost = [] if _is_finished(path, batch, judges) else [row for row in rows if tuple(row[:2]) not in kept]
            reason = (
                f"has an answer to {lost[0][0]!r}, sample {lost[0][1]}, which this command leaves out" if lost else ""
            )
        if reason:
            raise UsageError(
                f"{folder / path.stem}: {reason}; pass the options of the earlier run, or another --output"
            )


def _merge_scores(folder: Path) -> None:
    """Write scores.csv from the scores of all finished files, including those of other machines."""
    files = sorted((folder / _SCORES_FOLDER).glob("*.json"))
    rows = [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))]
    # Files of an earlier run may have other judges: their cells are empty.
    names = list(dict.fromkeys(name for row in rows for name in list(row[2])[1:]))
    table = []
    for question_id, sample, values, template, answer, *_ in rows:
        score, *_ = values.values()
        table.append([question_id, sample, score, *(values.get(name, "") for name in names), template, answer])
    fsio.write_rows(folder / "scores.csv", ("question_id", "sample", "score", *names, "template", "answer"), table)
