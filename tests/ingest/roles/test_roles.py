"""Keys of other names (--map), layers by number, averaged attention, last tokens, scores inside traces."""

import json
import pickle

import numpy as np
import pytest

import tracestore
from tests.helpers import command, convert, error_of, make_trace, make_traces, write_pickle, write_scores


def stored(tmp_path, traces, *flags):
    """Convert pickled traces and return the open store and the finished command."""
    path = write_pickle(tmp_path / "a.pkl", traces)
    done = convert(path, tmp_path / "s.zarr", *flags)
    return tracestore.open(tmp_path / "s.zarr"), done


def renamed(trace, names):
    return {names.get(key, key): value for key, value in trace.items()}


NAMES = {"hidden_states": "hs", "attentions": "attn", "tokens": "ids", "question_id": "id"}
MAP = ",".join(f"{field}={key}" for field, key in NAMES.items())


def assert_same(store, traces):
    for trace, expected in zip(store, traces, strict=True):
        assert trace.question_id == expected["question_id"]
        np.testing.assert_array_equal(trace.hidden_states, np.stack(expected["hidden_states"]))
        np.testing.assert_array_equal(trace.tokens, expected["tokens"])


def test_keys_of_other_names_are_mapped(tmp_path):
    traces = make_traces(3)
    store, _ = stored(tmp_path, [renamed(t, NAMES) for t in traces], "--map", MAP)
    assert_same(store, traces)
    assert not store[0].extras


def test_a_map_may_be_a_toml_file(tmp_path):
    (tmp_path / "map.toml").write_text("".join(f'{field} = "{key}"\n' for field, key in NAMES.items()))
    traces = make_traces(3)
    store, _ = stored(tmp_path, [renamed(t, NAMES) for t in traces], "--map", tmp_path / "map.toml")
    assert_same(store, traces)


def test_a_map_may_name_a_path_through_nested_dicts(tmp_path):
    traces = make_traces(2)
    nested = [
        {"question_id": t["question_id"], "out": {k: v for k, v in t.items() if k != "question_id"} | {"note": 1}}
        for t in traces
    ]
    pairs = "hidden_states=out.hidden_states,attentions=out.attentions,tokens=out.tokens"
    store, _ = stored(tmp_path, nested, "--map", pairs)
    assert_same(store, traces)
    assert store[0].extras["out"]["note"] == 1


@pytest.mark.parametrize(
    "text,word",
    [
        ("states=hs", "hidden_states"),
        ("hidden_states", "hidden_states=key"),
        ("hidden_states=a,hidden_states=b", "twice"),
        ("", "field=key"),
        ("nowhere.toml", "nowhere.toml"),
    ],
)
def test_a_wrong_map_is_wrong_usage(tmp_path, text, word):
    path = write_pickle(tmp_path / "a.pkl", make_traces(1))
    assert word in error_of("convert", path, tmp_path / "s.zarr", "--map", text, code=2)


def test_the_error_of_a_missing_key_ends_with_the_map_that_helps(tmp_path):
    trace = make_trace(1)
    path = write_pickle(tmp_path / "b.pkl", [{"out": trace, "again": trace}])
    text = error_of("convert", path, tmp_path / "s.zarr", code=3)
    assert "--map hidden_states=out.hidden_states,attentions=out.attentions,tokens=out.tokens" in text
    path = write_pickle(tmp_path / "c.pkl", [{"x": 1}])
    assert "found x; name it with --map hidden_states=KEY" in error_of("convert", path, tmp_path / "s.zarr", code=3)
    assert "missing key, named by --map" in error_of("convert", path, tmp_path / "s.zarr", "--map", MAP, code=3)


@pytest.mark.parametrize("form", ["list", "stacked"])
def test_attention_averaged_over_heads(tmp_path, form):
    traces = make_traces(3, tokens=4)
    for trace in traces:
        means = [a.astype("f8").mean(0).astype("f2") for a in trace["attentions"]]
        trace["attentions"] = means if form == "list" else np.stack(means)
    store, _ = stored(tmp_path, traces)
    assert store.num_heads is None
    for trace, expected in zip(store, traces, strict=True):
        np.testing.assert_array_equal(trace.attention, np.stack(expected["attentions"]))
    error = error_of("convert", tmp_path / "a.pkl", tmp_path / "h.zarr", "--attention", "heads", code=3)
    assert "use --attention mean" in error


def test_hidden_states_alone(tmp_path):
    traces = make_traces(3)
    store, done = stored(tmp_path, [{"hidden_states": t["hidden_states"]} for t in traces], "--attention", "none")
    assert "no token ids in 3 traces" in done.stdout and "no question_id in 3 traces" in done.stdout
    np.testing.assert_array_equal(store[2].hidden_states, np.stack(traces[2]["hidden_states"]))
    assert store.question_ids == ["a.pkl:0", "a.pkl:1", "a.pkl:2"]
    command("verify", tmp_path / "s.zarr", check=0)


@pytest.mark.parametrize("form", ["array", "list", "batch of one", "by layer"])
def test_the_last_token_alone(tmp_path, form):
    traces, values = make_traces(3), []
    for trace in traces:
        last = np.stack([h[-1] for h in trace["hidden_states"]])
        form_of = {"array": last, "list": list(last), "batch of one": [v[None] for v in last]}
        value = form_of.get(form, {4 * k: v for k, v in enumerate(last)})
        values.append({"question_id": trace["question_id"], "last_token": value, "question": "why?", "tokens": [1, 2]})
    store, _ = stored(tmp_path, values)
    for trace, source in zip(store, traces, strict=True):
        np.testing.assert_array_equal(trace.last_token, np.stack([h[-1] for h in source["hidden_states"]]))
        assert trace.question == "why?" and trace.extras["tokens"] == [1, 2]
    command("verify", tmp_path / "s.zarr", check=0)


@pytest.mark.parametrize("form", ["dict", "names", "layer_ids", "layers"])
def test_chosen_layers_with_their_numbers(tmp_path, form):
    traces, ids = make_traces(2, tokens=3), [0, 8, 31]
    values = []
    for trace in traces:
        if form in ("dict", "names"):
            key = (lambda k: k) if form == "dict" else "layer_{}".format
            layers = {
                name: {key(k): layer for k, layer in zip(ids[::-1], trace[name][::-1], strict=True)}
                for name in ("hidden_states", "attentions")
            }
            values.append(trace | layers)
        else:
            values.append(trace | {form: ids})
    store, _ = stored(tmp_path, values)
    assert_same(store, traces)
    (provenance,) = store.internals.attributes.provenance
    assert provenance.layer_ids == tuple(ids)
    again = convert(tmp_path / "a.pkl", tmp_path / "s.zarr")
    assert "1 file already in the store" in again.stdout


def test_traces_of_other_layers_are_refused(tmp_path):
    traces = [t | {"layer_ids": ids} for t, ids in zip(make_traces(2), ([0, 1, 2], [4, 5, 6]), strict=True)]
    path = write_pickle(tmp_path / "a.pkl", traces)
    assert "trace 1, layer_ids: found [4, 5, 6], expected [0, 1, 2]" in error_of(
        "convert", path, tmp_path / "s.zarr", code=3
    )
    path = write_pickle(tmp_path / "b.pkl", [make_trace(3) | {"layer_ids": [1, 1, 2]}])
    assert "layer_ids" in error_of("convert", path, tmp_path / "s.zarr", code=3)


def test_scores_and_labels_inside_traces_are_used_and_reported(tmp_path):
    traces = [
        t | {"bleurt_score": 0.25 * k, "is_hallucination": k > 1, "label": k % 2} for k, t in enumerate(make_traces(4))
    ]
    store, done = stored(tmp_path, traces)
    np.testing.assert_array_equal(store.scores, [0, 0.25, 0.5, 0.75])
    assert [trace.label for trace in store] == [0, 1, 0, 1]
    assert set(store.internals.attributes.scores) == {"bleurt_score", "is_hallucination"}
    assert store.internals.attributes.scores["is_hallucination"].direction == "hallucination"
    assert "score bleurt_score (high: correct): found inside 4 traces" in done.stdout
    assert "label (1: hallucination): found inside 4 traces" in done.stdout


def test_a_scores_file_replaces_scores_inside_traces(tmp_path):
    traces = [t | {"score": 0.25, "label": 1} for t in make_traces(2)]
    scores = tmp_path / "scores.csv"
    scores.write_text("key,score\nq0,0.75\nq1,0.5\n")
    store, done = stored(tmp_path, traces, "--scores", scores, "--id-column", "key")
    np.testing.assert_array_equal(store.scores, [0.75, 0.5])
    assert np.isnan(store[0].label) and "found inside" not in done.stdout and store[0].extras["label"] == 1
    error = error_of("convert", tmp_path / "a.pkl", tmp_path / "t.zarr", "--scores", scores, code=3)
    assert "--id-column" in error


def test_columns_name_keys_of_traces_without_a_scores_file(tmp_path):
    traces = [renamed(t, {"question_id": "qid"}) | {"mine": 0.5, "score": 1.0} for t in make_traces(2)]
    flags = ["--id-column", "qid", "--score-column", "mine"]
    path = write_pickle(tmp_path / "a.pkl", traces)
    assert "--score-direction" in error_of("convert", path, tmp_path / "s.zarr", *flags, code=2)
    store, _ = stored(tmp_path, traces, *flags, "--score-direction", "correct")
    assert store.question_ids == ["q0", "q1"] and list(store.internals.attributes.scores) == ["mine"]
    assert "needs a scores file" in error_of(
        "convert", path, tmp_path / "t.zarr", "--score-direction", "correct", code=2
    )


def test_an_id_column_of_the_score_command(tmp_path):
    stored(tmp_path, make_traces(2))
    scores = write_scores(tmp_path / "x.csv", {"q0": 0.5, "q1": 1.0})
    scores.write_text(scores.read_text().replace("question_id", "id"))
    done = command("score", tmp_path / "s.zarr", "--scores", scores, "--id-column", "id", "--json", check=0)
    assert json.loads(done.stdout)["num_scored"] == 2


def test_values_that_no_field_holds_are_dropped_with_a_count(tmp_path):
    deep = None
    for _ in range(70):
        deep = [deep]
    traces = [
        t | {"logits": np.zeros((40, 50_000), "f4"), "\x1b[2Jdeep": deep, 7: "seven", "note": "kept"}
        for t in make_traces(2)
    ]
    store, done = stored(tmp_path, traces)
    assert store[1].extras == {"note": "kept"}
    assert "logits (2)" in done.stdout and "7 (2)" in done.stdout and "\\x1b[2Jdeep (2)" in done.stdout
    assert "\x1b" not in done.stdout


def test_the_token_without_a_state_is_reported(tmp_path):
    traces = [
        t | {"tokens": np.append(t["tokens"], 5), "tokens_decoded": [*t["tokens_decoded"], "x"]} for t in make_traces(2)
    ]
    _, done = stored(tmp_path, traces)
    assert "one token more than hidden states in 2 traces" in done.stdout


def test_the_prompt_beside_the_sequence_gives_its_length(tmp_path):
    trace = make_trace(3, tokens=6)
    trace["sequences"] = trace.pop("tokens")
    trace["input_ids"] = trace["sequences"][:4]
    store, _ = stored(tmp_path, [trace])
    np.testing.assert_array_equal(store[0].tokens, trace["sequences"])


def test_pickles_behind_each_other(tmp_path):
    traces = make_traces(5)
    for name, values in (("dicts", traces), ("lists", [traces[:2], traces[2:4], traces[4]])):
        for protocol in (2, 4, 5):
            path = tmp_path / f"{name}{protocol}.pkl"
            path.write_bytes(b"".join(pickle.dumps(value, protocol) for value in values))
            convert(path, tmp_path / f"{name}{protocol}.zarr")
            store = tracestore.open(tmp_path / f"{name}{protocol}.zarr")
            assert_same(store, traces)
            assert [trace.source[1] for trace in store] == [0, 1, 2, 3, 4]


def test_what_is_behind_a_pickle_must_be_traces(tmp_path):
    first = pickle.dumps(make_traces(2))
    for rest in (pickle.dumps([]), pickle.dumps(7), b"\x80", b"x", first[:-3]):
        (tmp_path / "a.pkl").write_bytes(first + rest)
        assert "a.pkl" in error_of("convert", tmp_path / "a.pkl", tmp_path / "s.zarr", code=3)
