"""The fields of a trace: one table for `create` and `convert`, and values that no trace can have."""

import math

import numpy as np
import pytest

import tracestore
from tests.helpers import command, convert, error_of, make_trace, make_traces, segment_of, write_pickle, write_store
from tests.malicious_inputs.stores import Store
from tracestore.data.tokens.answers import answer_bounds, answer_span
from tracestore.errors import CorruptStoreError, InvalidInputError, UsageError
from tracestore.store import vocabulary
from tracestore.store.format import schema
from tracestore.store.maintain.lint import lint_store
from tracestore.store.maintain.verify import verify_store

# Keys of the input families, by family.
PICKLE = (
    *("hidden_states", "attentions", "tokens", "tokens_decoded", "generated_answer_clean", "question_id"),
    *("question", "generated_text", "generated_answer", "prompt_length", "num_layers", "example_id"),
    *("global_example_id", "batch_number", "cutoff_method", "tokens_before_cutoff", "tokens_after_cutoff"),
)
SEQUENCES, GRAPHS = ("sequences", "labels", "question_ids"), ("graphs", "labels", "question_ids")


def states(layers=3, tokens=5, dim=8, seed=0):
    return np.random.default_rng(seed).standard_normal((layers, tokens, dim)).astype("f2")


def appended(path, trace, **options):
    """Append one trace to a new store, and return it with the writer."""
    arguments = {name: options.pop(name) for name in ("score", "scores", "label", "group") if name in options}
    with tracestore.create(path, **options) as writer:
        writer.append(trace, **arguments)
    return tracestore.open(path)[0], writer


def converted(path, trace, lines=()):
    """Convert one trace by a layout of these lines, by default by a built-in one, and return it."""
    write_pickle(path / "t.pkl", [trace])
    convert(path / "t.pkl", path / "c.zarr", *(word for line in lines for word in ("--field", line)))
    return tracestore.open(path / "c.zarr")[0]


def values_of(trace):
    """Return what a trace holds, as plain values."""
    names = ("label", "scores", "group", "question", "answer", "prompt_length", "sample", "optional_fields", "extras")
    found = {name: getattr(trace, name) for name in (*names, "tokens_decoded", "attention_layout")}
    found["optional_fields"] = {
        k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in found["optional_fields"].items()
    }
    found["tokens"] = None if trace.tokens is None else trace.tokens.tolist()
    found["last_token"] = trace.last_token.tobytes()
    found["hidden_states"] = trace.hidden_states.tobytes() if trace.num_tokens else None
    found["attention"] = trace.attention.tobytes() if trace.attention_layout else None
    found["layer_ids"] = trace.provenance and trace.provenance.layer_ids
    return repr(found)


def test_every_key_of_the_families_is_in_the_table():
    assert set(PICKLE) <= vocabulary.FIELDS.keys()
    assert {*SEQUENCES, *GRAPHS} <= vocabulary.FILE_FIELDS.keys()
    assert schema.OPTIONAL_FIELDS.keys() <= vocabulary.FIELDS.keys()
    for field in vocabulary.FIELDS.values():
        assert set(field.shape.replace(" ", "")) <= set("LSDTHK12") and field.stored, field


ATTENTION = np.tril(np.full((3, 2, 5, 5), 0.2, "f2"))
# Traces with tokens or attention, as the built-in layouts need them.
SAME = {
    "attention": {"attentions": list(ATTENTION)},
    "one array of all layers": {"hidden_states": states(), "attentions": ATTENTION},
    "attention averaged over heads": {"attentions": list(ATTENTION[:, 0])},
    "states of the last token": {"hidden_states": None, "last_token": states()[:, -1]},
    "tokens": {"tokens": np.arange(5), "tokens_decoded": list("abcde")},
    "texts of tokens alone": {"tokens_decoded": list("abcde")},
    "one token more": {"tokens": np.arange(6)},
    "answers": {"generated_answer": "Paris", "generated_answer_clean": "paris", "generated_text": "Paris."},
    "label": {"label": 1},
    "label of a tensor": {"label": np.float32(0)},
    "label as a word": {"label": "hallucinated"},
    "word": {"is_correct": "yes"},
    "claims": {"is_correct": True, "is_hallucinated": False},
    "scores": {"score": 0.25, "bleurt": -0.5, "hallucination_score": 0.75},
    "missing scores": {"score": None, "is_correct": float("nan"), "label": None},
    "group": {"group": "a"},
    "group as an integer": {"group": 0},
    "optional": {"token_entropy": np.ones(5), "answer_span": (2, 5), "seed": 3},
    "optional without tokens": {"token_entropy": np.ones(5, "f4"), "special_mask": [0, 1, 0, 0, 1]},
    "spans": {"generated_answer": "Paris", "spans": [{"start": 0, "end": 5, "type": "x"}]},
    "spans of RAGTruth": {"generated_answer": "Paris", "labels": [{"start": 0, "end": 2, "label_type": "x"}]},
    "layers": {"layer_ids": [1, 3, 5]},
    "older keys": {"num_layers": 3, "example_id": 4, "batch_number": 0, "tokens_before_cutoff": 9},
    "extras": {"note": "text", "number": 3},
    "id": {"global_example_id": 7, "question_id": None},
    "sample": {"sample": 2},
}
NEEDED = ("last_token", "attentions", "tokens", "tokens_decoded")
# Other keys, and traces of states alone, by a layout.
STATED = {
    "nothing else": ({}, ()),
    "one array": ({"hidden_states": states()}, ()),
    "other names": (
        {"input_ids": np.arange(5), "answer": "Paris", "y": 1},
        ("tokens = t.pkl : []/input_ids", "generated_answer = t.pkl : []/answer", "label = t.pkl : []/y"),
    ),
    "words": (
        {"is_correct": "yes", "hallucination": "no"},
        ("is_correct = t.pkl : []/is_correct", "hallucination.hallucination = t.pkl : []/hallucination"),
    ),
    "scores": ({"scores": {"em": 1.0, "is_wrong": False, "bleu": 0.25}}, ("scores = t.pkl : []/scores",)),
    "padding": (
        {"tokens": [7, 8, 9, -100, -100], "attention_mask": [1, 1, 1, 0, 0], "prompt_length": 2},
        ("S.mask = t.pkl : []/attention_mask",),
    ),
    "length": ({"tokens": [7, 8, 9, 0, 0], "lengths": 3}, ("S.lengths = t.pkl : []/lengths", "S.side = right")),
    "spans of RAGTruth": (
        {"generated_answer": "Paris", "labels": [{"start": 0, "end": 2, "label_type": "x"}]},
        ("spans = t.pkl : []/labels",),
    ),
}


def assert_same(path, trace, lines=()):
    """Compare the trace that `create` stores with that of a conversion."""
    trace = {"hidden_states": list(states()), "question_id": "q0"} | trace
    trace = {
        name: value
        for name, value in trace.items()
        if value is not None or name not in ("hidden_states", "question_id")
    }
    mine, writer = appended(path / "s.zarr", trace)
    assert values_of(mine) == values_of(converted(path, trace, lines))
    assert tracestore.open(path / "s.zarr").score_name == tracestore.open(path / "c.zarr").score_name
    assert mine.question_id == ("7" if "global_example_id" in trace else "q0")
    assert set(writer.extras) == set(mine.extras) and verify_store(path / "s.zarr").damaged == {}


@pytest.mark.parametrize("case", SAME)
def test_a_key_means_the_same_in_create_and_convert(tmp_path, case):
    more = {} if set(NEEDED) & SAME[case].keys() else {"attentions": list(ATTENTION)}
    assert_same(tmp_path, more | SAME[case])


@pytest.mark.parametrize("case", STATED)
def test_a_key_means_the_same_in_create_and_by_a_layout(tmp_path, case):
    trace, lines = STATED[case]
    own = ("records = t.pkl : []", "hidden_states = t.pkl : []/hidden_states -> L S D")
    assert_same(tmp_path, trace, (*own, *lines))


OF_OTHER_KINDS = {
    "cutoff_method": "text",
    "edges": [(np.array([[0], [1]]), np.ones(1, "f2"))] * 3,
    "labels": 1,
    "spans": [],
    "scores": {"em": 1.0},
}
LENGTHS = {"L": 3, "S": 5, "T": 5, "D": 8, "H": 2, "K": 2, "2": 2}
# What dumps must state by lines, which is refused without them.
ASKED = ("attention_mask", "edges", "lengths", "labels")


def valid_value(field):
    """Return a value of a field, as docs/fields.md describes it."""
    shape = tuple(map(LENGTHS.get, field.shape.split()))
    if field.kind == vocabulary.TEXT:
        return [f"t{k}" for k in range(5)] if shape else "text"
    if field.name in OF_OTHER_KINDS or field.kind == vocabulary.OBJECT:
        return OF_OTHER_KINDS.get(field.name, 7)
    if field.kind in (vocabulary.FLOATS, vocabulary.NUMBERS):
        is_positive = getattr(schema.OPTIONAL_FIELDS.get(field.name), "minimum", None) is not None
        return np.full(shape, 0.25 if is_positive else -0.25, "f4")
    values = np.arange(np.prod(shape)).reshape(shape) % (2 if field.name != "layer_ids" else 9)
    return values if shape else 2


@pytest.mark.parametrize(
    "field", [f for f in vocabulary.FIELDS.values() if f.kind not in (vocabulary.SCORE, vocabulary.LABEL)]
)
def test_each_field_means_the_same_in_create_and_convert(tmp_path, field):
    trace = {"hidden_states": states(), "attentions": ATTENTION, "tokens": [5, 6, 7, 8, 9], "question_id": "q0"}
    if field.name not in trace:
        trace[field.name] = valid_value(field)
    if field.name in ("edges", "last_token"):
        trace = {"question_id": "q0", "hidden_states": states(), field.name: trace[field.name]}
    if field.name == "last_token":
        del trace["hidden_states"]
    if field.name == "attention_mask":
        trace["attention_mask"] = [1, 1, 1, 0, 0]
    mine, _ = appended(tmp_path / "s.zarr", trace)
    write_pickle(tmp_path / "t.pkl", [trace])
    if field.name in ASKED:
        assert field.name in error_of("convert", tmp_path / "t.pkl", tmp_path / "c.zarr", code=3)
        return
    convert(tmp_path / "t.pkl", tmp_path / "c.zarr")
    assert values_of(mine) == values_of(tracestore.open(tmp_path / "c.zarr")[0])


def test_labels_answers_and_scores_are_fields(tmp_path):
    trace = {"hidden_states": states(), "label": 1, "answer": "Paris", "is_correct": False, "score": 0.25, "note": 5}
    found, writer = appended(tmp_path / "s.zarr", trace)
    assert (found.label, found.answer, found.scores) == (1, "Paris", {"is_correct": 0.0, "score": 0.25})
    assert found.extras == {"note": 5} and writer.extras == {"note": 1}
    assert tracestore.open(tmp_path / "s.zarr").score_fields["is_correct"].direction == "correct"


def test_edges_are_a_field(tmp_path):
    index = [np.array([[0, 0, 1], [1, 2, 2]])] * 3
    weight = [np.array([0.5, 0.25, 0.125], "f2") * (k + 1) for k in range(3)]
    trace = {"hidden_states": states(tokens=3), "edges": list(zip(index, weight, strict=True))}
    found, _ = appended(tmp_path / "s.zarr", trace)
    assert found.attention_layout == "edges" and not found.has_reversed_edges
    assert found.attention_packed.weight.tolist() == np.concatenate(weight).tolist()
    for wrong in (index, [(index[0], weight[0])], [(index[0], weight[0][:2])] * 3, {"a": 1}):
        with pytest.raises(InvalidInputError, match=r"^trace 0, edges|^edges"):
            appended(tmp_path / "w.zarr", trace | {"edges": wrong})


@pytest.mark.parametrize("pair", [(2, 0), (0, 2)])
def test_edges_run_from_source_to_target(tmp_path, pair):
    """[edges]; those of the oldest files, which run the other way, are told by their order"""
    trace = {"hidden_states": states(tokens=3), "edges": [(np.array(pair).reshape(2, 1), np.ones(1, "f2"))] * 3}
    appended(tmp_path / "s.zarr", trace)
    for form in ("pt-gnn", "safetensors", "datasets"):
        command("export", tmp_path / "s.zarr", tmp_path / form, "--format", form)
        convert(tmp_path / form, tmp_path / f"{form}.zarr")
    for path in tmp_path.glob("*.zarr"):
        (batch,) = tracestore.TraceLoader(path, view="graph", as_pyg=False)
        assert batch.edge_index[:, 0].tolist() == list(pair), path


def test_a_mask_of_the_prompt_ends_with_a_token(tmp_path):
    """[attention_mask]; padding in front of the generated tokens is no end of the trace"""
    trace = {"hidden_states": list(states()), "attentions": list(ATTENTION), "tokens": list(range(5))}
    found, _ = appended(tmp_path / "s.zarr", trace | {"attention_mask": [0, 1, 1]})
    assert found.tokens.tolist() == [1, 2, 3, 4]
    with pytest.raises(InvalidInputError, match="attention_mask: found padding before token 3"):
        appended(tmp_path / "w.zarr", trace | {"attention_mask": [1, 1, 0]})


LABELS = [
    *({"label": v} for v in ("0", 0.3, [1], "maybe", -1, 2, [], {"a": 1}, np.array([0, 1]), float("inf"), "yes")),
    *({"is_correct": v} for v in ("0", 0.3, [1], "maybe", -1, 2, {}, b"1")),
    *({"is_hallucinated": v} for v in ("0", 0.5, [0], "perhaps", -1)),
    *({"score": v} for v in ("high", [0.5], float("inf"), {"a": 1})),
    *({"hallucination_score": v} for v in ("0.5", float("-inf"))),
    *({"labels": v} for v in (0.3, "0", -1, [1], [0, 1, 0])),
    *({"scores": v} for v in (0.5, [0.5], "high")),
    {"label": 0, "labels": 1},
    {"is_correct": True, "is_hallucinated": True},
    {"is_correct": 0, "is_hallucinated": "no"},
]
KEYS = {
    **dict.fromkeys(("verdict", "my_label", "labeled_hallucinated", "isCorrect", "correctness_flag", "reward"), 1),
    **dict.fromkeys(("human_rating", "llm_judge_score", "p_hallu", "faithful_prob", "Score", "grade"), 0.5),
    **dict.fromkeys(("verdict", "judge_says", "judgment_of_it"), "correct"),
    "token_labels": [0, 1, 0, 1, 0],
    "sentence_label": np.array([0, 1]),
}


@pytest.mark.parametrize("changes", LABELS, ids=str)
def test_labels_and_scores_of_a_wrong_kind_are_refused(tmp_path, changes):
    trace = {"hidden_states": list(states()), "attentions": list(ATTENTION), "question_id": "q0"} | changes
    with pytest.raises(InvalidInputError) as caught:
        appended(tmp_path / "s.zarr", trace)
    assert caught.value.field in changes and "\n" not in str(caught.value)
    write_pickle(tmp_path / "t.pkl", [trace])
    assert next(iter(changes)) in error_of("convert", tmp_path / "t.pkl", tmp_path / "c.zarr", code=3)


@pytest.mark.parametrize("key", KEYS)
def test_keys_that_look_like_labels_are_refused(tmp_path, key):
    trace = {"hidden_states": list(states()), "question_id": "q0", key: KEYS[key]}
    with pytest.raises(InvalidInputError, match=r"looks like a label or score and is no field, expected \w+") as caught:
        appended(tmp_path / "s.zarr", trace)
    assert caught.value.field == key


def test_convert_names_a_key_that_looks_like_a_label(tmp_path):
    write_pickle(tmp_path / "t.pkl", [make_trace(k) | {"rating": k % 2} for k in range(4)])
    text = error_of("convert", tmp_path / "t.pkl", tmp_path / "s.zarr", code=3)
    assert "the built-in layout traces does not read it: rating: found int '0'" in text and "--field" in text
    done = convert(tmp_path / "t.pkl", tmp_path / "x.zarr", "--score-column", "rating", "--score-direction", "correct")
    assert "correctness.rating (high: correct): 2 times 1, 2 times 0, 0 missing" in done.stdout


def test_texts_and_answers_of_data_sets_do_not_look_like_labels(tmp_path):
    others = {"correct_answer": "Paris", "incorrect_answers": ["Rome"], "num_correct": 3, "judge_model": "gpt"}
    others |= {"score_version": "1.0", "rationale": "wrong because", "verdict": "a long text about it"}
    found, writer = appended(tmp_path / "s.zarr", {"hidden_states": states()} | others)
    assert found.extras == others and writer.extras == dict.fromkeys(others, 1)


def test_convert_counts_extras_by_name(tmp_path):
    write_pickle(tmp_path / "t.pkl", [make_trace(k) | ({"note": "x"} if k else {}) | {"level": k} for k in range(3)])
    done = convert(tmp_path / "t.pkl", tmp_path / "s.zarr")
    assert "stored as extras, because no field holds them: level (3), note (2)" in done.stdout


OTHER_SCORES = {"f1": 0.5, "scores": {"em": 1.0}, "rouge": {"f": 1}, "correct": ["Paris"]}


@pytest.mark.parametrize("has_scores", [True, False])
def test_scores_that_are_extras_have_a_reason(tmp_path, has_scores):
    write_pickle(tmp_path / "in/a.pkl", [trace | OTHER_SCORES for trace in make_traces(3)])
    if has_scores:
        (tmp_path / "in/scores.csv").write_text("question_id,score\nq0,1\nq1,0\nq2,1\n")
    out = convert(tmp_path / "in", tmp_path / "s.zarr").stdout
    found = tracestore.open(tmp_path / "s.zarr")[0]
    if has_scores:
        assert "stored as extras, because a scores file was given: scores (3), f1 (3), rouge (3), correct (3)" in out
        assert found.scores == {"score": 1.0} and found.extras == OTHER_SCORES
    else:
        assert "stored as extras, not as scores, because no line names them, or they are none" in out
        assert found.scores == {"em": 1.0, "f1": 0.5} and found.extras.keys() == {"rouge", "correct"}


def test_a_score_whose_direction_is_unknown_is_asked_for(tmp_path):
    write_pickle(tmp_path / "t.pkl", [make_trace(k) | {"scores": {"judge": k / 4, "em": 1}} for k in range(4)])
    text = error_of("convert", tmp_path / "t.pkl", tmp_path / "s.zarr", code=3)
    assert "scores: a high judge may mean a correct or a hallucinated answer; --score-column judge" in text
    convert(tmp_path / "t.pkl", tmp_path / "s.zarr", "--score-column", "judge", "--score-direction", "hallucination")
    store = tracestore.open(tmp_path / "s.zarr")
    assert store.score_name == "judge" and store.targets().tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("column", ["score", "bleurt", "label", "is_correct", "f1"])
@pytest.mark.parametrize("direction", ["correct", "hallucination"])
def test_a_chosen_score_has_the_chosen_direction(tmp_path, column, direction):
    """It is the default one, also next to those that a built-in layout reads under their own names."""
    values = {"score": 0.75, "bleurt": 0.75, "label": 1, "is_correct": True, "f1": 0.75}
    traces = [
        make_trace(k) | ({n: v for n, v in values.items() if n != "label" or column == "label"}) for k in range(2)
    ]
    words = (tmp_path / "s.zarr", "--score-column", column, "--score-direction", direction)
    write_pickle(tmp_path / "t.pkl", traces)
    if column == "is_correct" and direction == "hallucination":
        assert "1 means the opposite under this name" in error_of("convert", tmp_path / "t.pkl", *words, code=2)
        return
    out = convert(tmp_path / "t.pkl", *words).stdout
    store = tracestore.open(tmp_path / "s.zarr")
    assert (store.score_name, store.score_direction) == (column, direction)
    assert store.targets().tolist() == [float(direction == "hallucination")] * 2
    assert out.count(f"{column} (high: ") == out.count(f"{column} (high: {direction})") == 1
    assert verify_store(tmp_path / "s.zarr").damaged == {}


FIRST_WITHOUT = {
    "a chosen score": (("--score-column", "quality", "--score-direction", "hallucination"), "quality"),
    "a judgment": ((), "is_correct"),
}


@pytest.mark.parametrize("case", FIRST_WITHOUT)
@pytest.mark.parametrize("num_files", [1, 2])
def test_the_default_score_does_not_depend_on_the_order_of_the_traces(tmp_path, case, num_files):
    words, name = FIRST_WITHOUT[case]
    traces = [make_trace(0) | {"em": 1, name: None}, make_trace(1) | {"em": 0, name: 1}]
    for order, found in enumerate((traces, traces[::-1])):
        folder = tmp_path / str(order)
        for k in range(num_files):
            write_pickle(folder / f"{k}.pkl", found if num_files == 1 else [found[k]])
        convert(folder, tmp_path / f"{order}.zarr", *words)
        store = tracestore.open(tmp_path / f"{order}.zarr")
        assert store.score_name == name
        assert np.isnan(store.targets()).sum() == 1


def test_a_chosen_score_that_no_trace_has_is_refused(tmp_path):
    write_pickle(tmp_path / "t.pkl", [make_trace(k) | {"em": k} for k in range(2)])
    words = ("--score-column", "qualty", "--score-direction", "correct")
    text = error_of("convert", tmp_path / "t.pkl", tmp_path / "s.zarr", *words, code=3)
    assert "--score-column qualty: found in no trace" in text
    convert(tmp_path / "t.pkl", tmp_path / "s.zarr", "--score-column", "em")
    write_pickle(tmp_path / "u.pkl", [make_trace(7)])
    convert(tmp_path / "u.pkl", tmp_path / "s.zarr", "--score-column", "em")


def test_a_score_of_a_refused_trace_is_not_the_default(tmp_path):
    copy = make_trace(0) | {"score": 1, "hidden_states": make_trace(7)["hidden_states"]}
    write_pickle(tmp_path / "t.pkl", [make_trace(0), copy, *(make_trace(k) | {"bleurt": k % 2} for k in (1, 2))])
    convert(tmp_path / "t.pkl", tmp_path / "s.zarr", "--skip-bad")
    store = tracestore.open(tmp_path / "s.zarr")
    assert store.score_name == "bleurt" and store.score_fields.keys() == {"bleurt"}


WRONG_SCORES = [
    *({"bleurt": text} for text in ("0.3", " 1 ", "nan", "1e5", "55%", "-inf", "n/a", "")),
    {"scores": {"label": 1}},
    {"scores": {"em": "0.3"}},
    {"scores": {"em": [1]}, "em": 1},
    {"em": 10**400},
    {"label": 1, "label ": 0},
]


@pytest.mark.parametrize("changes", WRONG_SCORES, ids=lambda v: str(v)[:40])
def test_scores_of_a_wrong_kind_are_refused_before_anything_is_stored(tmp_path, changes):
    with pytest.raises((InvalidInputError, UsageError)):
        appended(tmp_path / "c.zarr", make_trace(0) | changes)
    write_pickle(tmp_path / "t.pkl", [make_trace(0) | {"em": 0}])
    convert(tmp_path / "t.pkl", tmp_path / "s.zarr")
    write_pickle(tmp_path / "u.pkl", [make_trace(1) | changes, make_trace(2)])
    error_of("convert", tmp_path / "u.pkl", tmp_path / "s.zarr", code=3)
    assert len(tracestore.open(tmp_path / "s.zarr")) == 1 and verify_store(tmp_path / "s.zarr").damaged == {}


@pytest.mark.parametrize("value", ["0.3", "Paris", [0.1, 0.2], (1,), {"a": 1}, np.array([0.5]), b"1", "n/a"], ids=str)
@pytest.mark.parametrize("column", ["em", "quality"])
def test_a_chosen_score_is_read_or_refused(tmp_path, column, value):
    write_pickle(tmp_path / "t.pkl", [make_trace(k) | {column: value, "f1": 0.5} for k in range(2)])
    words = ("--score-column", column, "--score-direction", "correct")
    done = convert(tmp_path / "t.pkl", tmp_path / "s.zarr", *words, check=None)
    assert "TypeError" not in done.stderr and done.returncode in (0, 3)
    if done.returncode == 0:
        assert value == "0.3" and tracestore.open(tmp_path / "s.zarr")[0].scores[column] == 0.3


@pytest.mark.parametrize("value", [{1: "a", "1": "b"}, {True: "x", "True": "y"}, {"a": {2: [3]}}], ids=str)
def test_keys_of_dicts_in_extras_stay_as_they_are(tmp_path, value):
    trace = make_trace(0) | {"correct": value}
    mine, _ = appended(tmp_path / "s.zarr", trace)
    assert converted(tmp_path, trace).extras == mine.extras == {"correct": value}


# Values under names of scores: those of scores, and others that data sets have there.
VALUES = (
    0,
    1,
    0.25,
    True,
    -0.5,
    "yes",
    "incorrect",
    float("nan"),
    None,
    "Paris",
    ["Paris"],
    {"f": 0.5},
    [1],
    np.ones(2),
    "inf",
)


KINDS_OF_NAMES = ("label", "is_correct", "correct", "score", "hallucination_score", "rouge")


@pytest.mark.parametrize("name", ["label", *vocabulary.SCORES])
def test_names_of_scores_mean_the_same_in_create_and_convert(tmp_path, name):
    """Alone, in a dict of scores, and next to other scores: the values, the default score and the extras, or a refusal"""
    plain = {"hidden_states": list(states()), "attentions": list(ATTENTION), "question_id": "q0"}
    position = [*vocabulary.FIELDS].index(name)
    for k, value in enumerate(VALUES if name in KINDS_OF_NAMES else VALUES[position % 5 :: 5]):
        others = {"f1": 0.75, "score": 0.5, "is_factual": True}
        cases = [{name: value}, {"bleu": 0.5, name: value, "scores": others | {"em": 1}}]
        if not isinstance(value, list | dict | np.ndarray) and name != "label":
            cases.append({"scores": {name: value}})
        for n, case in enumerate(cases):
            path = tmp_path / f"{k}-{n}"
            write_pickle(path / "t.pkl", [plain | case])
            try:
                mine, _ = appended(path / "s.zarr", plain | case)
            except InvalidInputError:
                with pytest.raises((InvalidInputError, UsageError)):
                    tracestore.convert_files(path / "t.pkl", path / "c.zarr")
                continue
            tracestore.convert_files(path / "t.pkl", path / "c.zarr")
            one, two = (tracestore.open(path / f"{file}.zarr") for file in "sc")
            assert values_of(mine) == values_of(two[0]), case
            assert one.score_name == two.score_name, case
            assert {n: f.direction for n, f in one.score_fields.items()} == {
                n: f.direction for n, f in two.score_fields.items()
            }


def test_a_group_is_a_text_or_an_integer(tmp_path):
    with tracestore.create(tmp_path / "s.zarr") as writer:
        writer.append({"hidden_states": states(), "question_id": "a"}, group=0)
        writer.append({"hidden_states": states(), "question_id": "b", "group": 0}, group=0)
        for group in (float("nan"), b"g", 1.5, ("g",)):
            with pytest.raises(InvalidInputError, match="group: found "):
                writer.append({"hidden_states": states(), "question_id": "c"}, group=group)
    assert [trace.group for trace in tracestore.open(tmp_path / "s.zarr")] == ["0", "0"]


def test_a_key_and_an_argument_must_agree(tmp_path):
    trace = {"hidden_states": states(), "label": 1, "score": 0.5, "group": "a", "scores": {"judge": 2.0}}
    with tracestore.create(tmp_path / "s.zarr") as writer:
        writer.define_score("judge", direction="hallucination")
        for argument, text in (
            ({"label": 0}, "label: found 1.0 in the trace, expected 0.0 as in the argument"),
            ({"score": 0.25}, "score: found 0.5 in the trace"),
            ({"group": "b"}, "group: found 'a' in the trace, expected 'b'"),
            ({"scores": {"judge": 1}}, "judge: found 2.0 in the trace"),
            ({"score": 0.5, "scores": {"score": 0.9}}, "score: found 0.5 in the trace, expected 0.9"),
            ({"label": 0.3}, "label: found 0.3, expected 1 for a hallucinated answer"),
            ({"scores": {"judge": float("inf")}}, "judge: found inf"),
        ):
            with pytest.raises(InvalidInputError, match=text):
                writer.append(trace, **argument)
        with pytest.raises(InvalidInputError, match="score: found "):
            writer.append({"hidden_states": states()}, score=0.1, scores={"score": 0.9})
        with pytest.raises(UsageError, match="'other' is not defined"):
            writer.append(trace | {"scores": {"other": 1}})
        writer.append(trace | {"question_id": "a"}, label=1, score=0.5, group="a", scores={"judge": 2})
        writer.append(
            {"hidden_states": states(), "question_id": "b"}, label=1, score=0.5, group="a", scores={"judge": 2}
        )
    one, two = tracestore.open(tmp_path / "s.zarr")
    assert (
        (one.label, one.scores, one.group) == (two.label, two.scores, two.group) == (1, {"judge": 2, "score": 0.5}, "a")
    )


@pytest.mark.parametrize(
    ("fields", "values"),
    [
        ({"is_correct": True}, {"label": 1}),
        ({"is_correct": False, "label": 0}, {}),
        ({}, {"label": 1, "scores": {"is_hallucinated": 0}}),
        ({"is_correct": True}, {"scores": {"is_hallucinated": 1}}),
    ],
)
def test_judgments_of_a_trace_agree(tmp_path, fields, values):
    """Rule 14."""
    with tracestore.create(tmp_path / "s.zarr") as writer:
        with pytest.raises(InvalidInputError, match="expected that they agree"):
            writer.append({"hidden_states": states(), **fields}, **values)
        writer.append({"hidden_states": states(), "is_correct": True}, label=0, scores={"is_hallucinated": 0})


def test_a_name_that_says_its_direction_cannot_be_defined_otherwise(tmp_path):
    with tracestore.create(tmp_path / "s.zarr") as writer:
        writer.append({"hidden_states": states(), "is_correct": True})
        writer.flush()
        with pytest.raises(UsageError, match="'correct' in the store"):
            writer.define_score("is_correct", direction="hallucination")


@pytest.mark.parametrize("flushes", [False, True])
@pytest.mark.parametrize("name", ["score", "accuracy"])
def test_a_score_keeps_the_direction_that_a_program_has_defined(tmp_path, name, flushes):
    with tracestore.create(tmp_path / "s.zarr") as writer:
        writer.define_score(name, direction="hallucination")
        if flushes:
            writer.append({"hidden_states": states(), "question_id": "a"})
            writer.flush()
        with pytest.raises(UsageError, match=f"a high {name} means 'hallucination'"):
            writer.append({"hidden_states": states(), "question_id": "b"}, scores={name: 0.9})


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_score_of_traces_that_wait_for_the_commit_keeps_its_direction(tmp_path, is_stored):
    if is_stored:
        with tracestore.create(tmp_path / "s.zarr") as writer:
            writer.append({"hidden_states": states(), "question_id": "a"})
            writer.define_score("judge")
    with tracestore.create(tmp_path / "s.zarr", append=True) as writer:
        if not is_stored:
            writer.define_score("judge")
        writer.append({"hidden_states": states(), "question_id": "b"}, scores={"judge": 0.9})
        with pytest.raises(UsageError, match="a high judge means 'correct'"):
            writer.define_score("judge", direction="hallucination")


@pytest.mark.parametrize("name", ["attention", "edges", "nothing"])
def test_attention_is_in_all_traces_or_none(tmp_path, name):
    plain = {"hidden_states": states(), "question_id": "a"}
    index = np.array([[0, 1], [1, 2]])
    more = {"attention": {"attentions": list(ATTENTION)}, "edges": {"edges": [(index, np.ones(2, "f2"))] * 3}}.get(
        name, {}
    )
    first, second = (plain | more, plain) if more else (plain, plain | {"attentions": list(ATTENTION)})
    with tracestore.create(tmp_path / "s.zarr") as writer:
        writer.append({"last_token": states()[:, -1], "question_id": "z"})
        writer.append(first)
        with pytest.raises(InvalidInputError, match="attentions: ") as caught:
            writer.append(second | {"question_id": "b"})
        assert "attention='none'" in str(caught.value) and "--" not in str(caught.value)
        writer.append(first | {"question_id": "c"})
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert len(store) == 3 and store.attention_mode == ("mean" if more else "none")
    assert verify_store(tmp_path / "s.zarr").damaged == {}


def test_a_first_trace_that_is_refused_decides_nothing(tmp_path):
    with tracestore.create(tmp_path / "s.zarr") as writer:
        for wrong in ({"hidden_states": states() * np.float32(1e6)}, {"hidden_states": states(), "note": {1, 2}}):
            with pytest.raises(InvalidInputError):
                writer.append(wrong)
        writer.append({"hidden_states": states(), "attentions": list(ATTENTION)})
    assert tracestore.open(tmp_path / "s.zarr")[0].attention_layout == "causal"


@pytest.mark.parametrize(
    "options", [{"attention": "none"}, {"attention": "heads", "dtype": "keep"}, {"codec": "zstd"}, {}], ids=str
)
def test_appending_takes_the_options_of_the_store(tmp_path, options):
    traces = make_traces(4, dtype="f4", tokens=4)
    write_store(tmp_path / "s.zarr", traces[:2], **options)
    write_store(tmp_path / "s.zarr", traces[2:], append=True)
    write_store(tmp_path / "w.zarr", traces, commit_after=[1], **options)
    with tracestore.open(tmp_path / "s.zarr") as one, tracestore.open(tmp_path / "w.zarr") as two:
        assert one.internals.attributes == two.internals.attributes
        assert [t.hidden_states.tobytes() for t in one] == [t.hidden_states.tobytes() for t in two]
    stored = {"attention": "mean", "dtype": "float16", "codec": "none"} | options
    for name, other in {"attention": "mean", "dtype": "keep", "codec": "blosc-lz4"}.items():
        if stored[name] != other:
            with pytest.raises(UsageError, match=f"created with {name}='{stored[name]}', not {other}"):
                tracestore.create(tmp_path / "s.zarr", append=True, **{name: other})


@pytest.mark.parametrize(
    ("shape", "num_tokens", "is_list", "expected"),
    [
        ((5, 4, 8), 5, False, "hidden_states: found shape (5, 4, 8) and 5 tokens, which may be (S, L, D)"),
        ((4, 5, 8), 5, False, None),
        ((5, 5, 8), 5, False, None),
        ((4, 4, 8), 5, False, None),
        ((3, 4, 8), 5, False, None),
        ((5, 4, 8), 5, True, None),
        ((5, 4, 8), 4, False, None),
        ((5, 4, 8), None, False, None),
        (
            (5, 3, 8),
            5,
            False,
            "tokens: found 5 tokens, expected 3, the rows of hidden_states (L, S, D) of shape (5, 3, 8)",
        ),
        (
            (5, 9, 8),
            5,
            False,
            "tokens: found 5 tokens, expected 9, the rows of hidden_states (L, S, D) of shape (5, 9, 8)",
        ),
        ((5, 4), 5, False, "hidden_states"),
        ((2, 3, 5, 4, 8), 4, False, "hidden_states"),
        ((0, 4, 8), 4, False, "hidden_states"),
        ((5, 0, 8), None, False, "hidden_states"),
    ],
)
def test_axes_of_states_are_those_of_the_table_or_refused(tmp_path, shape, num_tokens, is_list, expected):
    array = np.zeros(shape, "f2")
    trace = {"hidden_states": list(array) if is_list else array}
    trace |= {} if num_tokens is None else {"tokens": np.arange(num_tokens)}
    if expected is None:
        found, _ = appended(tmp_path / "s.zarr", trace)
        assert found.hidden_states.shape == shape
        return
    with pytest.raises(InvalidInputError) as caught:
        appended(tmp_path / "s.zarr", trace)
    assert expected in str(caught.value)


def test_attention_shows_the_axes_of_states(tmp_path):
    attention = np.tril(np.full((5, 2, 4, 4), 0.25, "f2"))
    found, _ = appended(
        tmp_path / "s.zarr",
        {"hidden_states": np.zeros((5, 4, 8), "f2"), "attentions": attention, "tokens": np.arange(5)},
    )
    assert found.hidden_states.shape == (5, 4, 8) and len(found.tokens) == 5


def outside(field):
    """Return numbers that an optional field cannot have."""
    smallest = field.fill if field.minimum is None else field.minimum
    return [value for value in (2 * field.maximum + 1, smallest - 1, math.inf) if not math.isnan(value)]


IMPOSSIBLE = [
    *({"prompt_length": v} for v in (6, -1, 2**31, 2**40)),
    *({"answer_span": v} for v in ((0, 6), (3, 2), (-2, 3), (6, 7))),
    *({"generated_mask": v} for v in ([0, 1, 2, 0, 0], [0, 1], [-1] * 5)),
    {"special_mask": [0, 0, 0, 0, 5]},
    *({"token_label": v} for v in ([2] * 5, [-2] * 5, [0] * 4)),
    *({"top_ids": v} for v in ([[-2]] * 5, [[2**31]] * 5)),
    *({"temperature": v} for v in (-0.5, float("inf"), float("-inf"), 1e39)),
    *({"seed": v} for v in (-2, 2**63)),
    *({"sample": v} for v in (-1, 2**31)),
    *({"tokens": v} for v in ([1, 2, 3, 4, -1], [2**31] * 5)),
    *({name: [v] * 5} for name, field in schema.PER_TOKEN_FIELDS.items() for v in outside(field)),
    {"top_logprobs": [[1.0]] * 5},
    *({"spans": [{"start": a, "end": b, "type": "x"}]} for a, b in ((0, 6), (3, 2), (-1, 2), (9, 12))),
    *({"layer_ids": v} for v in ([0, 0, 1], [-1, 0, 1], [0, 1])),
]


@pytest.mark.parametrize("changes", IMPOSSIBLE, ids=str)
def test_impossible_values_are_refused(tmp_path, changes):
    trace = {
        "hidden_states": list(states()),
        "question_id": "q0",
        "tokens": list(range(5)),
        "generated_answer": "Paris",
    }
    trace["attentions"] = list(ATTENTION)
    (name,) = changes
    with pytest.raises(InvalidInputError) as caught:
        appended(tmp_path / "s.zarr", trace | changes)
    assert name in str(caught.value) and "\n" not in str(caught.value) and "--" not in str(caught.value)
    write_pickle(tmp_path / "t.pkl", [trace | changes])
    text = error_of("convert", tmp_path / "t.pkl", tmp_path / "c.zarr", code=3)
    assert name in text or (name == "layer_ids" and "L.ids" in text)


LEFT, BOTH = [0, 0, 1, 1, 1], [0, 1, 1, 1, 0]
# Positions that count the padding, which is removed: what is stored, None where it is refused.
POSITIONS = [
    *((LEFT, "prompt_length", at, found) for at, found in enumerate([0, None, 0, 1, 2, 3, None])),
    *((BOTH, "prompt_length", at, found) for at, found in enumerate([0, 0, 1, 2, 3, None])),
    *((mask, "prompt_length", -7, None) for mask in (LEFT, BOTH)),
    *((LEFT, "answer_span", at, None) for at in ((0, 2), (1, 4), (0, 0), (1, -1), (-1, 1), (0, 5))),
    (LEFT, "answer_span", (2, 5), (0, 3)),
    (LEFT, "answer_span", (3, -1), (1, -1)),
    (LEFT, "answer_span", (-1, 4), (-1, 2)),
    (BOTH, "answer_span", (2, 5), (1, 3)),
    (BOTH, "answer_span", (5, 5), None),
    (BOTH, "answer_span", (0, 3), None),
]


KINDS = ("float8", "sparse", "meta", "quantized", "masked")


def unreadable(kind, array):
    """Return a tensor that NumPy cannot represent, or an array whose mask hides the first value."""
    if kind == "masked":
        return np.ma.masked_array(array, np.arange(array.size).reshape(array.shape) == 0)
    torch = pytest.importorskip("torch")
    tensor = torch.from_numpy(np.array(array, "f4"))
    return {
        "float8": lambda: tensor.to(torch.float8_e4m3fn),
        "sparse": tensor.to_sparse,
        "meta": lambda: tensor.to("meta"),
        "quantized": lambda: torch.quantize_per_tensor(tensor, 0.1, 0, torch.quint8),
    }[kind]()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["hidden_states", "layers", "rows", "rows of heads", "last_token", "tokens", "attention_mask", "token_entropy",
                                  "label", "score", "correct", "prompt_length", "an extra"])  # fmt: skip
def test_arrays_that_numpy_cannot_represent_are_refused(tmp_path, kind, name):
    """Also where a list holds them."""
    trace, field = make_trace(0, tokens=3), name
    del trace["attentions"]
    if name in ("layers", "rows"):
        hidden, field = trace["hidden_states"], "hidden_states"
        value = [unreadable(kind, a) if name == "layers" else [unreadable(kind, r) for r in a] for a in hidden]
    elif name == "rows of heads":
        field, value = "attentions", [[[unreadable(kind, np.ones(3)) for _ in range(3)]]] * 3
    else:
        shapes = {"hidden_states": (3, 3, 8), "last_token": (3, 8)} | dict.fromkeys(
            ("label", "score", "prompt_length"), ()
        )
        value = unreadable(kind, np.ones(shapes.get(name, 3), "f2"))
    with pytest.raises(InvalidInputError, match=f"{field}.*: found ") as raised:
        appended(tmp_path / "s.zarr", trace | {field: value})
    assert raised.value.field.startswith(field)


def test_a_mask_that_hides_nothing_is_no_mask(tmp_path):
    trace, _ = appended(tmp_path / "s.zarr", {"question_id": "a", "hidden_states": np.ma.masked_array(states())})
    np.testing.assert_array_equal(trace.hidden_states, states())


@pytest.mark.parametrize(("mask", "name", "value", "expected"), POSITIONS, ids=str)
def test_positions_in_front_of_the_first_token_are_refused(tmp_path, mask, name, value, expected):
    """[tokens as columns of padded ids]"""
    trace = {"hidden_states": list(states()), "attentions": list(ATTENTION), "question_id": "q0"}
    trace |= {"tokens": list(range(5)), "attention_mask": mask, name: value}
    if expected is None:
        with pytest.raises(InvalidInputError, match=f"{name}: found"):
            appended(tmp_path / "s.zarr", trace)
        return
    found, _ = appended(tmp_path / "s.zarr", trace)
    assert getattr(found, name) == expected and found.num_tokens == 3


@pytest.mark.parametrize("value", [float("inf"), "inf", "-Infinity", "1e999", "high", "0.5.1", [0.5]], ids=str)
def test_a_score_of_a_layout_is_finite(tmp_path, value):
    write_pickle(tmp_path / "t.pkl", [{"hidden_states": states(), "question_id": "q0", "judge": value}])
    lines = ("hidden_states = t.pkl : []/hidden_states -> L S D", "correctness.judge = t.pkl : []/judge")
    words = [word for line in ("records = t.pkl : []", *lines) for word in ("--field", line)]
    words += ["--attention", "none"]
    assert "correctness.judge: found" in error_of("convert", tmp_path / "t.pkl", tmp_path / "c.zarr", *words, code=3)


def test_of_two_values_of_a_field_neither_is_stored(tmp_path):
    trace = {"hidden_states": list(states()), "attentions": list(ATTENTION), "question_id": "q0"}
    same = {"generated_answer": "Paris", "response": "Paris"}
    for name, values in {"both": same, "one": {"generated_answer": "Paris"}, "two": {"response": "Paris"}}.items():
        (tmp_path / name).mkdir()
        assert converted(tmp_path / name, trace | values).answer == "Paris"
    write_pickle(tmp_path / "t.pkl", [trace | same | {"response": "Rome"}])
    text = error_of("convert", tmp_path / "t.pkl", tmp_path / "d.zarr", code=3)
    assert "generated_answer: found two values that differ" in text


def rewrite(path, changes):
    """Change values of row 1 of the only segment, as a program with rules of its own would have written it."""
    store = Store(path)
    (segment,) = store.segments()
    arrays = store.arrays(f"{segment}/rows.zip", schema.ROW_DTYPES)
    for name, value in changes.items():
        offsets = arrays.get(f"{name}_offsets")
        if offsets is None:
            arrays[name][1] = value
        else:
            arrays[name][offsets[1] : offsets[2]] = value
    store.set_rows(segment, arrays)
    store.reseal()
    store.seal()


STORED = [
    ({"prompt_length": 6}, "prompt_length: found 6, expected 0 to 4"),
    ({"prompt_length": 2**31 - 1}, "prompt_length: found 2147483647"),
    ({"prompt_length": -7}, "prompt_length: found -7"),
    ({"answer_end": 9}, "answer_span: found (1, 9)"),
    ({"answer_begin": 3, "answer_end": 2}, "answer_span: found (3, 2)"),
    ({"answer_begin": 8, "answer_end": 9}, "answer_span: found (8, 9)"),
    ({"generated_mask": 2}, "generated_mask: found values from 2 to 2"),
    ({"special_mask": 255}, "special_mask: found values from 255"),
    ({"token_label": -3}, "token_label: found values from -3"),
    ({"top_ids": -2}, "top_ids: found values from -2"),
    ({"token_logprob": 2.0}, "token_logprob: found values from 2.0"),
    ({"token_entropy": -2.0}, "token_entropy: found values from -2.0"),
    ({"temperature": -1.0}, "temperature: found values from -1.0"),
    ({"temperature": np.inf}, "temperature: found values from inf"),
    ({"seed": -5}, "seed: found values from -5"),
    ({"tokens": -1}, "tokens: found the token id -1"),
]


def stored_values(path):
    """Write three traces of 4 tokens that have every optional field."""
    more = {
        "prompt_length": 1,
        "answer_span": (1, 4),
        "generated_mask": [0, 1, 1, 1],
        "special_mask": [0] * 4,
        "token_label": [0] * 4,
        "top_ids": [[1]] * 4,
        "token_logprob": [-1.0] * 4,
        "token_entropy": [1.0] * 4,
        "temperature": 0.5,
        "seed": 1,
    }
    return write_store(path, [make_trace(k, tokens=4) | more for k in range(3)], label=lambda k: k % 2)


@pytest.mark.parametrize(("changes", "found"), STORED, ids=[found for _, found in STORED])
def test_impossible_values_in_a_store_are_found(tmp_path, changes, found):
    path = stored_values(tmp_path / "s.zarr")
    assert verify_store(path).damaged == {} and "impossible_value" not in lint_store(path).counts
    rewrite(path, changes)
    report = lint_store(path)
    (issue,) = [issue for issue in report.findings if issue.kind == "impossible_value"]
    assert issue.severity == "error" and (issue.index, issue.question_id) == (1, "q1") and found in issue.found
    assert found in verify_store(path).damaged[f"{segment_of(path)}/rows.zip"]
    done = command("lint", path)
    assert done.returncode == 1 and found in done.stdout


@pytest.mark.parametrize(("changes", "found"), STORED[:2] + STORED[3:6], ids=str)
def test_impossible_values_in_a_store_are_errors_where_they_are_used(tmp_path, changes, found):
    """They gave batches of other tokens, or no batch at all."""
    path = stored_values(tmp_path / "s.zarr")
    rewrite(path, changes)
    with tracestore.open(path) as store:
        for positions in ("answer", "prompt"):
            with pytest.raises(CorruptStoreError, match=r"trace 1 \(q1\): found (prompt_length|answer_)"):
                list(tracestore.TraceLoader(store, view="tokens", layers=0, positions=positions, batch_size=4))
        with pytest.raises(CorruptStoreError, match=r"trace 1 \(q1\): found "):
            answer_span(store[1], 4)
        with pytest.raises(CorruptStoreError, match=r"trace 1 \(q1\)"):
            answer_bounds(store, [0, 1])
        assert answer_span(store[0], 4) == (1, 4)


def test_a_prompt_that_is_the_whole_trace_is_possible(tmp_path):
    traces = [make_trace(k, tokens=4) | {"prompt_length": 4 + k, "tokens": np.arange(4 + k)} for k in range(2)]
    for trace in traces:
        del trace["tokens_decoded"]
    path = write_store(tmp_path / "s.zarr", traces)
    assert lint_store(path).counts.get("impossible_value") is None and verify_store(path).damaged == {}
    with tracestore.open(path) as store:
        batches = tracestore.TraceLoader(store, view="tokens", layers=0, positions="prompt", batch_size=8)
        assert sum(len(batch) for batch in batches) == 8
