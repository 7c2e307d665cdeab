"""Objects of pickles and torch files in which traces are found: by id, in columns, in nested lists, without names."""

import collections
import json
import pickle
import types

import numpy as np
import pytest

import tracestore
from tests.helpers import convert

LENGTHS = (4, 6, 5)
HIDDEN = [np.random.default_rng(k).standard_normal((2, n, 5)).astype("f2") for k, n in enumerate(LENGTHS)]
LAST = np.stack([h[:, -1] for h in HIDDEN])
IDS = ["q0", "q1", "q2"]
TRACES = [{"question_id": q, "hidden_states": h} for q, h in zip(IDS, HIDDEN, strict=True)]


def dump(path, *values):
    path.write_bytes(b"".join(pickle.dumps(value, 4) for value in values))
    return path


def stored(tmp_path, *values, flags=(), name="in.pkl"):
    """Convert pickled values and return the traces of the store."""
    path = dump(tmp_path / name, *values)
    convert(path, tmp_path / "s.zarr", "--attention", "none", *flags, check=0)
    return list(tracestore.open(tmp_path / "s.zarr"))


def refusal(tmp_path, value, *flags):
    """Return the only line with which a pickled value is refused."""
    done = convert(dump(tmp_path / "in.pkl", value), tmp_path / "s.zarr", "--attention", "none", *flags, check=3)
    assert done.stderr.count("\n") == 1
    return done.stderr


def assert_traces(traces, ids=IDS):
    assert [t.question_id for t in traces] == list(ids)
    for trace, hidden in zip(traces, HIDDEN, strict=True):
        np.testing.assert_array_equal(trace.hidden_states, hidden)


CONFIG = {"model": "m", "args": types.SimpleNamespace(seed=1), "layers": [1, 2]}
WITH_IDS = {
    "traces by id": dict(zip(IDS, [{"hidden_states": h} for h in HIDDEN], strict=True)),
    "arrays by id": dict(zip(IDS, HIDDEN, strict=True)),
    "lists of layers by id": {q: list(h) for q, h in zip(IDS, HIDDEN, strict=True)},
    "modules by id": {q: {f"model.layers.{k}": x[None] for k, x in enumerate(h)} for q, h in zip(IDS, HIDDEN, strict=True)},
    "a list next to settings": {"config": CONFIG, "data": TRACES},
    "traces by id next to settings": {"model": "m", "results": {q: {"hidden_states": h} for q, h in zip(IDS, HIDDEN, strict=True)}},
    "nested by model and data set": {"m": {"d": collections.OrderedDict(zip(IDS, HIDDEN, strict=True))}},
    "lists of two splits": {"train": TRACES[:2], "test": TRACES[2:]},
    "columns": {"question_ids": IDS, "hidden_states": HIDDEN},
    "columns, one of them named by a tuple": {"question_ids": IDS, "hidden_states": HIDDEN, ("seq", "acc"): [1, 0, 1]},
    "columns of lists of layers": {"ids": IDS, "hidden_states": [list(h) for h in HIDDEN], "layers": [7, 8, 9]},
    "rows of tuples": list(zip(IDS, HIDDEN, strict=True)),
    "rows of id and trace": [(q, {"hidden_states": h}) for q, h in zip(IDS, HIDDEN, strict=True)],
    "parallel lists": (HIDDEN, IDS),
    "an object array": np.array(TRACES, dtype=object),
    "a header in the list": [{"model": "m", "date": "today"}, *TRACES],
    "settings with a range and a slice": {"span": range(3), "part": slice(1, None), "runs": TRACES},
    "activations by tuple keys": [{"id": q, "hidden": {(k, "post"): x for k, x in enumerate(h)}} for q, h in zip(IDS, HIDDEN, strict=True)],
    "arrays by id and layer": {(q, k): x for q, h in zip(IDS, HIDDEN, strict=True) for k, x in enumerate(h)},
    "arrays by layer and id": {(k, q): x for k in range(2) for q, x in zip(IDS, [h[k] for h in HIDDEN], strict=True)},
    "tokens first as nested lists": [
        {"id": q, "hidden_states": [list(h[:, k]) for k in range(h.shape[1])], "token_ids": list(range(h.shape[1]))} for q, h in zip(IDS, HIDDEN, strict=True)
    ],
    "outputs of hooks in tuples": [{"id": q, "activations": {f"layers.{k}": (x[None],) for k, x in enumerate(h)}} for q, h in zip(IDS, HIDDEN, strict=True)],
    "a cache next to the id": [{"id": q, "cache": {f"blocks.{k}.hook_resid_post": x for k, x in enumerate(h)}} for q, h in zip(IDS, HIDDEN, strict=True)],
    "tokens first": [
        {"id": q, "hidden_states": h.transpose(1, 0, 2), "tokens": list(range(h.shape[1]))} for q, h in zip(IDS, HIDDEN, strict=True)
    ],
}  # fmt: skip


@pytest.mark.parametrize("value", WITH_IDS.values(), ids=WITH_IDS)
def test_traces_with_ids_are_found(tmp_path, value):
    assert_traces(stored(tmp_path, value))


def test_arrays_without_names_get_the_file_and_their_position(tmp_path):
    assert_traces(stored(tmp_path, HIDDEN), [f"in.pkl:{k}" for k in range(3)])


def test_one_array_gets_the_name_of_its_file(tmp_path):
    for q, hidden in zip(IDS, HIDDEN, strict=True):
        dump(tmp_path / f"{q}.pkl", tuple(layer[None] for layer in hidden))
    convert(tmp_path, tmp_path / "s.zarr", "--attention", "none", check=0)
    assert_traces(list(tracestore.open(tmp_path / "s.zarr")))


def test_a_header_before_other_pickles_is_left_out(tmp_path):
    assert_traces(stored(tmp_path, {"model": "m"}, TRACES[:2], TRACES[2:]))


def test_lists_over_traces_for_each_module_are_columns(tmp_path):
    value = {f"layers.{k}": [h[k] for h in HIDDEN] for k in range(2)}
    assert_traces(stored(tmp_path, value), [f"in.pkl:{k}" for k in range(3)])


def test_the_answers_below_a_question_are_its_samples(tmp_path):
    answers = [{"text": f"a{k}", "hidden_states": h} for k, h in enumerate(HIDDEN)]
    traces = stored(tmp_path, [{"id": "q", "question": "Why?", "generations": answers}])
    assert [(t.question_id, t.sample, t.question, t.answer) for t in traces] == [
        ("q", k, "Why?", f"a{k}") for k in range(3)
    ]


def test_ids_that_repeat_get_the_key_around_them(tmp_path):
    value = {"m": {"nq": {"1": {"hidden_states": HIDDEN[0]}}, "tqa": {"1": {"hidden_states": HIDDEN[1]}}}}
    assert [t.question_id for t in stored(tmp_path, value)] == ["nq/1", "tqa/1"]


def test_columns_give_each_trace_its_values(tmp_path):
    value = {"ids": IDS, "hidden_states": HIDDEN, "questions": ["a?", "b?", "c?"], "labels": np.array([1, 0, 1])}
    traces = stored(tmp_path, value | {"tokens": [list(range(n)) for n in LENGTHS], "model": "m"})
    assert_traces(traces)
    assert [(t.question, t.label, t.num_tokens) for t in traces] == [("a?", 1, 4), ("b?", 0, 6), ("c?", 1, 5)]
    assert all(t.extras["model"] == "m" for t in traces)


def test_padding_tells_which_axis_of_a_stack_counts_traces(tmp_path):
    padded = np.stack([np.pad(h, ((0, 1), (0, 6 - h.shape[1]), (0, 0)), constant_values=0) for h in HIDDEN])
    padded[:, 2] = padded[:, 1]  # three layers for three traces
    traces = stored(tmp_path, {"ids": IDS, "hidden_states": padded, "seq_lens": np.array(LENGTHS)})
    for trace, hidden in zip(traces, HIDDEN, strict=True):
        np.testing.assert_array_equal(trace.hidden_states[:2], hidden)


def test_a_stack_of_last_tokens_is_a_trace_for_each_id(tmp_path):
    traces = stored(tmp_path, {"ids": IDS, "last_token": LAST})
    assert [t.question_id for t in traces] == IDS
    np.testing.assert_array_equal([t.last_token for t in traces], LAST)


@pytest.mark.parametrize(
    "value,axes",
    [
        ({k: LAST[:, k] for k in range(2)}, "LND"),
        ({"ids": IDS, "hidden_states": LAST}, "NLD"),
        (dict(zip(IDS, LAST, strict=True)), "NLD"),
    ],
    ids=("layers of matrices", "a stack with ids", "matrices by id"),
)
def test_axes_that_shapes_do_not_show_are_an_option(tmp_path, value, axes):
    assert f"--axes {axes}" in refusal(tmp_path, value)
    traces = stored(tmp_path, value, flags=("--axes", axes))
    np.testing.assert_array_equal([t.last_token for t in traces], LAST)


def test_axes_of_another_rank_are_refused(tmp_path):
    assert "expected the axes NLSD of --axes" in refusal(
        tmp_path, {"ids": IDS, "last_token": LAST[0]}, "--axes", "NLSD"
    )


def test_axes_of_all_tokens_are_an_option(tmp_path):
    traces = stored(tmp_path, [h.transpose(1, 0, 2) for h in HIDDEN], flags=("--axes", "SLD"))
    assert_traces(traces, [f"in.pkl:{k}" for k in range(3)])


REFUSED = {
    "several outputs for one trace": ({"mlp": HIDDEN[0], "attn": HIDDEN[0]}, "--map hidden_states="),
    "an array of another name": ([{"id": "a", "layer_outputs": HIDDEN[0]}], "--map hidden_states=layer_outputs"),
    "a record without states": ({"q0": TRACES[0], "q1": {"question_id": "x"}}, "missing key"),
    "one matrix": (LAST[0], "--axes SD or --axes LD"),
    "no array": ({"model": "m"}, "found model"),
    "texts": ({"a": [{"b": ["c"]}]}, "missing key"),
    "a batch without mask": ({"question_id": "a", "hidden_states": [np.ones((3, 4, 5), "f2")] * 2}, "attention_mask"),
}


@pytest.mark.parametrize("value,words", REFUSED.values(), ids=REFUSED)
def test_what_is_not_certain_is_refused_with_advice(tmp_path, value, words):
    assert words in refusal(tmp_path, value)


def test_a_dict_of_unknown_keys_in_a_tuple_key_is_refused(tmp_path):
    assert "dict key" in refusal(tmp_path, [{"hidden_states": {(1.5, "a"): HIDDEN[0][0]}}])


def test_unnamed_numbers_are_proposed_as_label(tmp_path):
    path = dump(tmp_path / "in.pkl", (HIDDEN, [1, 0, 1]))
    text = convert(path, tmp_path / "t.zarr").stdout
    assert "item_1: 0 or 1 in 3 traces, not used; --map label=item_1 takes them as labels (1: hallucination)" in text
    assert (
        "--map label=item_1" in convert("--dry-run", path, tmp_path / "s.zarr", "--attention", "none", check=0).stdout
    )
    traces = stored(tmp_path, (HIDDEN, [1, 0, 1]), flags=("--map", "label=item_1"))
    assert [t.label for t in traces] == [1, 0, 1]


def test_a_file_of_settings_among_traces_is_skipped(tmp_path):
    dump(tmp_path / "a.pkl", TRACES)
    dump(tmp_path / "config.pkl", {"model": "m", "seed": 3})
    done = convert(tmp_path, tmp_path / "s.zarr", "--attention", "none", check=0)
    assert "skipped config.pkl" in done.stdout
    assert_traces(list(tracestore.open(tmp_path / "s.zarr")))


def test_a_row_of_a_table_belongs_to_the_file_that_it_names(tmp_path):
    (tmp_path / "states").mkdir()
    rows = []
    for k, hidden in enumerate(HIDDEN):
        dump(tmp_path / f"states/{k}.pkl", hidden)
        rows.append({"id": IDS[k], "question": f"{k}?", "file": f"states/{k}.pkl"})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    convert(tmp_path, tmp_path / "s.zarr", "--attention", "none", check=0)
    traces = list(tracestore.open(tmp_path / "s.zarr"))
    assert_traces(traces)
    assert [t.question for t in traces] == ["0?", "1?", "2?"]


@pytest.mark.parametrize("flags", [(), ("--axes", "LND")])
def test_files_of_layers_are_read_together(tmp_path, flags):
    for k in range(2):
        if flags:
            dump(tmp_path / f"layer_{k + 4}_0.pkl", LAST[:2, k])
            dump(tmp_path / f"layer_{k + 4}_2.pkl", LAST[2:, k])
        else:
            dump(tmp_path / f"layer{k + 4}_activations.pkl", LAST[:, k])
            (tmp_path / f"layer{k + 4}_ids.json").write_text(json.dumps(IDS))
    convert(tmp_path, tmp_path / "s.zarr", "--attention", "none", *flags, check=0)
    with tracestore.open(tmp_path / "s.zarr") as store:
        np.testing.assert_array_equal([t.last_token for t in store], LAST)
        assert flags or store.question_ids == IDS
        assert store.provenance[0].layer_ids == (4, 5)


def test_files_of_layers_that_do_not_fit_together_are_refused(tmp_path):
    dump(tmp_path / "layer_1.pkl", LAST[:, 0])
    dump(tmp_path / "layer_2.pkl", {"a": 1})
    assert "layer_2.pkl: found no array" in convert(tmp_path, tmp_path / "s.zarr", check=3).stderr
    dump(tmp_path / "layer_2.pkl", LAST[:2, 1])
    error = convert(tmp_path, tmp_path / "s.zarr", "--axes", "LND", check=3).stderr
    assert "different numbers of rows" in error


def test_as_many_ids_as_the_second_axis_are_not_tokens_of_one_trace(tmp_path):
    value = {"hidden_states": LAST.transpose(1, 0, 2), "question_ids": IDS, "labels": [0, 1, 0]}
    assert "choose --axes LND or --axes LSD" in refusal(tmp_path, value)
    traces = stored(tmp_path, value, flags=("--axes", "LND"))
    assert [(t.question_id, t.label) for t in traces] == [("q0", 0), ("q1", 1), ("q2", 0)]
    for trace, states in zip(traces, LAST, strict=True):
        np.testing.assert_array_equal(trace.last_token, states)


def test_a_list_of_layers_tells_which_axis_counts_them(tmp_path):
    traces = stored(tmp_path, {"hidden_states": LAST.transpose(1, 0, 2), "ids": IDS, "layers": [8, 16]})
    assert [t.question_id for t in traces] == IDS
    np.testing.assert_array_equal([t.last_token for t in traces], LAST)


def test_texts_of_tokens_do_not_count_traces(tmp_path):
    (trace,) = stored(tmp_path, {"hidden_states": HIDDEN[0], "pieces": ["a", "b", "c", "d"]})
    np.testing.assert_array_equal(trace.hidden_states, HIDDEN[0])


@pytest.mark.parametrize("is_last", [True, False])
def test_negative_numbers_count_layers_from_the_last(tmp_path, is_last):
    values = [h[:, -1] if is_last else h for h in HIDDEN]
    records = [{"id": q, "hidden_states": {-1: v[1], -2: v[0]}} for q, v in zip(IDS, values, strict=True)]
    traces = stored(tmp_path, records)
    assert [t.question_id for t in traces] == IDS
    for trace, states in zip(traces, values, strict=True):
        np.testing.assert_array_equal(trace.last_token if is_last else trace.hidden_states, states)


def beams(indices):
    """Return four passes of generate() with three beams: of 4 tokens, and of one token each; the answer has three tokens."""
    rng = np.random.default_rng(0)
    passes = [[rng.standard_normal((3, n, 5)).astype("f2") for _ in range(2)] for n in (4, 1, 1, 1)]
    return {"sequences": np.arange(7)[None], "hidden_states": passes, "beam_indices": np.array(indices)}


@pytest.mark.parametrize("indices", [[[0, 2, 1, -1]], [[0, 2, 1]]])
def test_the_states_of_a_beam_search_are_those_of_the_best_answer(tmp_path, indices):
    value = beams(indices)
    (trace,) = stored(tmp_path, value, name="q7.pkl")
    passes = value["hidden_states"]
    expected = [np.concatenate([passes[k][n][row] for k, row in enumerate((0, 2, 1))]) for n in range(2)]
    np.testing.assert_array_equal(trace.hidden_states, expected)
    assert trace.question_id == "q7"


def test_several_answers_of_a_beam_search_are_refused_with_the_way_out(tmp_path):
    value = beams([[0, 2, 1], [0, 0, 2]])
    assert "one pass over its tokens: model(sequences, output_hidden_states=True)" in refusal(tmp_path, value)
    assert "--padding none" not in refusal(tmp_path, value)


@pytest.mark.parametrize(
    "more", [{"config": {"hidden_size": 5, "num_hidden_layers": 2}}, {"d_model": 5}, {"layers": [8, 16]}]
)
def test_a_vector_holds_layers_behind_each_other_if_their_size_or_numbers_are_given(tmp_path, more):
    traces = stored(tmp_path, {"hidden": LAST.reshape(3, -1), "question_ids": IDS, **more})
    assert [t.question_id for t in traces] == IDS
    np.testing.assert_array_equal([t.last_token for t in traces], LAST)


def test_a_number_of_layers_alone_is_reported(tmp_path):
    records = [{"id": q, "hidden": v, "n_layers": 2} for q, v in zip(IDS, LAST.reshape(3, -1), strict=True)]
    done = convert(dump(tmp_path / "in.pkl", records), tmp_path / "s.zarr", "--dry-run")
    assert "no layers: stored as one layer of 10 values; if n_layers of 5 lie behind each other" in done.stdout
    assert {t.last_token.shape for t in stored(tmp_path, records)} == {(1, 10)}


def test_splits_of_a_classifier(tmp_path):
    columns = {"X": LAST[[0, 1, 2, 0, 1]], "y": np.array([0, 1, 0, 1, 1]), "ids": np.array(list("abcde"))}
    rows = {"train": slice(3), "test": slice(3, 5)}
    value = {f"{name}_{split}": column[k] for split, k in rows.items() for name, column in columns.items()}
    traces = stored(tmp_path, value, flags=("--axes", "NLD"))
    assert [(t.question_id, t.label) for t in traces] == list(zip("abcde", [0, 1, 0, 1, 1], strict=True))
    np.testing.assert_array_equal([t.last_token for t in traces], columns["X"])


def test_metrics_by_level_and_name_next_to_the_statistics(tmp_path):
    manager = {"gen_metrics": {("sequence", "Accuracy"): [1, 0, 1]}, "metrics": {("a", "b"): 0.3}}
    manager["stats"] = {"hidden_states": HIDDEN, "input_texts": ["x", "y", "z"], "greedy_texts": ["1", "2", "3"]}
    traces = stored(tmp_path, manager)
    assert [(t.question, t.answer, t.score) for t in traces] == [("x", "1", 1), ("y", "2", 0), ("z", "3", 1)]
