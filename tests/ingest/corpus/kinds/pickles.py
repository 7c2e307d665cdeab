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
from tests.ingest.corpus.samples import dump, tensor


def record(sample, **more):
    """Return a sample as a dict with the common names."""
    return {
        "question_id": sample.question_id,
        "hidden_states": list(sample.hidden),
        "generated_answer_clean": sample.answer,
        **more,
    }


@kind(count=4, expect="id attention tokens words answer", rows="trivia_qa_traces_batch_0000.pkl")
def pkl_list_of_dicts(s):
    """Write a list of dicts: lists of layers as float16 arrays, attention of all heads, tokens."""
    return record(
        s,
        hidden_states=list(s.hidden.astype("f2")),
        attentions=list(s.attention.astype("f2")),
        tokens=s.tokens,
        tokens_decoded=s.words,
    )


@kind(ids="{}", expect="id question")
def pickle_of_half_tensors(folder, samples):
    """Write a list of dicts with torch float16 tensors, integer ids, protocol 2, suffix .pickle."""
    rows = [
        {"question_id": i, "hidden_states": [tensor(h, "float16") for h in s.hidden], "question": s.question}
        for i, s in enumerate(samples)
    ]
    dump(folder / "states.pickle", rows, protocol=2)


@kind(ids="tqa_{}", expect="id answer")
def p_dict_by_id(folder, samples):
    """Write a dict by question id with stacked arrays (L, S, D), suffix .p."""
    dump(folder / "traces.p", {s.question_id: {"hidden_states": s.hidden, "answer": s.answer} for s in samples})


@kind(layers=4, expect="id tokens answer")
def pkl_traces_key(folder, samples):
    """Write a dict with settings and the list under "traces"."""
    value = {
        "model": "meta-llama/Llama-3.1-8B",
        "created": datetime.datetime(2025, 3, 1, 12, 30),
        "traces": [record(s, tokens=s.tokens.tolist()) for s in samples],
    }
    dump(folder / "run.pkl", value)


@kind(count=2, dim=16, expect="id question answer")
def pkl_data_and_config(folder, samples):
    """Write a dict of "config" and "data", arguments of argparse among the settings."""
    config = {"args": types.SimpleNamespace(temperature=0.7, layers=[1, 2, 3]), "seed": 42}
    dump(folder / "out.pkl", {"config": config, "data": [record(s, question=s.question) for s in samples]})


@kind(ids="nq-{}", expect="id mean")
def pkl_results_by_id(folder, samples):
    """Write a dict by question id below "results"."""
    results = {s.question_id: {"hidden_states": list(s.hidden), "attentions": s.attention.mean(1)} for s in samples}
    dump(folder / "results.pkl", {"dataset": "nq_open", "results": results})


@kind(count=4, expect="id tokens answer")
def pkl_appended_dicts(folder, samples):
    """Write one pickle.dump call per trace into one file (opened with "ab" in a loop)."""
    dump(folder / "hidden_states.pkl", *[record(s, tokens=s.tokens) for s in samples])


@kind(count=5, expect="id answer")
def pkl_header_then_batches(folder, samples):
    """Write several pickle.dump calls: a dict of settings first, then lists of traces."""
    header = {"model_name": "Qwen/Qwen2.5-7B", "num_layers": 3, "batch_size": 2}
    dump(folder / "dump.pkl", header, [record(s) for s in samples[:2]], [record(s) for s in samples[2:]])


@kind(count=2, expect="id tokens answer", rows="triviaqa_batch_0000.pkl.gz")
def gz_nested_lists(s):
    """Write hidden states as nested lists of Python floats, .pkl.gz."""
    return record(s, hidden_states=s.hidden.tolist(), tokens=s.tokens.tolist())


@kind(expect="id attention answer", rows="traces.pkl.bz2")
def bz2_stacked(s):
    """Write stacked arrays (L, S, D) and (L, H, S, S), .pkl.bz2."""
    return record(s, hidden_states=s.hidden, attentions=s.attention)


@kind(ids="{:05d}", expect="id mean answer", rows="traces.pkl.xz")
def xz_head_mean(s):
    """Write attention averaged over heads (L, S, S), .pkl.xz."""
    return record(s, hidden_states=s.hidden, attentions=s.attention.mean(1))


@kind("zstandard", expect="id", rows="traces.pkl.zst")
def zst_hidden_only(s):
    """Write hidden states and ids alone, .pkl.zst."""
    return {"question_id": s.question_id, "hidden_states": s.hidden.astype("f2")}


@kind("joblib", expect="id answer")
def joblib_list(folder, samples):
    """Write a list of dicts written by joblib.dump."""
    import joblib

    joblib.dump([record(s, hidden_states=s.hidden) for s in samples], folder / "traces.joblib")


@kind("joblib", ids="ex{}", expect="id mean")
def joblib_compressed_columns(folder, samples):
    """Write a dict of columns written by joblib.dump with compress=3."""
    import joblib

    columns = {
        "question_id": [s.question_id for s in samples],
        "hidden_states": [s.hidden for s in samples],
        "attentions": [s.attention.mean(1) for s in samples],
    }
    joblib.dump(columns, folder / "features.joblib", compress=3)


@kind(count=4, expect="id question answer tokens")
def pkl_columns(folder, samples):
    """Write a dict of lists of equal length, one list per field."""
    columns = {
        "question_ids": [s.question_id for s in samples],
        "questions": [s.question for s in samples],
        "answers": [s.answer for s in samples],
        "hidden_states": [list(s.hidden) for s in samples],
        "tokens": [s.tokens for s in samples],
    }
    dump(folder / "columns.pkl", columns)


@kind(ids="sciq_{}", expect="id", rows="pairs.pkl")
def pkl_tuples(s):
    """Write a list of tuples (question id, hidden states)."""
    return (s.question_id, s.hidden)


@kind(count=4, expect="label")
def pkl_parallel_lists(folder, samples):
    """Write a tuple of two lists: arrays (L, S, D), and labels (0 or 1)."""
    dump(folder / "activations_and_labels.pkl", ([s.hidden for s in samples], [int(s.score < 0.5) for s in samples]))


@kind(expect="", rows="hs.pkl")
def pkl_bare_arrays(s):
    """Write a list of arrays (L, S, D) and nothing else."""
    return s.hidden


@kind(ids="bb_{}", expect="id")
def pkl_array_by_id(folder, samples):
    """Write a dict from question id to an array (L, S, D)."""
    dump(folder / "hidden_by_id.pkl", {s.question_id: s.hidden for s in samples})


@kind(count=4, expect="id tokens answer")
def pkl_file_per_sample(folder, samples):
    """Write a bare dict in a file per sample, in sub-folders per split."""
    for i, s in enumerate(samples):
        dump(folder / ("train" if i < 3 else "test") / f"{i:04d}.pkl", record(s, tokens=s.tokens))


@kind(expect="id answer")
def pkl_object_array(folder, samples):
    """Write a numpy object array of dicts."""
    dump(folder / "traces.pkl", np.array([record(s) for s in samples], dtype=object))


@kind("pandas", expect="id question")
def pkl_dataframe(folder, samples):
    """Write a pandas DataFrame with an array per cell (df.to_pickle)."""
    import pandas as pd

    rows = [{"question_id": s.question_id, "question": s.question, "hidden_states": s.hidden} for s in samples]
    pd.DataFrame(rows).to_pickle(folder / "df.pkl")


@kind(expect="id answer")
def pkl_ordered_and_default_dicts(folder, samples):
    """Write OrderedDict by id of defaultdicts."""
    rows = collections.OrderedDict()
    for s in samples:
        rows[s.question_id] = collections.defaultdict(list, {"hidden_states": list(s.hidden), "answer": s.answer})
    dump(folder / "results.pickle", rows)


@kind(count=2, expect="id tokens answer")
def pkl_harmless_values(folder, samples):
    """Write values of the standard library next to the arrays: datetime, set, Path, complex, Decimal, UUID, range."""
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


@kind(count=4, expect="id answer")
def pkl_traces_and_settings_files(folder, samples):
    """Write files of traces next to files that hold none: a config pickle, a README, a log, a JSON of metrics."""
    dump(folder / "batch_0.pkl", [record(s) for s in samples[:2]])
    dump(folder / "batch_1.pkl", [record(s) for s in samples[2:]])
    dump(folder / "config.pkl", {"model": "gpt2", "max_new_tokens": 32, "started": datetime.datetime(2025, 5, 1)})
    (folder / "README.md").write_text("Traces of gpt2.\n")
    (folder / "run.log").write_text("done\n")
    (folder / "metrics.json").write_text('{"auroc": 0.71}')


@dataclasses.dataclass
class Row:
    """A class of the user's own script, as a pickle refers to it."""

    question_id: str
    hidden_states: np.ndarray
    answer: str


@kind(expect="id answer", rows="rows.pkl")
def pkl_own_dataclass(s):
    """Write instances of a dataclass of the user's script, whose attributes are the fields."""
    return Row(s.question_id, s.hidden, s.answer)


@kind(refused=True)
def pkl_without_hidden_states(folder, samples):
    """Write answers and scores alone: there is no trace in the file."""
    dump(folder / "answers.pkl", [{"question_id": s.question_id, "answer": s.answer} for s in samples])
    return []
