"""Pickles: what the file as a whole looks like, and how it is compressed."""

import collections
import dataclasses
import datetime
import decimal
import pathlib
import types
import uuid

import numpy as np

from tests.ingest.corpus.registry import kind
from tests.ingest.corpus.samples import dump, make_samples, tensor


def record(sample, **more):
    """Return a sample as a dict with the common names."""
    return {
        "question_id": sample.question_id,
        "hidden_states": list(sample.hidden),
        "generated_answer_clean": sample.answer,
        **more,
    }


@kind()
def pkl_list_of_dicts(folder):
    """Write a list of dicts: lists of layers as float16 arrays, attention of all heads, tokens."""
    samples = make_samples(4)
    rows = [
        record(
            s,
            hidden_states=list(s.hidden.astype("f2")),
            attentions=list(s.attention.astype("f2")),
            tokens=s.tokens,
            tokens_decoded=s.words,
        )
        for s in samples
    ]
    dump(folder / "trivia_qa_traces_batch_0000.pkl", rows)
    return [s.expect("id attention tokens words answer") for s in samples]


@kind()
def pickle_of_half_tensors(folder):
    """Write a list of dicts with torch float16 tensors, integer ids, protocol 2, suffix .pickle."""
    samples = make_samples(3, ids="{}")
    rows = [
        {"question_id": i, "hidden_states": [tensor(h, "float16") for h in s.hidden], "question": s.question}
        for i, s in enumerate(samples)
    ]
    dump(folder / "states.pickle", rows, protocol=2)
    return [s.expect("id question") for s in samples]


@kind()
def p_dict_by_id(folder):
    """Write a dict by question id with stacked arrays (L, S, D), suffix .p."""
    samples = make_samples(3, ids="tqa_{}")
    dump(folder / "traces.p", {s.question_id: {"hidden_states": s.hidden, "answer": s.answer} for s in samples})
    return [s.expect("id answer") for s in samples]


@kind()
def pkl_traces_key(folder):
    """Write a dict with settings and the list under "traces"."""
    samples = make_samples(3, layers=4)
    value = {
        "model": "meta-llama/Llama-3.1-8B",
        "created": datetime.datetime(2025, 3, 1, 12, 30),
        "traces": [record(s, tokens=s.tokens.tolist()) for s in samples],
    }
    dump(folder / "run.pkl", value)
    return [s.expect("id tokens answer") for s in samples]


@kind()
def pkl_data_and_config(folder):
    """Write a dict of "config" and "data", arguments of argparse among the settings."""
    samples = make_samples(2, dim=16)
    config = {"args": types.SimpleNamespace(temperature=0.7, layers=[1, 2, 3]), "seed": 42}
    dump(folder / "out.pkl", {"config": config, "data": [record(s, question=s.question) for s in samples]})
    return [s.expect("id question answer") for s in samples]


@kind()
def pkl_results_by_id(folder):
    """Write a dict by question id below "results"."""
    samples = make_samples(3, ids="nq-{}")
    results = {s.question_id: {"hidden_states": list(s.hidden), "attentions": s.attention.mean(1)} for s in samples}
    dump(folder / "results.pkl", {"dataset": "nq_open", "results": results})
    return [s.expect("id mean") for s in samples]


@kind()
def pkl_appended_dicts(folder):
    """Write one pickle.dump call per trace into one file (opened with "ab" in a loop)."""
    samples = make_samples(4)
    dump(folder / "hidden_states.pkl", *[record(s, tokens=s.tokens) for s in samples])
    return [s.expect("id tokens answer") for s in samples]


@kind()
def pkl_header_then_batches(folder):
    """Write several pickle.dump calls: a dict of settings first, then lists of traces."""
    samples = make_samples(5)
    header = {"model_name": "Qwen/Qwen2.5-7B", "num_layers": 3, "batch_size": 2}
    dump(folder / "dump.pkl", header, [record(s) for s in samples[:2]], [record(s) for s in samples[2:]])
    return [s.expect("id answer") for s in samples]


@kind()
def gz_nested_lists(folder):
    """Write hidden states as nested lists of Python floats, .pkl.gz."""
    samples = make_samples(2)
    rows = [record(s, hidden_states=s.hidden.tolist(), tokens=s.tokens.tolist()) for s in samples]
    dump(folder / "triviaqa_batch_0000.pkl.gz", rows)
    return [s.expect("id tokens answer") for s in samples]


@kind()
def bz2_stacked(folder):
    """Write stacked arrays (L, S, D) and (L, H, S, S), .pkl.bz2."""
    samples = make_samples(3)
    rows = [record(s, hidden_states=s.hidden, attentions=s.attention) for s in samples]
    dump(folder / "traces.pkl.bz2", rows)
    return [s.expect("id attention answer") for s in samples]


@kind()
def xz_head_mean(folder):
    """Write attention averaged over heads (L, S, S), .pkl.xz."""
    samples = make_samples(3, ids="{:05d}")
    rows = [record(s, hidden_states=s.hidden, attentions=s.attention.mean(1)) for s in samples]
    dump(folder / "traces.pkl.xz", rows)
    return [s.expect("id mean answer") for s in samples]


@kind("zstandard")
def zst_hidden_only(folder):
    """Write hidden states and ids alone, .pkl.zst."""
    samples = make_samples(3)
    dump(
        folder / "traces.pkl.zst",
        [{"question_id": s.question_id, "hidden_states": s.hidden.astype("f2")} for s in samples],
    )
    return [s.expect("id") for s in samples]


@kind("joblib")
def joblib_list(folder):
    """Write a list of dicts written by joblib.dump."""
    import joblib

    samples = make_samples(3)
    joblib.dump([record(s, hidden_states=s.hidden) for s in samples], folder / "traces.joblib")
    return [s.expect("id answer") for s in samples]


@kind("joblib")
def joblib_compressed_columns(folder):
    """Write a dict of columns written by joblib.dump with compress=3."""
    import joblib

    samples = make_samples(3, ids="ex{}")
    columns = {
        "question_id": [s.question_id for s in samples],
        "hidden_states": [s.hidden for s in samples],
        "attentions": [s.attention.mean(1) for s in samples],
    }
    joblib.dump(columns, folder / "features.joblib", compress=3)
    return [s.expect("id mean") for s in samples]


@kind()
def pkl_columns(folder):
    """Write a dict of lists of equal length, one list per field."""
    samples = make_samples(4)
    columns = {
        "question_ids": [s.question_id for s in samples],
        "questions": [s.question for s in samples],
        "answers": [s.answer for s in samples],
        "hidden_states": [list(s.hidden) for s in samples],
        "tokens": [s.tokens for s in samples],
    }
    dump(folder / "columns.pkl", columns)
    return [s.expect("id question answer tokens") for s in samples]


@kind()
def pkl_tuples(folder):
    """Write a list of tuples (question id, hidden states)."""
    samples = make_samples(3, ids="sciq_{}")
    dump(folder / "pairs.pkl", [(s.question_id, s.hidden) for s in samples])
    return [s.expect("id") for s in samples]


@kind()
def pkl_parallel_lists(folder):
    """Write a tuple of two lists: arrays (L, S, D), and labels (0 or 1)."""
    samples = make_samples(4)
    dump(folder / "activations_and_labels.pkl", ([s.hidden for s in samples], [int(s.score < 0.5) for s in samples]))
    return [s.expect("label") for s in samples]


@kind()
def pkl_bare_arrays(folder):
    """Write a list of arrays (L, S, D) and nothing else."""
    samples = make_samples(3)
    dump(folder / "hs.pkl", [s.hidden for s in samples])
    return [s.expect() for s in samples]


@kind()
def pkl_array_by_id(folder):
    """Write a dict from question id to an array (L, S, D)."""
    samples = make_samples(3, ids="bb_{}")
    dump(folder / "hidden_by_id.pkl", {s.question_id: s.hidden for s in samples})
    return [s.expect("id") for s in samples]


@kind()
def pkl_file_per_sample(folder):
    """Write a bare dict in a file per sample, in sub-folders per split."""
    samples = make_samples(4)
    for i, s in enumerate(samples):
        dump(folder / ("train" if i < 3 else "test") / f"{i:04d}.pkl", record(s, tokens=s.tokens))
    return [s.expect("id tokens answer") for s in samples]


@kind()
def pkl_object_array(folder):
    """Write a numpy object array of dicts."""
    samples = make_samples(3)
    dump(folder / "traces.pkl", np.array([record(s) for s in samples], dtype=object))
    return [s.expect("id answer") for s in samples]


@kind("pandas")
def pkl_dataframe(folder):
    """Write a pandas DataFrame with an array per cell (df.to_pickle)."""
    import pandas as pd

    samples = make_samples(3)
    rows = [{"question_id": s.question_id, "question": s.question, "hidden_states": s.hidden} for s in samples]
    pd.DataFrame(rows).to_pickle(folder / "df.pkl")
    return [s.expect("id question") for s in samples]


@kind()
def pkl_ordered_and_default_dicts(folder):
    """Write OrderedDict by id of defaultdicts."""
    samples = make_samples(3)
    rows = collections.OrderedDict()
    for s in samples:
        rows[s.question_id] = collections.defaultdict(list, {"hidden_states": list(s.hidden), "answer": s.answer})
    dump(folder / "results.pickle", rows)
    return [s.expect("id answer") for s in samples]


@kind()
def pkl_harmless_values(folder):
    """Write values of the standard library next to the arrays: datetime, set, Path, complex, Decimal, UUID, range."""
    samples = make_samples(2)
    extras = {
        "time": datetime.datetime(2025, 1, 2, tzinfo=datetime.UTC),
        "duration": datetime.timedelta(seconds=3),
        "day": datetime.date(2025, 1, 2),
        "tags": {"a", "b"},
        "frozen": frozenset({1, 2}),
        "source_file": pathlib.PurePosixPath("/data/triviaqa.json"),
        "z": 1 + 2j,
        "cost": decimal.Decimal("0.10"),
        "run": uuid.UUID(int=7),
        "span": range(2, 5),
        "raw": b"\x00\x01",
        "counts": collections.Counter("aab"),
        "scalar": np.float32(0.5),
        "flag": np.True_,
    }
    dump(folder / "traces.pkl", [record(s, tokens=s.tokens, **extras) for s in samples], protocol=5)
    return [s.expect("id tokens answer") for s in samples]


@kind()
def pkl_traces_and_settings_files(folder):
    """Write files of traces next to files that hold none: a config pickle, a README, a log, a JSON of metrics."""
    samples = make_samples(4)
    dump(folder / "batch_0.pkl", [record(s) for s in samples[:2]])
    dump(folder / "batch_1.pkl", [record(s) for s in samples[2:]])
    dump(folder / "config.pkl", {"model": "gpt2", "max_new_tokens": 32, "started": datetime.datetime(2025, 5, 1)})
    (folder / "README.md").write_text("Traces of gpt2.\n")
    (folder / "run.log").write_text("done\n")
    (folder / "metrics.json").write_text('{"auroc": 0.71}')
    return [s.expect("id answer") for s in samples]


@dataclasses.dataclass
class Row:
    """A class of the user's own script, as a pickle refers to it."""

    question_id: str
    hidden_states: np.ndarray
    answer: str


@kind()
def pkl_own_dataclass(folder):
    """Write instances of a dataclass of the user's script, whose attributes are the fields."""
    samples = make_samples(3)
    dump(folder / "rows.pkl", [Row(s.question_id, s.hidden, s.answer) for s in samples])
    return [s.expect("id answer") for s in samples]


@kind(refused=True)
def pkl_without_hidden_states(folder):
    """Write answers and scores alone: there is no trace in the file."""
    samples = make_samples(3)
    dump(folder / "answers.pkl", [{"question_id": s.question_id, "answer": s.answer} for s in samples])
    return []
