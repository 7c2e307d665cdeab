"""Test that every stated order of axes gives the same traces."""

import shutil

import numpy as np
import pytest
import torch

import tracestore
from tests.helpers import command, field_flags
from tests.ingest.execute.folders import convert, dump, refuse, save, states
from tracestore.errors import UsageError

COUNT, LAYERS, TOKENS, WIDTH = 3, 2, 4, 6
STACK = states(COUNT, LAYERS, TOKENS, WIDTH)


def check(traces, wanted=STACK):
    """Assert that the traces are those of the stack (N, L, S, D), in its order."""
    assert len(traces) == len(wanted)
    for trace, hidden in zip(traces.values(), wanted, strict=True):
        np.testing.assert_allclose(trace.hidden_states, hidden, atol=2e-3)


@pytest.mark.parametrize("order", ["NLSD", "LNSD", "SNLD", "NSLD", "DSLN", "NDLS", "SDNL"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_orders_of_a_stack(order, is_nested, tmp_path):
    array = STACK.transpose(["NLSD".index(letter) for letter in order])
    dump(tmp_path / "in/a.pkl", {"h": array.tolist() if is_nested else array})

    check(convert(tmp_path, {"hidden_states": f"a.pkl : h -> {' '.join(order)}"}))


@pytest.mark.parametrize(
    ("array", "axes", "more"),
    [
        (STACK[:, None], "N 1 L S D", {}),
        (STACK.transpose(0, 2, 1, 3).reshape(COUNT, TOKENS, -1), "N S (L D)", {"L.size": LAYERS}),
        (STACK.transpose(0, 2, 1, 3).reshape(COUNT, TOKENS, -1), "N S (L D)", {"D.size": WIDTH}),
        (STACK.reshape(COUNT, LAYERS, -1), "N L (S D)", {"D.size": WIDTH}),
        ([list(layers.reshape(LAYERS, -1)) for layers in STACK], "N L (S D)", {"D.size": WIDTH}),
        (STACK.transpose(1, 0, 2, 3).reshape(LAYERS, -1, WIDTH), "L (N S) D", {"S.lengths": "a.pkl : n -> N"}),
        (STACK.transpose(0, 2, 1, 3).reshape(-1, LAYERS, WIDTH), "(N S) L D", {"S.offsets": "a.pkl : o"}),
        (STACK.transpose(0, 2, 1, 3).reshape(-1, LAYERS, WIDTH), "(N S) L D", {"S.offsets": "a.pkl : e"}),
        (STACK.transpose(0, 2, 1, 3).reshape(-1, LAYERS, WIDTH), "(N S) L D", {"S.owner": "a.pkl : w"}),
        ([list(layers) for layers in STACK], "N L S D", {}),
    ],
)
def test_axes_behind_each_other(array, axes, more, tmp_path):
    ends = np.arange(1, COUNT + 1) * TOKENS
    known = {"n": [TOKENS] * COUNT, "o": np.r_[0, ends], "e": ends, "w": np.repeat(np.arange(COUNT), TOKENS)}
    dump(tmp_path / "in/a.pkl", {"h": array, **known})
    used = {
        line[-1] if line[-1] in known else line.split(" : ")[1][0] for line in more.values() if isinstance(line, str)
    }
    ignore = [f"a.pkl : {name}" for name in known if name not in used]

    check(convert(tmp_path, {"hidden_states": f"a.pkl : h -> {axes}", **more, "ignore": ignore}))


def test_answers_behind_each_other(tmp_path):
    dump(tmp_path / "in/a.pkl", {"h": states(6, LAYERS, WIDTH), "ids": ["a", "b", "c"], "t": [list("xy")] * 3})
    layout = {"last_token": "a.pkl : h -> (N K) L D", "question_id": "a.pkl : ids -> N"}

    traces = convert(tmp_path, layout | {"generated_answer": "a.pkl : t -> N K"})

    assert list(traces) == [(name, k) for name in "abc" for k in range(2)]
    assert [trace.answer for trace in traces.values()] == ["x", "y"] * 3
    np.testing.assert_allclose(traces["b", 1].last_token, states(6, LAYERS, WIDTH)[3], atol=2e-3)


@pytest.mark.parametrize("of_labels", ["N K", "K N", "(N K)", "(K N)"])
@pytest.mark.parametrize(("of_states", "rows"), [("(N K)", "0, 1"), ("(K N)", "0, 3"), ("N K", None), ("K N", None)])
@pytest.mark.parametrize("num_answers", [2, 3])
def test_the_first_letter_changes_slowest(of_states, rows, of_labels, num_answers, tmp_path):
    """Every order of questions and answers gives the same traces; three answers to three questions have equal sizes."""

    def placed(array, axes):
        array = array if axes.strip("()")[0] == "N" else array.swapaxes(0, 1)
        return array.reshape(-1, *array.shape[2:]) if axes[0] == "(" else array

    hidden, labels = states(3, num_answers, LAYERS, WIDTH), np.arange(3 * num_answers).reshape(3, -1) % 4 == 0
    dump(tmp_path / "in/a.pkl", {"h": placed(hidden, of_states), "ids": list("abc"), "y": placed(labels, of_labels)})
    layout = {"last_token": f"a.pkl : h -> {of_states} L D", "question_id": "a.pkl : ids -> N"}
    layout["is_correct"] = f"a.pkl : y -> {of_labels}"
    if rows is None and of_labels[0] == "(":
        refuse(tmp_path, layout, "expected one value per trace")
        return
    answers = {
        "0, 1": ", ".join(map(str, range(num_answers))),
        "0, 3": ", ".join(map(str, range(0, 3 * num_answers, 3))),
    }
    shown = {None: "", **{key: f", its answers in the rows {text} of a.pkl : h" for key, text in answers.items()}}[rows]

    output = command(
        "convert",
        tmp_path / "in",
        tmp_path / "s.zarr",
        *field_flags(*(f"{name} = {text}" for name, text in layout.items())),
    ).stdout
    traces = {(trace.question_id, trace.sample): trace for trace in tracestore.open(tmp_path / "s.zarr")}

    assert len(traces) == 3 * num_answers and shown in output
    for (name, k), trace in traces.items():
        np.testing.assert_allclose(trace.last_token, hidden["abc".index(name), k], atol=2e-3)
        assert trace.scores["is_correct"] == labels["abc".index(name), k]


@pytest.mark.parametrize("field", ["is_correct", "generated_answer"])
@pytest.mark.parametrize("axes", ["(N K)", "(K N)"])
@pytest.mark.parametrize("count", [4, 8])
def test_rule_09_values_behind_each_other_are_as_many_as_states(axes, field, count, tmp_path):
    dump(tmp_path / "in/a.pkl", {"h": states(6, LAYERS, WIDTH), "ids": list("abc"), "v": [1, 0] * (count // 2)})
    layout = {"last_token": f"a.pkl : h -> {axes} L D", "question_id": "a.pkl : ids -> N"}

    text = axes.replace("(", r"\(").replace(")", r"\)")
    refuse(tmp_path, layout | {field: f"a.pkl : v -> {axes}"}, f"found {count} on the axis {text}, expected 6")


def test_ids_behind_the_states_of_answers(tmp_path):
    dump(
        tmp_path / "in/a.pkl", {"h": states(6, LAYERS, 4, WIDTH), "ids": list("abc"), "t": np.arange(30).reshape(6, 5)}
    )
    layout = {"hidden_states": "a.pkl : h -> (N K) L S D", "question_id": "a.pkl : ids -> N"}

    traces = convert(tmp_path, layout | {"tokens": "a.pkl : t -> (N K) T"})

    assert traces["b", 1].tokens.tolist() == [15, 16, 17, 18, 19]


@pytest.mark.parametrize("axes", ["L S D", "N S D", "N L S D H", "N L 1 D", "N L S"])
def test_other_axes_are_refused(axes, tmp_path):
    dump(tmp_path / "in/a.pkl", {"h": STACK})

    refuse(tmp_path, {"hidden_states": f"a.pkl : h -> {axes}"}, "axes|axis|expected")


def test_ragged_nested_lists_are_not_padded(tmp_path):
    ragged = [STACK[0].tolist(), STACK[1][:, :2].tolist()]
    dump(tmp_path / "in/a.pkl", {"h": ragged})
    traces = convert(tmp_path, {"hidden_states": "a.pkl : h -> N L S D"})
    assert [trace.num_tokens for trace in traces.values()] == [4, 2]

    ragged[1][0].append([0.0] * WIDTH)
    dump(tmp_path / "in/a.pkl", {"h": ragged})
    refuse(tmp_path, {"hidden_states": "a.pkl : h -> N L S D"}, r"expected|S, D", overwrite=True)


def test_ids_from_prompt_length_on(tmp_path):
    """vLLM writes the ids of the prompt and those of the answer apart; the last one has no states."""
    dump(tmp_path / "in/a.pkl", [{"id": "q", "hs": states(2, 6, 8), "prompt": [1, 2, 3, 4], "out": [5, 6, 7]}])
    layout = {"hidden_states": "a.pkl : [id=id]/hs -> L S D", "tokens": "a.pkl : [id=id]/out -> G"}
    refuse(tmp_path, layout | {"ignore": ["a.pkl : [id=id]/prompt"]}, "need those of the prompt")
    layout["tokens"] = ["a.pkl : [id=id]/prompt -> S", "a.pkl : [id=id]/out -> G"]

    assert convert(tmp_path, layout)["q", 0].tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    for out in ([6, 7], [5, 6, 7, 8]):
        dump(tmp_path / "in/a.pkl", [{"id": "q", "hs": states(2, 6, 8), "prompt": [1, 2, 3, 4], "out": out}])
        refuse(tmp_path, layout, "expected 7 for 6 states", overwrite=True)


def test_positions_of_beams(tmp_path):
    """Two beams of four rows: what generate() returns as beam_indices."""
    steps = [[states(4, s, 6, seed=10 * p + k) for k in range(2)] for p, s in enumerate((3, 1, 1))]
    rows = np.array([[0, 2, 1], [3, 3, -1]])
    ids = np.array([[5, 6, 7, 8, 9, 10], [5, 6, 7, 11, 2, 0]])
    dump(tmp_path / "in/g.pkl", {"hs": steps, "rows": rows, "ids": ids, "names": ["a", "b"]})
    layout = {"hidden_states": "g.pkl : hs -> P L N S D", "P.rows": "g.pkl : rows -> N P"}
    layout |= {"tokens": "g.pkl : ids -> N T", "question_id": "g.pkl : names -> N"}

    traces = convert(tmp_path, layout)

    assert {key[0]: trace.num_tokens for key, trace in traces.items()} == {"a": 5, "b": 4}
    for k in range(2):
        expected = np.concatenate([steps[0][k][0], steps[1][k][2], steps[2][k][1]])
        np.testing.assert_allclose(traces["a", 0].hidden_states[k], expected, atol=2e-3)
        expected = np.concatenate([steps[0][k][3], steps[1][k][3]])
        np.testing.assert_allclose(traces["b", 0].hidden_states[k], expected, atol=2e-3)
    assert traces["b", 0].tokens.tolist() == [5, 6, 7, 11, 2]


@pytest.mark.parametrize(
    ("kind", "entries"),
    [
        ("bfloat16", {"dtype.attentions": "bfloat16"}),
        ("float16", {"dtype.attentions": "float16"}),
        ("float32", {"dtype.attentions": "float32"}),
        ("uint8", {"scale.attentions": 1 / 255}),
    ],
)
@pytest.mark.parametrize("mode", ["mean", "heads"])
def test_raw_bits_of_attention(tmp_path, kind, entries, mode):
    attention = np.tril(abs(states(2, 3, 5, 5)) + 0.1)
    attention /= attention.sum(-1, keepdims=True)
    bits = {
        "bfloat16": (attention.view("u4") >> 16).astype("u2"),
        "float16": attention.astype("f2").view("u2"),
        "float32": attention.view("u4"),
        "uint8": np.round(attention * 255).astype("u1"),
    }[kind]
    dump(tmp_path / "in/a.pkl", [{"id": "q0", "hs": states(2, 5, 8), "at": bits}])
    layout = {"hidden_states": "a.pkl : [id=id]/hs -> L S D", "attentions": "a.pkl : [id=id]/at -> L H S S"}
    refuse(tmp_path, layout, "attentions: found values|attentions|expected")

    trace = convert(tmp_path, layout | entries, attention=mode)["q0", 0]

    expected = attention if mode == "heads" else attention.mean(1)
    np.testing.assert_allclose(np.asarray(trace.attention, "f4").reshape(expected.shape), expected, atol=6e-3)
    wrong = {"bfloat16": "float32", "float32": "float16", "float16": "float32", "uint8": "float16"}[kind]
    refuse(tmp_path, layout | {"dtype.attentions": wrong}, "attentions: found", overwrite=True)


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("code_type", ["u1", "i1"])
def test_bits_of_eight_bit_floats(tmp_path, kind, code_type):
    """All 256 codes have the values of torch's type of that name."""
    codes = np.arange(256, dtype="u1").reshape(2, 2, 64)
    expected = torch.from_numpy(codes).view(getattr(torch, kind)).float().numpy()
    dump(tmp_path / "in/a.pkl", [{"id": "q0", "hs": codes.view(code_type)}])
    layout = {"hidden_states": "a.pkl : [id=id]/hs -> L S D", "S.padding": "none"}
    refuse(tmp_path, layout, r"dtype\.hidden_states states")

    trace = convert(tmp_path, layout | {"dtype.hidden_states": kind})["q0", 0]

    np.testing.assert_array_equal(np.asarray(trace.hidden_states, "f4"), expected)


@pytest.mark.parametrize("more", [{}, {"S.padding": "none"}])
def test_eight_bit_attention_says_what_states_it(tmp_path, more):
    attention = np.tril(abs(states(2, 3, 5, 5)) + 0.1)
    bits = torch.from_numpy(attention / attention.sum(-1, keepdims=True)).to(torch.float8_e4m3fn).view(torch.uint8)
    dump(tmp_path / "in/a.pkl", [{"id": "q0", "hs": states(2, 5, 8), "at": bits.numpy()}])
    layout = {"hidden_states": "a.pkl : [id=id]/hs -> L S D", "attentions": "a.pkl : [id=id]/at -> L H S S", **more}
    refuse(tmp_path, layout, r"uint8.*dtype\.attentions states")

    trace = convert(tmp_path, layout | {"dtype.attentions": "float8_e4m3fn"}, attention="heads")["q0", 0]

    np.testing.assert_allclose(np.asarray(trace.attention, "f4"), bits.view(torch.float8_e4m3fn).float(), atol=1e-3)
    refuse(tmp_path, layout | {"dtype.attentions": "float8_e4m3fn", "scale.attentions": 0.1}, "scale", overwrite=True)


def test_entries_of_attention_need_it(tmp_path):
    dump(tmp_path / "in/a.pkl", [{"id": "q0", "hs": states(2, 5, 8)}])
    with pytest.raises(UsageError, match=r"dtype.attentions: has no effect"):
        convert(tmp_path, {"hidden_states": "a.pkl : [id=id]/hs -> L S D", "dtype.attentions": "float16"})


def test_truth_values_are_no_bits(tmp_path):
    dump(tmp_path / "in/a.pkl", [{"id": "q0", "hs": states(2, 2, 4) > 0}])
    layout = {"hidden_states": "a.pkl : [id=id]/hs -> L S D", "dtype.hidden_states": "float8_e5m2"}
    refuse(tmp_path, layout, "found bool values, expected the bits of float8_e5m2")


@pytest.mark.parametrize("is_wrong", [False, True])
@pytest.mark.parametrize(
    ("field", "right", "wrong"),
    [
        ("S.lengths", [2, 1, 3], [1, 2, 3]),
        ("S.starts", [0, 2, 3], [0, 1, 3]),
        ("S.ends", [2, 3, 6], [3, 2, 6]),
        ("S.owner", [0, 0, 1, 2, 2, 2], [0, 1, 1, 2, 2, 2]),
    ],
)
def test_rule_09_rows_that_are_stated_twice_agree(field, right, wrong, is_wrong, tmp_path):
    values = {"h": states(6, 2, 8), "o": np.array([0, 2, 3, 6]), "x": np.array(wrong if is_wrong else right)}
    dump(tmp_path / "in/a.pkl", values)
    layout = {"hidden_states": "a.pkl : h -> (N S) L D", "S.offsets": "a.pkl : o"} | {field: "a.pkl : x"}

    if is_wrong:
        refuse(tmp_path, layout, f"{field}: found other rows than S.offsets")
    else:
        assert [trace.num_tokens for trace in convert(tmp_path, layout).values()] == [2, 1, 3]


def several_answers(way):
    """Return files with two answers to each of three questions without ids, and the line of their states."""
    found = [[states(2, 4 + n + k, 8, seed=3 * n + k) for k in range(2)] for n in range(3)]
    return {
        "axes": ({"a.pkl": np.stack([np.stack([h[:, 0] for h in one]) for one in found])}, "a.pkl -> N K L D"),
        "lists": ({"a.pkl": found}, "a.pkl : []/[K] -> L S D"),
        "items": (
            {"a.pkl": [{"answers": [{"hs": h} for h in one]} for one in found]},
            "a.pkl : []/answers/[K]/hs -> L S D",
        ),
        "files": ({f"{n}.pkl": {"s": one} for n, one in enumerate(found)}, "{n}.pkl : s/[K] -> L S D"),
        "any files": ({f"{n}.pkl": {"s": one} for n, one in enumerate(found)}, "*.pkl : s/[K] -> L S D"),
    }[way]


@pytest.mark.parametrize("way", ["axes", "lists", "items", "files", "any files"])
def test_answers_to_a_question_without_an_id_have_one_id(tmp_path, way):
    """Ids are made of files and positions [those of answers: a split would divide a question]."""
    files, line = several_answers(way)
    for name, value in files.items():
        dump(tmp_path / "in" / name, value)

    traces = convert(tmp_path, {"last_token" if way == "axes" else "hidden_states": line})

    ids = [f"{n}.pkl:0" if "files" in way else f"a.pkl:{n}" for n in range(3)]
    assert [*traces] == [(name, k) for name in ids for k in range(2)]


def test_questions_without_ids_are_numbered_by_their_place(tmp_path):
    """A question without answers counts, and no name that its answers bind divides it [ids that move; several questions]."""
    found = [
        {"answers": [{"hs": states(2, 4, 8, seed=3 * n + k), "state": f"s{k}"} for k in range(2)]} for n in range(3)
    ]
    found[0] = {"answers": []}
    dump(tmp_path / "in/a.pkl", found)
    item = "a.pkl : []/answers/[K]/"
    layout = {"hidden_states": f"{item}hs -> L S D", "key.state": f"{item}state", "keep.state": ["s0", "s1"]}

    assert [*convert(tmp_path, layout)] == [("a.pkl:1", 0), ("a.pkl:1", 1), ("a.pkl:2", 0), ("a.pkl:2", 1)]


def test_questions_below_keys_are_told_apart(tmp_path):
    dump(tmp_path / "in/a.pkl", {part: [[states(2, 4, 8, seed=k)] * 2 for k in range(2)] for part in ("easy", "hard")})

    traces = convert(tmp_path, {"hidden_states": "a.pkl : {part}/[]/[K] -> L S D", "duplicates": "keep"})

    assert len(traces) == 8 and {name for name, _ in traces} == {
        f"a.pkl:{n}:{p}" for n in range(2) for p in ("easy", "hard")
    }


def test_numbers_of_answers_need_an_id(tmp_path):
    for name in ("q0_0", "q0_1", "q1_0", "q1_1"):
        save(tmp_path / f"in/{name}.npy", states(2, 4, 8, seed=int(name[1] + name[3])))
    layout = {"hidden_states": "{q}_{sample}.npy -> L S D"}
    refuse(tmp_path, layout, "sample: answer 1 of a question without an id")
    shutil.rmtree(tmp_path / "s.zarr")

    assert [*convert(tmp_path, layout | {"question_id": "={q}"})] == [("q0", 0), ("q0", 1), ("q1", 0), ("q1", 1)]
