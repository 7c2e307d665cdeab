"""Scores and labels: tables next to the traces, and fields inside them."""

import json

import numpy as np

from tests.ingest.corpus.kinds.pickles import record
from tests.ingest.corpus.registry import kind
from tests.ingest.corpus.samples import dump, make_samples, save_pt, tensor, write_json, write_lines, write_table


def traces_and_table(folder, name, rows, *, samples=None, delimiter=",", encoding="utf-8"):
    """Write a pickle of traces and a table; return the samples."""
    samples = samples or make_samples(4)
    dump(folder / "traces.pkl", [record(s) for s in samples])
    write_table(folder / name, rows(samples), delimiter, encoding)
    return samples


@kind()
def csv_score(folder):
    """Write scores.csv: question_id, score."""
    rows = lambda samples: [{"question_id": s.question_id, "score": s.score} for s in samples]  # noqa: E731
    return [s.expect("id answer score") for s in traces_and_table(folder, "scores.csv", rows)]


@kind()
def csv_bleurt(folder):
    """Write ground_truth_scores.csv: question_id, bleurt_score, other columns of text."""
    rows = lambda samples: [  # noqa: E731
        {"index": i, "question_id": s.question_id, "reference": "x, y", "bleurt_score": s.score}
        for i, s in enumerate(samples)
    ]
    return [s.expect("id score") for s in traces_and_table(folder, "ground_truth_scores.csv", rows)]


@kind()
def csv_hallucination_score(folder):
    """Write hallucination_scores.csv: a high score means a hallucination."""
    rows = lambda samples: [  # noqa: E731
        {"question_id": s.question_id, "hallucination_score": round(1 - s.score, 6)} for s in samples
    ]
    samples = traces_and_table(folder, "hallucination_scores.csv", rows)
    return [s.expect("id", score=1 - s.score, direction="hallucination") for s in samples]


@kind()
def csv_several_metrics(folder):
    """Write scores.csv with rougeL, bleurt and exact_match: the user has to choose one."""
    rows = lambda samples: [  # noqa: E731
        {"question_id": s.question_id, "rougeL": 0.3, "bleurt": s.score, "exact_match": int(s.score > 0.5)}
        for s in samples
    ]
    return [s.expect("id score") for s in traces_and_table(folder, "scores.csv", rows)]


@kind()
def csv_accuracy_among_others(folder):
    """Write results_scores.csv: question_id, acc, seconds, tokens."""
    rows = lambda samples: [  # noqa: E731
        {"question_id": s.question_id, "seconds": 1.5, "acc": s.score, "tokens": 9} for s in samples
    ]
    return [s.expect("id score") for s in traces_and_table(folder, "results_scores.csv", rows)]


@kind()
def csv_correct_labels(folder):
    """Write labels.csv: qid, correct (0 or 1)."""
    rows = lambda samples: [{"qid": s.question_id, "correct": int(s.score > 0.5)} for s in samples]  # noqa: E731
    samples = traces_and_table(folder, "labels.csv", rows)
    return [s.expect("id", score=float(s.score > 0.5)) for s in samples]


@kind()
def csv_is_hallucination(folder):
    """Write annotations.csv: id, is_hallucination as True or False."""
    rows = lambda samples: [{"id": s.question_id, "is_hallucination": s.score < 0.5} for s in samples]  # noqa: E731
    samples = traces_and_table(folder, "annotations.csv", rows)
    return [s.expect("id", score=float(s.score < 0.5), direction="hallucination") for s in samples]


@kind()
def csv_judge_words(folder):
    """Write judge.csv: question_id, verdict as CORRECT or INCORRECT."""
    rows = lambda samples: [  # noqa: E731
        {"question_id": s.question_id, "verdict": "CORRECT" if s.score > 0.5 else "INCORRECT"} for s in samples
    ]
    samples = traces_and_table(folder, "judge.csv", rows)
    return [s.expect("id", score=float(s.score > 0.5)) for s in samples]


@kind()
def tsv_scores(folder):
    """Write scores.tsv with tabs."""
    rows = lambda samples: [{"question_id": s.question_id, "score": s.score} for s in samples]  # noqa: E731
    return [s.expect("id score") for s in traces_and_table(folder, "scores.tsv", rows, delimiter="\t")]


@kind()
def csv_semicolons(folder):
    """Write scores.csv with semicolons, as a spreadsheet exports it."""
    rows = lambda samples: [{"question_id": s.question_id, "score": s.score} for s in samples]  # noqa: E731
    return [s.expect("id score") for s in traces_and_table(folder, "scores.csv", rows, delimiter=";")]


@kind(count=4, ids="frage_ä{}", expect="id score")
def csv_with_byte_order_mark(folder, samples):
    """Write scores.csv in UTF-8 with a byte order mark; ids outside ASCII."""
    rows = lambda samples: [{"question_id": s.question_id, "score": s.score} for s in samples]  # noqa: E731
    traces_and_table(folder, "scores.csv", rows, samples=samples, encoding="utf-8-sig")


@kind(count=4, ids="{}", expect="id score")
def csv_with_integer_ids(folder, samples):
    """Write integer ids in the pickle, and scores.csv with example_id and accuracy."""
    dump(folder / "traces.pkl", [{"example_id": i, "hidden_states": s.hidden} for i, s in enumerate(samples)])
    write_table(folder / "scores.csv", [{"example_id": i, "accuracy": s.score} for i, s in enumerate(samples)])


@kind(count=4, ids="tc_{}", expect="id tokens score")
def csv_by_file_name(folder, samples):
    """Write a file per sample named by its id, which stands nowhere else; scores.csv uses it."""
    for s in samples:
        save_pt(folder / f"{s.question_id}.pt", {"hidden_states": tensor(s.hidden), "tokens": tensor(s.tokens)})
    write_table(folder / "scores.csv", [{"question_id": s.question_id, "score": s.score} for s in samples])


@kind(count=4)
def csv_with_missing_scores(folder, samples):
    """Write scores.csv without a row for one trace, with an empty cell, and with a row for a trace that is not there."""
    rows = [{"question_id": s.question_id, "score": s.score} for s in samples[:2]]
    rows += [{"question_id": "q2", "score": ""}, {"question_id": "q99", "score": 0.5}]
    traces_and_table(folder, "scores.csv", lambda _: rows, samples=samples)
    return [s.expect("id score") for s in samples[:2]] + [s.expect("id", score=None) for s in samples[2:]]


@kind(count=4, expect="id score")
def csv_of_two_splits(folder, samples):
    """Write train/ and test/ with a pickle and a scores.csv each."""
    for name, part in (("train", samples[:3]), ("test", samples[3:])):
        dump(folder / name / "traces.pkl", [record(s) for s in part])
        write_table(folder / name / "scores.csv", [{"question_id": s.question_id, "score": s.score} for s in part])


@kind(count=4, expect="id score")
def json_scores_by_id(folder, samples):
    """Write scores.json: {id: score}."""
    dump(folder / "traces.pkl", [record(s) for s in samples])
    write_json(folder / "scores.json", {s.question_id: s.score for s in samples})


@kind(count=4, expect="id score")
def jsonl_scores(folder, samples):
    """Write eval_scores.jsonl: one object per line with question_id and score."""
    dump(folder / "traces.pkl", [record(s) for s in samples])
    write_lines(folder / "eval_scores.jsonl", [{"question_id": s.question_id, "score": s.score} for s in samples])


@kind(count=4)
def json_labels_in_list(folder, samples):
    """Write labels.json: a list of {"id", "label"} with 1 for a hallucination."""
    dump(folder / "traces.p", [record(s) for s in samples])
    rows = [{"id": s.question_id, "hallucination": int(s.score < 0.5)} for s in samples]
    (folder / "labels.json").write_text(json.dumps(rows, indent=1))
    return [s.expect("id", score=float(s.score < 0.5), direction="hallucination") for s in samples]


@kind(count=4, expect="id label")
def npy_labels_in_order(folder, samples):
    """Write labels.npy in the order of the traces: no ids in it."""
    dump(folder / "traces.pkl", [record(s) for s in samples])
    np.save(folder / "labels.npy", np.array([int(s.score < 0.5) for s in samples]))


@kind(count=4, expect="id answer score", rows="traces.pkl")
def field_score(s):
    """Write the score as a field of the trace."""
    return record(s, score=s.score)


@kind(count=4, expect="id label")
def field_label(folder, samples):
    """Write the label (1 for a hallucination) as a field of the trace."""
    dump(
        folder / "traces.pkl",
        {s.question_id: {"hidden_states": s.hidden, "label": int(s.score < 0.5)} for s in samples},
    )


@kind(count=4)
def field_is_correct(folder, samples):
    """Write is_correct as a bool in the trace; .pt."""
    rows = [{"id": s.question_id, "hidden_states": tensor(s.hidden), "is_correct": s.score > 0.5} for s in samples]
    save_pt(folder / "traces.pt", rows)
    return [s.expect("id", score=float(s.score > 0.5)) for s in samples]


@kind()
def field_hallucinated(folder, samples):
    """Write hallucinated as 0 or 1 in the trace; JSON Lines."""
    rows = [
        {"question_id": s.question_id, "hidden_states": s.hidden.tolist(), "hallucinated": int(s.score < 0.5)}
        for s in samples
    ]
    write_lines(folder / "traces.jsonl", rows)
    return [s.expect("id", score=float(s.score < 0.5), direction="hallucination") for s in samples]


@kind(count=4, expect="id score")
def field_bleurt_in_columns(folder, samples):
    """Write bleurt_score as a column of numbers in a dict of columns."""
    columns = {
        "id": [s.question_id for s in samples],
        "activations": [s.hidden for s in samples],
        "bleurt_score": np.array([s.score for s in samples]),
    }
    dump(folder / "traces.pkl", columns)


@kind(count=4, lengths=(6,), expect="id score")
def tensor_of_rougeL_scores(folder, samples):
    """Write rougeL as a tensor next to a batch of equal lengths; .pt."""
    value = {
        "question_ids": [s.question_id for s in samples],
        "hidden_states": tensor(np.stack([s.hidden for s in samples])),
        "rougeL": tensor(np.array([s.score for s in samples], "f4")),
    }
    save_pt(folder / "batch.pt", value)
