"""Test the accounts of ingest.execute, each by the folder that it catches. The numbers are those of the rules."""

from unittest import TestCase

import h5py
import numpy as np
import pytest

import tracestore
from tests.ingest.execute.folders import convert, dump, refuse, save, states, table
from tracestore.errors import TracestoreError, UsageError
from tracestore.ingest.layout.language import parse_layout
from tracestore.ingest.layout.places import plan_of

ROWS = {"hidden_states": "*.pkl : [id=id]/hs -> L S D"}
PASSES = {"hidden_states": "a.pkl : hs -> P L N S D"}


def rows(count=3, **fields):
    """Return records with id and states (L 2, S 4, D 8)."""
    return [{"id": f"q{k}", "hs": states(2, 4, 8, seed=k)} | {n: v(k) for n, v in fields.items()} for k in range(count)]


def write_rows(tmp_path, **fields):
    """Write the records as in/a.pkl."""
    dump(tmp_path / "in/a.pkl", rows(**fields))


def passes(*sizes, rows=2, layers=2, dim=6):
    """Return passes of `sizes` new tokens as lists over layers of (N, s, D)."""
    return [[states(rows, size, dim, seed=10 * p + k) for k in range(layers)] for p, size in enumerate(sizes)]


def test_rule_01_the_same_numbers_of_layers_everywhere(tmp_path):
    for name, layers in (("a", (0, 1, 2)), ("b", (0, 2))):
        for k in layers:
            save(tmp_path / f"in/{name}_{k}.npy", states(4, 8, seed=k))

    refuse(tmp_path, {"hidden_states": "{id}_{layer}.npy -> S D"}, "layer_ids: found")


def test_rule_01_numbers_of_equally_many_layers_differ(tmp_path):
    for name, layers in (("a", (0, 1)), ("b", (0, 2))):
        for k in layers:
            save(tmp_path / f"in/{name}_{k}.npy", states(4, 8, seed=k))

    refuse(tmp_path, {"hidden_states": "{id}_{layer}.npy -> S D"}, r"layer_ids: found \[0, 2\], expected \[0, 1\]")


def test_rule_01a_negative_layers_beside_others_need_the_number_of_layers(tmp_path):
    for k in (0, 8, -1):
        save(tmp_path / f"in/a_{k}.npy", states(4, 8, seed=abs(k)))
    layout = {"hidden_states": "{id}_{layer}.npy -> S D"}
    refuse(tmp_path, layout, "L.size")


def test_rule_01b_sources_of_another_kind_of_layer(tmp_path):
    write_rows(tmp_path)
    convert(tmp_path, ROWS | {"L.what": "block output"})
    (tmp_path / "in/a.pkl").rename(tmp_path / "b.pkl")
    dump(tmp_path / "in/c.pkl", [{"id": "z", "hs": states(2, 4, 8, seed=9)}])

    with pytest.raises(UsageError, match="hidden_states_at"):
        tracestore.convert_files(tmp_path / "in", tmp_path / "s.zarr", layout=ROWS | {"L.what": "mlp_out"})


@pytest.mark.parametrize("num_ids", [2, 3, 5, 6])
def test_rule_02_as_many_tokens_as_states(tmp_path, num_ids):
    write_rows(tmp_path, ids=lambda _: np.arange(num_ids))

    refuse(tmp_path, ROWS | {"tokens": "*.pkl : [id=id]/ids"}, f"tokens: found {num_ids} ids, expected 4")


@pytest.mark.parametrize("extra", [-1, 1])
def test_rule_02_as_many_ids_behind_each_other_as_states(tmp_path, extra):
    arrays = {"h": states(12, 2, 8), "n": np.array([3, 4, 5]), "ids": np.arange(12 + extra)}
    dump(tmp_path / "in/a.pkl", arrays)
    layout = {
        "hidden_states": "a.pkl : h -> (N S) L D",
        "S.lengths": "a.pkl : n -> N",
        "tokens": "a.pkl : ids -> (N S)",
    }

    refuse(tmp_path, layout, f"tokens: found {12 + extra} on the axis")


def test_rule_02_a_mask_as_long_as_states(tmp_path):
    dump(tmp_path / "in/a.pkl", {"hs": states(2, 2, 4, 8), "m": np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])})

    refuse(tmp_path, {"hidden_states": "a.pkl : hs -> N L S D", "S.mask": "a.pkl : m -> N S"}, "S.mask: found 5 values")


@pytest.mark.parametrize("shape", [(2, 1, 5, 5), (2, 1, 4, 5), (2, 1, 3, 3)])
def test_rule_02_as_many_tokens_in_attention_as_states(tmp_path, shape):
    write_rows(tmp_path, attn=lambda _: np.full(shape, 0.25, "f4"))

    refuse(tmp_path, ROWS | {"attentions": "*.pkl : [id=id]/attn -> L H S S"}, "attentions")


def test_rule_03_one_more_id_is_stated_or_follows_passes(tmp_path):
    write_rows(tmp_path, ids=lambda k: np.arange(5) + k)
    refuse(tmp_path, ROWS | {"tokens": "*.pkl : [id=id]/ids -> S"}, "-> T says that the last token has no states")

    traces = convert(tmp_path, ROWS | {"tokens": "*.pkl : [id=id]/ids -> T"})

    assert traces["q1", 0].tokens.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("axes", "num_ids"), [("S", 5), ("T", 4), ("T", 6)])
def test_rule_03_stated_axes_are_exact_also_behind_passes(tmp_path, axes, num_ids):
    """Ids without the first one [ids moved by one]."""
    dump(tmp_path / "in/a.pkl", {"hs": passes(2, 1, 1), "sequences": np.arange(2 * num_ids).reshape(2, num_ids)})

    refuse(tmp_path, PASSES | {"tokens": f"a.pkl : sequences -> N {axes}"}, f"found {num_ids} ids, expected")


def test_rule_03a_padding_behind_an_early_end(tmp_path):
    sequences = np.array([[5, 6, 7, 8, 9], [5, 6, 2, 2, 2]])
    dump(tmp_path / "in/a.pkl", {"hs": passes(2, 1, 1), "sequences": sequences, "ids": ["a", "b"]})
    layout = PASSES | {"tokens": "a.pkl : sequences -> N T", "question_id": "a.pkl : ids -> N"}
    refuse(tmp_path, layout, "S.pad = 2")

    traces = convert(tmp_path, layout | {"S.pad": 2})

    assert traces["a", 0].tokens.tolist() == [5, 6, 7, 8, 9]
    assert traces["b", 0].tokens.tolist() == [5, 6, 2]
    assert [traces[name, 0].num_tokens for name in "ab"] == [4, 2]


def test_rule_03a_fill_and_end_of_rows_differ(tmp_path):
    sequences = np.array([[5, 6, 7, 8, 2], [5, 6, 2, 0, 0]])
    dump(tmp_path / "in/a.pkl", {"hs": passes(2, 1, 1), "sequences": sequences, "ids": ["a", "b"]})
    layout = PASSES | {"tokens": "a.pkl : sequences -> N T", "question_id": "a.pkl : ids -> N", "S.pad": [0, 2]}

    traces = convert(tmp_path, layout)

    assert [traces[name, 0].tokens.tolist() for name in "ab"] == [[5, 6, 7, 8, 2], [5, 6, 2]]


@pytest.mark.parametrize("is_first", [True, False])
def test_rule_03a_the_id_that_a_mask_removes(tmp_path, is_first):
    """The row that ends with it may come before the row that shows it."""
    order = slice(None) if is_first else slice(None, None, -1)
    sequences = np.array([[0, 5, 6, 7, 8], [5, 6, 7, 2, 0]])[order]
    mask = np.array([[0, 1], [1, 1]])[order]
    dump(tmp_path / "in/a.pkl", {"hs": passes(2, 1, 1), "sequences": sequences, "mask": mask, "ids": ["a", "b"]})
    layout = PASSES | {"tokens": "a.pkl : sequences -> N T", "question_id": "a.pkl : ids -> N"}

    refuse(tmp_path, layout | {"S.mask": "a.pkl : mask -> N S"}, "fills rows: S.pad = 0")


@pytest.mark.parametrize(
    "rows",
    [
        [[5, 6, 7, 8, 2], [5, 6, 2, 0, 0]],
        [[5, 6, 7, 8, 9], [5, 6, 2, 0, 0]],
        [[5, 6, 7, 8, 2], [5, 6, 7, 2, 0]],
        [[5, 6, 7, 8, 9], [5, 6, 7, 2, 0]],
        [[5, 6, 2, 0, 0], [5, 6, 2, 0, 0]],
        [[5, 6, 7, 2, 0], [5, 6, 2, 0, 0]],
        [[5, 6, 2, 0, 0], [5, 6, 7, 8, 2]],
        [[2, 6, 7, 8, 9], [2, 6, 2, 0, 0]],
        [[5, 2, 7, 8, 2], [5, 2, 7, 2, 0]],
        [[0, 5, 7, 8, 2], [0, 5, 2, 0, 0]],
    ],
)
@pytest.mark.parametrize("kind", ["passes", "stack", "stack with T"])
def test_rule_03a_an_id_that_fills_rows_ends_them_only_if_rows_prove_it(tmp_path, rows, kind):
    """S.pad = 0 where 2 ends sequences [one id of padding as last token]."""
    sequences = np.array(rows)
    hs = passes(2, 1, 1) if kind == "passes" else states(2, 2, 5 - ("T" in kind), 8)
    dump(tmp_path / "in/a.pkl", {"hs": hs, "sequences": sequences, "ids": ["a", "b"]})
    layout = PASSES if kind == "passes" else {"hidden_states": "a.pkl : hs -> N L S D"}
    axes = "S" if kind == "stack" else "T"
    layout = layout | {"tokens": f"a.pkl : sequences -> N {axes}", "question_id": "a.pkl : ids -> N"}
    refuse(tmp_path, layout | {"S.pad": 0}, r"S.pad: rows end with the id 2 before the id 0 .*S.pad = \[0, 2\] if 2")

    traces = convert(tmp_path, layout | {"S.pad": [0, 2]})

    for name, row in zip("ab", rows, strict=True):
        ids = [*row[:2], *row[2:][: row[2:].index(2) + 1]] if 2 in row[2:] else row
        assert traces[name, 0].tokens.tolist() == ids
        assert traces[name, 0].num_tokens == len(ids) - (kind != "stack")


@pytest.mark.parametrize(
    "rows",
    [
        [[5, 6, 7, 8, 9], [5, 6, 7, 2, 2]],  # 7 does not end the first row
        [[5, 6, 7, 8, 9], [5, 6, 2, 2, 2]],  # the first id that is generated
        [[5, 6, 8, 2, 2], [5, 6, 7, 2, 2]],  # two ids before it
        [[2, 5, 7, 8, 2], [2, 6, 7, 2, 2]],  # every row begins with it
    ],
)
def test_rule_03a_rows_prove_that_an_id_fills_and_ends_them(tmp_path, rows):
    dump(tmp_path / "in/a.pkl", {"hs": passes(2, 1, 1), "sequences": np.array(rows), "ids": ["a", "b"]})
    layout = PASSES | {"tokens": "a.pkl : sequences -> N T", "question_id": "a.pkl : ids -> N", "S.pad": 2}

    traces = convert(tmp_path, layout)

    for name, row in zip("ab", rows, strict=True):
        ids = row[: row.index(2, 1) + 1] if 2 in row[1:] else row
        assert (traces[name, 0].tokens.tolist(), traces[name, 0].num_tokens) == (ids, len(ids) - 1)


@pytest.mark.parametrize("row", [[0, 12, 11, 21, 22, 2, 0], [0, 0, 12, 21, 22, 2, 0]])
def test_rule_03a_prompts_padded_at_the_left_are_no_padding_inside_of_prompts(tmp_path, row):
    """S.padding states the padding in front, S.pad that behind an end [one prompt shorter by two]."""
    sequences = np.array([row, [13, 14, 15, 31, 32, 33, 2]])
    dump(tmp_path / "in/a.pkl", {"hs": passes(3, 1, 1, 1), "sequences": sequences, "ids": ["a", "b"]})
    layout = PASSES | {"tokens": "a.pkl : sequences -> N T", "question_id": "a.pkl : ids -> N", "S.pad": [0, 2]}

    traces = convert(tmp_path, layout | {"S.padding": 0})

    assert traces["a", 0].tokens.tolist() == [k for k in row if k]


@pytest.mark.parametrize("end", [-1, 0, 3])
def test_rule_03a_the_id_before_the_padding_is_the_stated_one(tmp_path, end):
    sequences = np.array([[5, 6, 7, 8, 9], [5, 6, 2, 0, 0]])
    dump(tmp_path / "in/a.pkl", {"hs": passes(2, 1, 1), "sequences": sequences, "ids": ["a", "b"]})
    layout = PASSES | {"tokens": "a.pkl : sequences -> N T", "question_id": "a.pkl : ids -> N", "S.pad": [0, end]}
    if end == 3:
        refuse(tmp_path, layout, "S.pad: found the id 2 before the padding of a row, expected 3")
        return

    assert convert(tmp_path, layout)["b", 0].tokens.tolist() == ([5, 6, 2] if end else [5, 6, 2, 0])


@pytest.mark.parametrize(
    ("rows", "message"),
    [([[0, 0, 7, 8, 2], [5, 6, 7, 8, 2]], "the id 0 twice"), ([[0, 6, 7, 8, 2], [5, 6, 7, 8, 2]], "some rows begin")],
)
@pytest.mark.parametrize("is_stack", [True, False])
def test_rule_03a_padding_before_a_prompt_needs_a_mask(tmp_path, rows, message, is_stack):
    """An id that fills rows says nothing of their beginning [padding as first token]."""
    hs = states(2, 2, 5, 8) if is_stack else passes(2, 1, 1)
    dump(tmp_path / "in/a.pkl", {"hs": hs, "sequences": np.array(rows)})
    layout = {"hidden_states": "a.pkl : hs -> N L S D"} if is_stack else PASSES
    axes = "S" if is_stack else "T"

    refuse(tmp_path, layout | {"tokens": f"a.pkl : sequences -> N {axes}", "S.pad": [0, 2]}, message)


@pytest.mark.parametrize(
    "known",
    [{}, {"S.padding": 0}, {"S.lengths": "a.pkl : lengths -> N", "S.side": "right"}, {"S.mask": "a.pkl : mask -> N T"}],
)
@pytest.mark.parametrize("row", [[5, 6, 7, 2, 0], [5, 6, 2, 0, 0]])
def test_rule_03a_the_id_without_a_state_is_no_padding(tmp_path, known, row):
    """Lengths and masks that count ids, where states are one less [padding as last token]."""
    length = row.index(2) + 1
    sequences = np.array([[5, 6, 7, 8, 2], row])
    mask = [[1] * 5, [1] * length + [0] * (5 - length)]
    arrays = {"mask": np.array(mask), "lengths": np.array([4, min(length, 4)])}
    dump(tmp_path / "in/a.pkl", {"hs": states(2, 2, 4, 8), "sequences": sequences, **arrays})
    layout = {"hidden_states": "a.pkl : hs -> N L S D", "tokens": "a.pkl : sequences -> N T"} | known
    layout["ignore"] = [f"a.pkl : {name}" for name in arrays if not any(name in str(v) for v in known.values())]
    if row[-2] == 2 and "S.mask" not in known and "S.padding" not in known:
        return  # nothing shows that 0 is padding

    refuse(tmp_path, layout, "fills rows: S.pad = 0")


@pytest.mark.parametrize(
    "known",
    [
        {"S.mask": "a.pkl : ones -> N S"},
        {"S.lengths": "a.pkl : widths -> N"},
        {"S.padding": "zeros"},
        {"S.padding": "nan"},
        {"S.padding": 9},
    ],
)
@pytest.mark.parametrize("row", [[5, 6, 0, 0], [0, 0, 5, 6]])
def test_rule_17b_padding_that_leaves_out_nothing(tmp_path, known, row):
    """A mask of ones, lengths of the padded rows, a fill that is not there [padding stored as tokens]."""
    arrays = {"ones": np.ones((2, 4), int), "widths": np.array([4, 4])}
    dump(tmp_path / "in/a.pkl", {"hs": states(2, 2, 4, 8), "ids": np.array([[5, 6, 7, 8], row]), **arrays})
    layout = {"hidden_states": "a.pkl : hs -> N L S D", "tokens": "a.pkl : ids -> N S"} | known
    layout["ignore"] = [f"a.pkl : {name}" for name in arrays if not any(name in str(v) for v in known.values())]
    refuse(tmp_path, layout, 'tokens: no row has padding .* the id 0 twice at one end: S.padding = "none"')
    if known.get("S.padding") in ("nan", 9):  # which another file may need
        refuse(tmp_path, layout, "if no row of any file is padded")

    traces = convert(tmp_path, layout | {"S.padding": "none"})

    assert traces["a.pkl:1", 0].tokens.tolist() == row


@pytest.mark.parametrize("pad", [[0, 2], [0, 0], [0, -1], 0])
@pytest.mark.parametrize("prompts", [[[1, 1, 1], [1, 1, 1]], [[1, 1, 1], [0, 1, 1]]])
def test_rule_17b_an_id_that_fills_no_row(tmp_path, pad, prompts):
    """S.pad = 0 where 2 ends sequences and fills rows [a state of padding as that of the last token]."""
    arrays = {"sequences": np.array([[5, 6, 7, 8, 9, 2], [5, 6, 7, 8, 2, 2]]), "mask": np.array(prompts)}
    passes = tuple(tuple(states(2, n, 8, seed=3 * n + k) for k in range(2)) for n in (3, 1, 1))
    dump(tmp_path / "in/a.pkl", {"hs": passes, **arrays})
    layout = {"hidden_states": "a.pkl : hs -> P L N S D", "tokens": "a.pkl : sequences -> N T"}
    layout |= {"S.mask": "a.pkl : mask -> N S", "S.pad": pad}
    refuse(tmp_path, layout, r"S.pad: no row ends with the id 0 .* S.pad = \[2, 2\]")

    traces = convert(tmp_path, layout | {"S.pad": [2, 2]})

    assert traces["a.pkl:1", 0].tokens.tolist()[-1] == 2


@pytest.mark.parametrize(
    "rows",
    [
        [[0, 6, 7, 8], [0, 6, 0, 0]],
        [[0, 6, 7, 8], [0, 6, 5, 8]],
        [[0, 0, 7, 8], [5, 6, 7, 0]],
        [[0, 0, 7, 8], [0, 6, 7, 8]],
        [[0, 0, 7, 0], [0, 6, 7, 8]],
    ],
)
def test_rule_17b_an_id_that_begins_rows_and_fills_them(tmp_path, rows):
    """S.padding = 0 where 0 is also the first token [a first token left out]."""
    dump(tmp_path / "in/a.pkl", {"hs": states(2, 2, 4, 8), "ids": np.array(rows)})
    layout = {"hidden_states": "a.pkl : hs -> N L S D", "tokens": "a.pkl : ids -> N S", "S.padding": 0}

    refuse(tmp_path, layout, "S.padding: the id 0 begins rows and ends rows, or begins every row")


@pytest.mark.parametrize(
    "mask", [[[0, 1, 1, 1], [0, 1, 1, 1]], [[1, 1, 1, 0], [1, 1, 1, 0]], [[0, 1, 1, 1], [1, 1, 1, 0]]]
)
def test_rule_17b_the_state_of_one_token_is_always_constant(tmp_path, mask):
    """A mask without tokens that leaves out one token of every row [a mask of the answer]."""
    layout = {"hidden_states": "a.pkl : hs -> N L S D", "S.mask": "a.pkl : mask -> N S"}
    hs = states(2, 2, 4, 8)
    dump(tmp_path / "in/a.pkl", {"hs": hs, "mask": np.array(mask)})
    refuse(tmp_path, layout, "S.mask: the states that it leaves out are not constant and no row is full")
    for row, flags in zip(hs, mask, strict=True):
        row[:, np.array(flags) == 0] = 0
    dump(tmp_path / "in/a.pkl", {"hs": hs, "mask": np.array(mask)})

    assert [trace.num_tokens for trace in convert(tmp_path, layout).values()] == [3, 3]


@pytest.mark.parametrize("side", ["left", "right"])
def test_lengths_of_ids_without_padding_next_to_padded_states(tmp_path, side):
    hs, kept = states(3, 2, 9, 8), {"left": slice(-5, None), "right": slice(5)}[side]
    ids = [np.arange(9), np.arange(5) + 20, np.arange(5) + 40]
    dump(tmp_path / "in/a.pkl", {"hs": hs, "ids": ids, "n": [9, 5, 5]})
    layout = {"hidden_states": "a.pkl : hs -> N L S D", "tokens": "a.pkl : ids -> N S"}
    layout |= {"S.lengths": "a.pkl : n -> N", "S.side": side}

    traces = convert(tmp_path, layout)

    for k, trace in enumerate(traces.values()):
        assert trace.tokens.tolist() == ids[k].tolist()
        np.testing.assert_allclose(trace.hidden_states[1], hs[k, 1][kept] if k else hs[k, 1], atol=2e-3)
    dump(tmp_path / "in/a.pkl", {"hs": hs, "ids": [*ids[:2], np.arange(4)], "n": [9, 5, 5]})
    refuse(tmp_path, layout, "found 4 ids, expected 9", overwrite=True)


def test_rule_04_a_lost_file_of_a_layer(tmp_path):
    for token in (0, 1, 2):
        for layer in (0, 1):
            if (token, layer) != (1, 1):
                save(tmp_path / f"in/q_{token}_{layer}.npy", states(8, seed=token))

    refuse(tmp_path, {"hidden_states": "{id}_{token}_{layer}.npy -> D"}, "token 1, layer 1 is missing")


@pytest.mark.parametrize("name", ["token", "step"])
@pytest.mark.parametrize("lost", ["a", "b"])
def test_rule_04_the_first_file_of_one_trace_is_lost(tmp_path, name, lost):
    """Numbers may begin at 0 or at 1, but with the same one in every trace."""
    for trace in "ab":
        for k in range(3):
            save(tmp_path / f"in/{trace}_{k}.npy", states(2, 8, seed=ord(trace) + k))
    layout = {"hidden_states": f"{{id}}_{{{name}}}.npy -> L D"}
    assert len(convert(tmp_path, layout)) == 2
    (tmp_path / f"in/{lost}_0.npy").unlink()

    refuse(tmp_path, layout, f"the first {name} is .*: one of them lacks a {name}", overwrite=True)


@pytest.mark.parametrize("name", ["token", "step"])
def test_rule_04_tokens_and_steps_have_no_gaps(tmp_path, name):
    for k in (0, 1, 3):
        save(tmp_path / f"in/q_{k}.npy", states(2, 8, seed=k))

    refuse(tmp_path, {"hidden_states": f"{{id}}_{{{name}}}.npy -> L D"}, "is missing|have gaps")


def test_rule_05_passes_grow_by_new_tokens_only(tmp_path):
    """generate() without a cache: each pass holds the whole prefix."""
    hs = passes(2, 3, 4)
    dump(tmp_path / "in/a.pkl", {"hs": hs, "sequences": np.arange(10).reshape(2, 5), "ids": ["a", "b"]})
    layout = PASSES | {"question_id": "a.pkl : ids -> N"}
    with_ids = layout | {"tokens": "a.pkl : sequences -> N T"}
    refuse(tmp_path, with_ids, "tokens: found 5 ids, expected 10 for 9 states")

    traces = convert(tmp_path, with_ids | {"P.repeats": True})

    assert len(traces) == 2
    np.testing.assert_allclose(traces["b", 0].hidden_states[1], hs[2][1][1], atol=2e-3)


def test_rule_05a_passes_without_ids_have_one_token_each(tmp_path):
    dump(tmp_path / "in/a.pkl", {"hs": passes(3, 2, 1)})
    refuse(tmp_path, PASSES, "P.repeats = true, or P.new = true")

    assert all(trace.num_tokens == 6 for trace in convert(tmp_path, PASSES | {"P.new": True}).values())


@pytest.mark.parametrize(("sizes", "length"), [((3, 1, 1), 3), ((3, 2, 1), None)])
def test_rule_05b_the_first_pass_is_the_prompt_if_the_others_have_one_token(tmp_path, sizes, length):
    dump(tmp_path / "in/a.pkl", {"hs": passes(*sizes)})

    assert {t.prompt_length for t in convert(tmp_path, PASSES | {"P.new": True}).values()} == {length}


@pytest.mark.parametrize("is_causal", [False, True])
def test_rule_06_attention_is_causal_or_square(tmp_path, is_causal):
    weights = np.random.default_rng(0).random((2, 1, 4, 4)) + 0.1
    weights = np.tril(weights) if is_causal else weights
    attention = (weights / weights.sum(-1, keepdims=True)).astype("f4")
    write_rows(tmp_path, attn=lambda _: attention)
    layout = ROWS | {"attentions": "*.pkl : [id=id]/attn -> L H S S"}

    np.testing.assert_allclose(convert(tmp_path, layout)["q1", 0].attention, attention[:, 0], atol=2e-3)
    write_rows(tmp_path, attn=lambda _: attention[..., :3])
    refuse(tmp_path, layout, "attentions", overwrite=True)


@pytest.mark.parametrize("columns", [(3, 3, 5), (3, 3, 4), (2, 4, 5)])
def test_rule_06_passes_attend_to_the_tokens_so_far(tmp_path, columns):
    attention = [[np.full((2, 1, s, c), 1 / c, "f4")] * 2 for s, c in zip((3, 1, 1), columns, strict=True)]
    dump(tmp_path / "in/a.pkl", {"hs": passes(3, 1, 1), "attn": attention})

    refuse(
        tmp_path, PASSES | {"attentions": "a.pkl : attn -> P L N H S S"}, "attentions: found . columns, expected the"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a.swapaxes(-1, -2), "transposed"),
        (lambda a: a - 1, "expected 0 to 1"),
        (lambda a: a * 3, "expected 0 to 1"),
    ],
)
@pytest.mark.parametrize("layer", [0, 1])
def test_rule_06a_attention_lies_between_0_and_1_and_its_rows_sum_to_1(tmp_path, change, words, layer):
    weights = np.tril(np.random.default_rng(0).random((2, 1, 4, 4)) + 0.1)
    attention = (weights / weights.sum(-1, keepdims=True)).astype("f4")
    attention[layer] = change(attention[layer])
    write_rows(tmp_path, attn=lambda _: attention)

    refuse(tmp_path, ROWS | {"attentions": "*.pkl : [id=id]/attn -> L H S S"}, words)


@pytest.mark.parametrize("masked", [0, 3])
def test_rule_06b_no_token_is_masked(tmp_path, masked):
    """A row of padding in front sees all tokens alike; one behind sees those that are not masked."""
    weights = np.tril(np.ones((4, 4), "f4"))
    weights[:, masked] = 0
    weights[masked] = 1 if masked == 0 else weights[masked]
    write_rows(tmp_path, attn=lambda _: np.tile(weights / weights.sum(-1, keepdims=True), (2, 1, 1, 1)))
    layout = ROWS | {"attentions": "*.pkl : [id=id]/attn -> L H S S"}

    refuse(tmp_path, layout, f"token {masked} is masked")

    convert(tmp_path, layout | {"S.padding": "none"})


@pytest.mark.parametrize("dtype", ["i1", "u1", "i4", "u2", "u8"])
def test_rule_07_bytes_and_integers_are_no_states(tmp_path, dtype):
    save(tmp_path / "in/a.npy", (np.arange(64).reshape(2, 4, 8) + 1).astype(dtype))

    refuse(tmp_path, {"hidden_states": "{id}.npy -> L S D"}, "floating-point numbers")


def test_rule_07_raw_bits_and_scaled_integers_are_stated(tmp_path):
    values = states(2, 4, 8)
    bits = (values.view("u4") >> 16).astype("u2")
    save(tmp_path / "in/a.npy", bits)
    layout = {"hidden_states": "{id}.npy -> L S D"}

    traces = convert(tmp_path, layout | {"dtype.hidden_states": "bfloat16"})

    np.testing.assert_allclose(traces["a", 0].hidden_states, values, rtol=1e-2)
    save(tmp_path / "in/a.npy", np.full((2, 4, 8), 5, "i1"))
    traces = convert(tmp_path, layout | {"scale.hidden_states": 0.5}, overwrite=True)
    assert (np.asarray(traces["a", 0].hidden_states) == 2.5).all()
    save(tmp_path / "in/a.npy", np.full((2, 4, 8), 0x38, "u1"))  # 1 in float8_e4m3fn
    settings = {"dtype.hidden_states": "float8_e4m3fn", "scale.hidden_states": 0.5}
    refuse(tmp_path, layout | settings, "float8_e4m3fn values, expected integers.* multiply", overwrite=True)


def test_rule_08_attention_without_a_line(tmp_path):
    write_rows(tmp_path, attn=lambda _: np.ones((2, 1, 4, 4), "f4"))
    refuse(tmp_path, ROWS, r"attn: no line of the layout names numbers \(an array")

    assert len(convert(tmp_path, ROWS | {"ignore": ["*.pkl : [id=id]/attn"]})) == 3


@pytest.mark.parametrize(
    "value", [{}, {"steps": 3}, {"a": {"b": {"c": 1.5}}}, {"names": ["x", "y"]}, {"a": None, "b": True}, "text"]
)
def test_rule_08_what_holds_no_array_needs_no_line(tmp_path, value):
    write_rows(tmp_path, settings=lambda _: value)

    assert len(convert(tmp_path, ROWS)) == 3


@pytest.mark.parametrize("value", [{"a": np.ones(3)}, {"a": {"b": [np.ones(3)]}}, {"a": 1, "b": [[1.5, 2.5]]}])
def test_rule_08_an_array_in_a_group_without_a_line(tmp_path, value):
    write_rows(tmp_path, settings=lambda _: value)

    refuse(tmp_path, ROWS, "settings: no line of the layout names")


def test_rule_08_a_file_without_a_line(tmp_path):
    write_rows(tmp_path)
    save(tmp_path / "in/attn.npy", states(3))
    refuse(tmp_path, ROWS, "no line of the layout names attn.npy")

    assert len(convert(tmp_path, ROWS | {"ignore": ["attn.npy"]})) == 3


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("truth.csv : [id=qid]/ok", "the line for is_correct matches no file: truth.csv; or add a line"),
        (
            "labels.csv:[id=qid]/ok",
            r"matches no file: labels.csv:\[id=qid\]/ok: a line is FILES : PATH -> AXES, with blanks",
        ),
    ],
)
def test_rule_08_a_misspelled_line_is_named(tmp_path, line, words):
    save(tmp_path / "in/q0.npy", states(2, 3, 8))
    (tmp_path / "in/labels.csv").write_text("qid,ok\nq0,1\n")

    refuse(tmp_path, {"hidden_states": "{id}.npy -> L S D", "is_correct": line}, words)


def test_rule_08_an_address_without_files(tmp_path):
    write_rows(tmp_path)
    refuse(tmp_path, {"hidden_states": "[id=id]/hs -> L S D"}, r"expected FILES : \[id=id\]/hs$")
    refuse(tmp_path, {"hidden_states": "{id}.npy : hs -> L S D"}, r"add a line, or ignore = \[")


@pytest.mark.parametrize("key", ["label", "is_correct", "isCorrect", "bleurt_score", "y", "hallucination", "verdict"])
@pytest.mark.parametrize("records", [(), ("*.pkl : [id=id]",)])
def test_rule_08a_what_may_be_a_label_is_no_extra(tmp_path, key, records):
    write_rows(tmp_path, **{key: lambda k: k % 2})

    refuse(
        tmp_path, ROWS | ({"records": list(records)} if records else {}), f"{key}: no line of the layout names what may"
    )


@pytest.mark.parametrize(("lengths", "is_right"), [([3, 4, 5], True), ([3, 4, 4], False), ([3, 4, 6], False)])
def test_rule_09_lengths_sum_to_the_axis(tmp_path, lengths, is_right):
    save(tmp_path / "in/h.npy", states(12, 2, 8))
    save(tmp_path / "in/n.npy", np.array(lengths))
    table(tmp_path / "in/ids.json", ["a", "b", "c"])
    layout = {"hidden_states": "h.npy -> (N S) L D", "S.lengths": "n.npy -> N", "question_id": "ids.json -> N"}

    if is_right:
        assert [t.num_tokens for t in convert(tmp_path, layout).values()] == lengths
    else:
        refuse(tmp_path, layout, "S.lengths: ranges end at .*, expected 12")


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        ([(0, 3), (3, 12)], ""),
        ([(0, 3), (4, 12)], "gap"),
        ([(0, 5), (3, 12)], "overlap"),
        ([(0, 3), (3, 11)], "end at 11"),
    ],
)
@pytest.mark.parametrize("known", ["S.ends", "S.lengths"])
@pytest.mark.parametrize("order", [1, -1])
def test_rule_09_ranges_are_disjoint_and_cover_the_axis(tmp_path, ranges, words, known, order):
    array, of_lengths = states(12, 2, 8), known == "S.lengths"
    save(tmp_path / "in/h.npy", array)
    found = [{"id": f"q{k}", "a": a, "b": b - a * of_lengths} for k, (a, b) in enumerate(ranges)]
    table(tmp_path / "in/t.csv", found[::order])
    layout = {"hidden_states": "h.npy -> (N S) L D", "question_id": "t.csv : []/id"}
    layout |= {"S.starts": "t.csv : []/a", known: "t.csv : []/b"}

    if words:
        refuse(tmp_path, layout, words)
    else:
        traces = convert(tmp_path, layout)
        for k, (begin, end) in enumerate(ranges):
            expected = array[begin:end].swapaxes(0, 1)
            np.testing.assert_allclose(traces[f"q{k}", 0].hidden_states, expected, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("lengths", [[3, 9, 0], [3], [3.0, 9.0], [3, None], ["3", "9 tokens"]])
def test_rule_09_lengths_next_to_starts(tmp_path, lengths):
    dump(tmp_path / "in/a.pkl", {"hs": states(12, 2, 8), "begins": [0, 3], "sizes": lengths})
    layout = {"hidden_states": "a.pkl : hs -> (N S) L D", "S.starts": "a.pkl : begins -> N"}

    refuse(tmp_path, layout | {"S.lengths": "a.pkl : sizes -> N"}, "S.lengths|S.starts|number of a row")


@pytest.mark.parametrize("ids", [(1, "1"), ("a", "a"), (1, 1.0), (" a", "a")])
def test_rule_10_each_id_and_sample_once(tmp_path, ids):
    dump(tmp_path / "in/a.pkl", [{"id": name, "hs": states(2, 4, 8, seed=k)} for k, name in enumerate(ids)])

    refuse(tmp_path, ROWS, "occurs twice|two values")


@pytest.mark.parametrize("question", ["  WHY\n", None, "Who"])
def test_rule_10_an_id_has_one_question(tmp_path, question):
    """[`q1.pt` of two runs, one with a number of its answer]"""
    write_rows(tmp_path, question=lambda k: ("why", "why", question)[k], n=lambda k: k)
    layout = ROWS | {"question_id": "=q", "sample": "*.pkl : [id=id]/n", "question": "*.pkl : [id=id]/question"}

    if question == "Who":
        refuse(tmp_path, layout, "trace 2, question: found 'Who', expected that of sample 0 of question id 'q', 'why'")
    else:
        assert [*convert(tmp_path, layout)] == [("q", k) for k in range(3)]


def test_rule_10a_hidden_names_are_left_out_and_links_to_folders_not_followed(tmp_path):
    write_rows(tmp_path)
    for name in (".hidden.pkl", "~a.pkl", "__MACOSX/a.pkl"):
        dump(tmp_path / "in" / name, ["x"])
    dump(tmp_path / "other/b.pkl", ["x"])
    (tmp_path / "in/link").symlink_to(tmp_path / "other")
    (tmp_path / "in/again.pkl").symlink_to(tmp_path / "in/a.pkl")

    assert len(convert(tmp_path, {"hidden_states": "**/*.pkl : [id=id]/hs -> L S D"})) == 3


@pytest.mark.parametrize("link", ["latest.npy", "zz.npy"])
def test_rule_10a_a_file_has_its_own_name_and_not_that_of_a_link_next_to_it(tmp_path, link):
    """[`latest` as the id of the newest trace]"""
    for name in ("m1", "m2"):
        save(tmp_path / f"in/{name}.npy", states(2, 4, 8, seed=ord(name[1])))
    (tmp_path / "in" / link).symlink_to("m2.npy")

    assert {key for key, _ in convert(tmp_path, {"hidden_states": "{id}.npy -> L S D"})} == {"m1", "m2"}


def test_rule_10a_links_to_other_folders_have_the_names_that_the_layout_reads(tmp_path):
    save(tmp_path / "in/raw/x9.npy", states(2, 4, 8))
    (tmp_path / "in/q0.npy").symlink_to("raw/x9.npy")
    save(tmp_path / "in/q1.npy", states(2, 4, 8, seed=1))

    assert [key for key, _ in convert(tmp_path, {"hidden_states": "{id}.npy -> L S D"})] == ["q0", "q1"]


@pytest.mark.parametrize("copy", ["q1 (1)", "q1-checkpoint", "q1_copy", "q1-Copy2", "q1.bak"])
def test_rule_10b_copies_are_refused_unless_they_are_meant(tmp_path, copy):
    for name in ("q1", copy):
        save(tmp_path / f"in/{name}.npy", states(2, 4, 8))
    layout = {"hidden_states": "{id}.npy -> L S D"}
    refuse(tmp_path, layout, "a copy")

    assert len(convert(tmp_path, layout | {"duplicates": "keep"})) == 2


def test_rule_10b_equal_states_under_other_names_are_counted(tmp_path):
    for name in ("q1", "q2"):
        save(tmp_path / f"in/{name}.npy", states(2, 4, 8))

    with TestCase().assertLogs("tracestore") as logged:
        convert(tmp_path, {"hidden_states": "{id}.npy -> L S D"})

    assert any("1 trace with the hidden states of another id" in line for line in logged.output)


@pytest.mark.parametrize("key", ["question_id", "qid", "id", "example_idx"])
@pytest.mark.parametrize("ids", [(1, 2, 0), (0, 2, 1)])
def test_rule_11_a_trace_does_not_hold_the_id_of_another_one(tmp_path, key, ids):
    layout = {"hidden_states": "{id}.pkl : hs -> L S D"}

    def write(names):
        for k, name in enumerate(names):
            dump(tmp_path / f"in/{k}.pkl", {"hs": states(2, 4, 8, seed=k), key: name})

    write(ids)
    refuse(tmp_path, layout, f"has the id '.', which names another one; .*{key}")
    convert(tmp_path, layout | {"ignore": [f"{{id}}.pkl : {key}"]}, overwrite=True)
    for names in (range(3), ("a", "b", "c")):
        write(names)
        convert(tmp_path, layout, overwrite=True)


@pytest.mark.parametrize("place", ["attribute", "json", "key"])
def test_rule_11_ids_in_attributes_tables_and_dicts(tmp_path, place):
    ids, arrays = ("b", "c", "a"), [states(2, 4, 8, seed=k) for k in range(3)]
    (tmp_path / "in").mkdir()
    if place == "attribute":
        with h5py.File(tmp_path / "in/a.h5", "w") as file:
            for name, other, array in zip("abc", ids, arrays, strict=True):
                file[f"{name}/hs"] = array
                file[name].attrs["question_id"] = other
    if place == "key":
        found = zip("abc", ids, arrays, strict=True)
        dump(tmp_path / "in/a.pkl", {name: {"hs": array, "question_id": other} for name, other, array in found})
    layout = {"hidden_states": f"a.{'h5' if place == 'attribute' else 'pkl'} : {{id}}/hs -> L S D"}
    if place == "json":
        for name, other, array in zip("abc", ids, arrays, strict=True):
            save(tmp_path / f"in/{name}.npy", array)
            table(tmp_path / f"in/{name}.json", {"id": other, "question": "x"})
        layout = {"hidden_states": "{id}.npy -> L S D", "question": "{id}.json : question"}

    refuse(tmp_path, layout, "which names another one")


@pytest.mark.parametrize("line", ["{id}.npy -> S D", "a.pkl : {id} -> S D", "a.pkl : [id=name]/hs -> S D"])
def test_rule_11_ids_do_not_number_layers(tmp_path, line):
    arrays = {f"q{k}_layer{layer}": states(4, 8, seed=10 * k + layer) for k in range(2) for layer in (0, 1)}
    if line[0] == "{":
        for name, array in arrays.items():
            save(tmp_path / f"in/{name}.npy", array)
    else:
        rows = [{"name": name, "hs": array} for name, array in arrays.items()]
        dump(tmp_path / "in/a.pkl", rows if "[" in line else arrays)

    refuse(tmp_path, {"hidden_states": line}, "differ in what names a part of a trace")
    if "[" not in line:
        assert len(convert(tmp_path, {"hidden_states": line, "question_id": "={id}"}, overwrite=True)) == 4
        line = line.replace("{id}", "{id}_layer{layer}")
        assert {len(t.hidden_states) for t in convert(tmp_path, {"hidden_states": line}, overwrite=True).values()} == {
            2
        }


def test_rule_11_ids_with_a_number_behind_the_word_layer(tmp_path):
    """[the last layer of each question]"""
    for k in range(3):
        save(tmp_path / f"in/last_layer_{k}.npy", states(4, 8, seed=k))
    assert len(convert(tmp_path, {"hidden_states": "{id}.npy -> S D"})) == 3


@pytest.mark.parametrize("files", ["*/{id}.npy", "**/{id}.npy"])
def test_rule_08a_a_folder_that_names_a_class_is_not_left_out(tmp_path, files):
    for k, verdict in enumerate(("correct", "Hallucinated", "correct")):
        save(tmp_path / f"in/{verdict}/q{k}.npy", states(2, 4, 8, seed=k))

    refuse(tmp_path, {"hidden_states": f"{files} -> L S D"}, "in the name may be the label")
    layout = {"hidden_states": "{verdict}/{id}.npy -> L S D"}
    assert len(convert(tmp_path, layout)) == 3
    traces = convert(tmp_path, layout | {"is_correct": "={verdict}"}, overwrite=True)
    assert [traces[f"q{k}", 0].score for k in range(3)] == [1, 0, 1]


@pytest.mark.parametrize("name", ["{}.npy", "/data/run/{}.npy"])
def test_rule_13b_a_row_by_id_does_not_name_the_file_of_another_trace(tmp_path, name):
    """[files numbered in a loop, and a table with their names and other numbers]"""
    for k in range(3):
        save(tmp_path / f"in/{k}.npy", states(2, 4, 8, seed=k))
    rows = [{"path": name.format(k), "qid": (k + 1) % 3, "ok": int(k == 0)} for k in range(3)]
    table(tmp_path / "in/t.csv", rows)
    layout = {"hidden_states": "{id}.npy -> L S D"}

    refuse(
        tmp_path, layout | {"is_correct": "t.csv : [id=qid]/ok"}, r"names the file .* of another trace; \[file=path\]"
    )
    for more in (
        {"is_correct": "t.csv : [file=path]/ok"},
        {
            "is_correct": "t.csv : [file=path]/ok",
            "hidden_states": "*.npy -> L S D",
            "question_id": "t.csv : [file=path]/qid",
        },
    ):
        traces = convert(tmp_path, layout | more, overwrite=True)
        assert sum(trace.score for trace in traces.values()) == traces[str(int("question_id" in more)), 0].score == 1
    table(tmp_path / "in/t.csv", [row | {"qid": k} for k, row in enumerate(rows)])
    convert(tmp_path, layout | {"is_correct": "t.csv : [id=qid]/ok"}, overwrite=True)


@pytest.mark.parametrize("parts", [("prompt", "answer"), ("question", "response")])
def test_rule_11_ids_do_not_name_prompt_and_answer(tmp_path, parts):
    for k, name in enumerate(f"q{k}_{part}" for k in range(2) for part in parts):
        save(tmp_path / f"in/{name}.npy", states(2, 4 + k, 8, seed=k))

    refuse(tmp_path, {"hidden_states": "{id}.npy -> L S D"}, "two addresses are prompt and answer")
    lines = [f"{{id}}_{part}.npy -> L S D" for part in parts]
    assert set(convert(tmp_path, {"hidden_states": lines}, overwrite=True)) == {("q0", 0), ("q1", 0)}
    layout = {"hidden_states": "{id}.npy -> L S D", "question_id": "={id}"}
    assert len(convert(tmp_path, layout, overwrite=True)) == 4


def test_rule_11_attention_of_other_ids(tmp_path):
    arrays = {f"{name}_{k}": states(2, 4, 8, seed=k) for k, name in enumerate(["h_a", "h_b"])}
    (tmp_path / "in").mkdir()
    np.savez(tmp_path / "in/a.npz", **arrays, t_a_0=np.arange(4), t_c_0=np.arange(4))
    layout = {"hidden_states": "a.npz : h_{id}_{n:d} -> L S D", "tokens": "a.npz : t_{id}_*"}

    refuse(tmp_path, layout, "id c of a.npz : .* belongs to no trace")


def labels(tmp_path, pairs, name="labels.csv"):
    """Write a table of ids and labels next to the records; return the layout."""
    write_rows(tmp_path)
    table(tmp_path / "in" / name, [{"qid": i, "label": v} for i, v in pairs])
    return ROWS | {"is_correct": "labels.csv : [id=qid]/label"}


@pytest.mark.parametrize("counts", [(2, 3), (3, 2)])
def test_rule_11_answers_and_their_states(tmp_path, counts):
    hs, texts = [states(2, 4, 8, seed=k) for k in range(counts[0])], [f"a{k}" for k in range(counts[1])]
    dump(tmp_path / "in/a.pkl", [{"id": "q", "hs": hs, "texts": texts}])
    layout = {"hidden_states": "a.pkl : [id=id]/hs/[K] -> L S D", "generated_answer": "a.pkl : [id=id]/texts/[K]"}

    refuse(tmp_path, layout, "belongs to no trace" if counts[0] < counts[1] else "no value of the answer 2")


def test_rule_11_layers_of_attention_and_states(tmp_path):
    for k in (8, 16):
        save(tmp_path / f"in/q_h{k}.npy", states(4, 8, seed=k))
        save(tmp_path / f"in/q_a{k + 1}.npy", np.full((1, 4, 4), 0.25, "f4"))
    layout = {"hidden_states": "{id}_h{layer}.npy -> S D", "attentions": "{id}_a{layer}.npy -> H S S"}

    refuse(tmp_path, layout, r"attentions: found the layers \[9, 17\], expected \[8, 16\]")


def test_rule_12_no_key_of_a_table_twice(tmp_path):
    layout = labels(tmp_path, [("q0", 1), ("q1", 0), ("q1", 1), ("q2", 1)])

    refuse(tmp_path, layout, "two values of id q1")


def test_rule_12_unused_rows_and_traces_without_a_row_are_counted(tmp_path):
    layout = labels(tmp_path, [("q0", 1), ("q1", 0), ("other", 1)])

    with TestCase().assertLogs("tracestore") as logged:
        traces = convert(tmp_path, layout)

    counted = "is_correct: 2 rows of labels.csv joined by id, 1 without a trace, 1 trace without a row"
    assert any(counted in line for line in logged.output)
    assert [traces[f"q{k}", 0].score for k in range(2)] == [1, 0]
    assert np.isnan(traces["q2", 0].score)


def test_rule_12a_a_label_serves_one_trace(tmp_path):
    answers = [{"hs": states(2, 4, 8, seed=k)} for k in range(4)]
    dump(tmp_path / "in/a.pkl", [{"id": f"q{k}", "ok": k, "answers": answers[2 * k : 2 * k + 2]} for k in range(2)])
    layout = {"hidden_states": "a.pkl : [id=id]/answers/[K]/hs -> L S D", "is_correct": "a.pkl : [id=id]/ok"}
    refuse(tmp_path, layout, "serves several traces")

    traces = convert(tmp_path, layout | {"share.is_correct": ["sample"]})

    assert [traces["q1", k].score for k in range(2)] == [1, 1]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["sample"], "serves several traces"),
        (["model"], "serves several traces"),
        (["model", "sample"], ""),
        (["sample", "model"], ""),
        (["models", "sample"], "share.is_correct: has no effect without .* names that the states bind"),
        (["model", "sample", ["id"]], "share.is_correct: has no effect"),
    ],
)
def test_rule_12a_a_label_is_shared_over_the_stated_names_alone(tmp_path, names, words):
    for k, name in enumerate(["a/q0_0", "a/q0_1", "b/q0_0", "b/q0_1"]):
        save(tmp_path / f"in/{name}.npy", states(2, 4, 8, seed=k))
    table(tmp_path / "in/t.csv", [{"id": "q0", "ok": 1}])
    layout = {"hidden_states": "{model}/{id}_{sample}.npy -> L S D", "is_correct": "t.csv : [id=id]/ok"}
    layout |= {"question_id": "={model}_{id}", "share.is_correct": names}

    if words:
        with pytest.raises(TracestoreError, match=words):
            convert(tmp_path, layout)
    else:
        assert [trace.score for trace in convert(tmp_path, layout).values()] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("files", "line", "more"),
    [
        ("{id}_{sample}_{rank}.npy", "{id}_{sample}_{rank}.npy", {}),
        ("seed{sample}/{id}.npy", "seed{seed}/{id}.npy", {"sample": "={seed}"}),
    ],
)
def test_rule_12a_names_that_only_locate_a_file_need_no_share(tmp_path, files, line, more):
    for k in range(2):
        save(tmp_path / "in" / files.format(id="q0", sample=k, rank=k), states(2, 4, 8, seed=k))
    table(tmp_path / "in/t.csv", [{"id": "q0", "ok": 1}])
    layout = {"hidden_states": f"{line} -> L S D", "is_correct": "t.csv : [id=id]/ok", **more}

    traces = convert(tmp_path, layout | {"share.is_correct": ["sample"]})

    assert {key: trace.score for key, trace in traces.items()} == {("q0", 0): 1, ("q0", 1): 1}


def test_rule_12a_one_row_for_every_rank(tmp_path):
    for rank in range(2):
        dump(tmp_path / f"in/rank{rank}.pkl", [{"idx": k, "hs": states(2, 4, 8, seed=10 * rank + k)} for k in range(3)])
    table(tmp_path / "in/labels.csv", [{"idx": k, "label": k % 2} for k in range(6)])
    layout = {"hidden_states": "rank{rank}.pkl : [n=idx]/hs -> L S D", "is_correct": "labels.csv : [n=idx]/label"}

    refuse(tmp_path, layout, "serves several traces")


@pytest.mark.parametrize(
    "spell",
    [
        lambda i: i.upper(),
        lambda i: f"q0{i[1:]}",
        lambda i: f" {i[0]} {i[1:]}",
        lambda i: f"{i}.0",
        lambda i: f"ｑ{i[1:]}",
    ],
)
def test_rule_12b_a_remainder_that_differs_in_spelling_only(tmp_path, spell):
    layout = labels(tmp_path, [("q0", 1), (spell("q1"), 0), (spell("q2"), 1)])

    refuse(tmp_path, layout, "differ in spelling only")


def test_rule_12b_rows_numbered_from_1(tmp_path):
    layout = labels(tmp_path, [("q1", 1), ("q2", 0), ("q3", 1)])

    refuse(tmp_path, layout, "numbered from 0 and from 1")


def test_rule_12c_no_match_at_all(tmp_path):
    layout = labels(tmp_path, [("x", 1), ("y", 0), ("z", 1)])

    refuse(tmp_path, layout, "no id of it is that of a trace")


@pytest.mark.parametrize("field", ["is_correct", "question"])
def test_rule_12c_a_column_that_is_nowhere(tmp_path, field):
    """A misspelled name of a column: the labels would be missing without a word."""
    write_rows(tmp_path)
    table(tmp_path / "in/t.csv", [{"qid": f"q{k}", "column": k % 2} for k in range(3)])

    refuse(tmp_path, ROWS | {field: "t.csv : [id=qid]/columns"}, "the files hold no such value")


def test_rule_12c_a_label_that_is_nowhere(tmp_path):
    write_rows(tmp_path, column=lambda k: k % 2)

    refuse(tmp_path, ROWS | {"is_correct": "*.pkl : [id=id]/columns"}, "the files hold no such value")


@pytest.mark.parametrize("count", [2, 4])
def test_rule_13_totals_in_order_are_equal(tmp_path, count):
    save(tmp_path / "in/h.npy", states(3, 2, 4, 8))
    save(tmp_path / "in/y.npy", np.arange(count) % 2)

    refuse(tmp_path, {"hidden_states": "h.npy -> N L S D", "is_correct": "y.npy -> N"}, f"{count} rows")


def test_rule_13_several_files_have_no_order(tmp_path):
    for name in "ab":
        save(tmp_path / f"in/h_{name}.npy", states(3, 2, 4, 8, seed=ord(name)))
    save(tmp_path / "in/y.npy", np.arange(6) % 2)

    refuse(
        tmp_path,
        {"hidden_states": "h_*.npy -> N L S D", "is_correct": "y.npy -> N"},
        "rows in order|6 rows belong to 3 traces",
    )


def test_rule_13_rows_of_two_tables_have_no_order(tmp_path):
    save(tmp_path / "in/h.npy", states(3, 2, 4, 8))
    for name in "ab":
        table(tmp_path / f"in/{name}.csv", [{"ok": 1}] * 3)

    refuse(
        tmp_path,
        {"hidden_states": "h.npy -> N L S D", "is_correct": "*.csv : []/ok"},
        "rows in order lie in a.csv and b.csv",
    )


@pytest.mark.parametrize("numbers", [(0, 1), (1, 2), (0, 2)])
def test_rule_13_chunks_are_numbered_from_0_without_gaps(tmp_path, numbers):
    for k in numbers:
        save(tmp_path / f"in/h_{k}.npy", states(3, 2, 4, 8, seed=k))
    save(tmp_path / "in/y.npy", np.array([0, 1, 1, 0, 0, 1]))
    layout = {"hidden_states": "h_{chunk}.npy -> N L S D", "is_correct": "y.npy -> N"}

    if numbers == (0, 1):
        traces = convert(tmp_path, layout)
        assert [trace.score for trace in traces.values()] == [0, 1, 1, 0, 0, 1]
    else:
        refuse(tmp_path, layout, "without gaps")


@pytest.mark.parametrize("count", [5, 7])
def test_rule_13_totals_over_chunks(tmp_path, count):
    for k in range(2):
        save(tmp_path / f"in/h_{k}.npy", states(3, 2, 4, 8, seed=k))
    dump(tmp_path / "in/b.pkl", [{"h": states(3, 2, 4, 8, seed=k)} for k in range(2)])
    save(tmp_path / "in/y.npy", np.arange(count) % 2)
    labels = {"is_correct": "y.npy -> N"}

    files = {"hidden_states": "h_{chunk}.npy -> N L S D", "ignore": ["b.pkl"]}
    refuse(tmp_path, labels | files, f"{count} rows belong to 6 traces")
    items = {"hidden_states": "b.pkl : [chunk]/h -> N L S D", "ignore": ["h_*.npy"]}
    refuse(tmp_path, labels | items, f"{count} rows belong to 6 traces")


def test_rule_13_a_column_of_ids_is_not_left_unused(tmp_path):
    save(tmp_path / "in/h.npy", states(3, 2, 4, 8))
    table(tmp_path / "in/t.csv", [{"id": name, "ok": 1} for name in "bca"])
    layout = {"hidden_states": "h.npy -> N L S D", "is_correct": "t.csv : []/ok"}
    refuse(tmp_path, layout, "this column of ids is left out")

    for name in (
        "slot",
        "pos",
        "order",
        "row",
        "array_idx",
        "tensor_index",
        "hidden_row",
        "dataset_idx",
        "global_index",
    ):
        table(tmp_path / "in/t.csv", [{name: k, "ok": 1} for k in (1, 0, 2)])
        refuse(tmp_path, layout, "this column of ids is left out")

    table(tmp_path / "in/t.csv", [{"index": k, "ok": 1} for k in range(3)])
    assert len(convert(tmp_path, layout)) == 3


def test_rule_13_rows_that_say_their_number(tmp_path):
    save(tmp_path / "in/h.npy", states(3, 2, 4, 8))
    table(tmp_path / "in/t.csv", [{"row": k, "ok": int(k == 2)} for k in (2, 0, 1)])
    layout = {"hidden_states": "h.npy -> N L S D", "is_correct": "t.csv : [N=row]/ok"}

    assert [trace.score for trace in convert(tmp_path, layout).values()] == [0, 0, 1]
    table(tmp_path / "in/t.csv", [{"row": k, "ok": 1} for k in (1, 2, 3)])
    refuse(tmp_path, layout, "rows in order|numbered from 0|belong to", overwrite=True)


@pytest.mark.parametrize(
    ("steps", "key", "in_order", "not_in_order"),
    [
        ("{id}/answers/[K]", "sample", (1, 2, 3), (2, 0, 1)),
        ("{id}/answers/[K]", "gen_idx", (0, 1, 2), (0, 2, 3)),
        ("{id}/answers/[K]", "index", (7, 8, 9), (1, 0, 2)),
        ("{id}/answers/[L]", "layer", (8, 16, 24), (24, 16, 8)),
        ("{id}/answers/[S]", "pos", (5, 6, 7), (2, 1, 0)),
        ("{id}/answers/[S]", "token_index", (0, 1, 2), (0, 2, 1)),
        ("{id}/answers/[K]", "sample_id", (4, 4, 4), (1, 0, 2)),
    ],
)
def test_rule_13_items_in_order_have_no_number_of_another_order(tmp_path, steps, key, in_order, not_in_order):
    axes = {"K": "L S D", "L": "S D", "S": "L D"}[steps[-2]]
    layout = {"hidden_states": f"a.pkl : {steps}/hs -> {axes}"}

    def write(numbers):
        shape = (2, 4, 8) if "[K]" in steps else (4, 8)
        answers = [{key: number, "hs": states(*shape, seed=k)} for k, number in enumerate(numbers)]
        dump(tmp_path / "in/a.pkl", {"q0": {"answers": answers}})

    write(not_in_order)
    refuse(tmp_path, layout, rf"the item \d in order has the number .*={key}\]")
    convert(tmp_path, layout | {"ignore": [f"a.pkl : {steps}/{key}"]})
    write(in_order)
    convert(tmp_path, layout, overwrite=True)


@pytest.mark.parametrize(("step", "axes"), [("S=at", "L D"), ("L=at", "S D")])
def test_rule_04_a_letter_binds_the_number_that_a_column_says(tmp_path, step, axes):
    found = {q: states(3, 3, 8, seed=k) for k, q in enumerate("ab")}
    parts = {q: found[q] if step[0] == "L" else found[q].swapaxes(0, 1) for q in found}
    dump(tmp_path / "in/a.pkl", [{"id": q, "at": k, "hs": parts[q][k]} for k in (2, 0, 1) for q in found])

    traces = convert(tmp_path, {"hidden_states": f"a.pkl : [id=id, {step}]/hs -> {axes}"})
    for q in found:
        np.testing.assert_allclose(traces[q, 0].hidden_states, found[q], rtol=2e-3, atol=1e-3)


def test_rule_13_numbers_of_answers_begin_alike(tmp_path):
    answers = {"q0": (0, 1, 2), "q1": (1, 2)}  # an answer was lost
    dump(
        tmp_path / "in/a.pkl",
        {q: [{"hs": states(2, 4, 8, seed=k), "sample": k} for k in found] for q, found in answers.items()},
    )
    refuse(tmp_path, {"hidden_states": "a.pkl : {id}/[K]/hs -> L S D"}, "the item 1 in order has the number 2")
    assert ("q1", 2) in convert(tmp_path, {"hidden_states": "a.pkl : {id}/[sample=sample]/hs -> L S D"})


def test_rule_13_rows_of_answers_that_have_another_number(tmp_path):
    for k in range(4):
        save(tmp_path / f"in/q{k // 2}_{k % 2}.npy", states(2, 4, 8, seed=k))
    table(tmp_path / "in/t.csv", [{"qid": f"q{q}", "run": k, "ok": k} for k in (1, 0) for q in (0, 1)])
    layout = {"hidden_states": "{id}_{sample}.npy -> L S D"}

    refuse(tmp_path, layout | {"is_correct": "t.csv : [id=qid, sample=#]/ok"}, r"\[sample=run\]")
    found = convert(tmp_path, layout | {"is_correct": "t.csv : [id=qid, sample=run]/ok"})
    assert {key: trace.score for key, trace in found.items()} == {(f"q{q}", k): k for q in (0, 1) for k in (0, 1)}


@pytest.mark.parametrize("name", ["rank{chunk}.npy", "gpu_{chunk}.npy", "worker-{chunk}.npy", "proc{chunk}.npy"])
def test_rule_13a_ranks_are_no_chunks(name):
    with pytest.raises(UsageError, match="files of ranks are no chunks"):
        plan_of(parse_layout({"hidden_states": f"{name} -> N L S D"}))


@pytest.mark.parametrize("key", ["question", "prompt", "generated_answer", "response"])
@pytest.mark.parametrize("is_shuffled", [False, True])
@pytest.mark.parametrize("is_reversed", [False, True])
def test_rule_13b_shuffled_outputs_of_a_judge(tmp_path, key, is_shuffled, is_reversed):
    """A table in order that holds the texts of the traces, which no line names; or the traces hold them."""
    field = "question" if key in ("question", "prompt") else "generated_answer"
    own = [{"hs": states(2, 4, 8, seed=k), "text": f"What is fact {k}?"} for k in range(4)]
    order = [2, 0, 3, 1] if is_shuffled else range(4)
    judged = [{key: f"[INST] what is  fact {k}? [/INST]", "ok": k % 2} for k in order]
    if is_reversed:
        own, judged = ([{n.replace("text", key): v for n, v in row.items()} for row in own], judged)
        judged = [{"text": row[key], "ok": row["ok"]} for row in judged]
    dump(tmp_path / "in/a.pkl", own)
    table(tmp_path / "in/judge.csv", judged)
    source = "judge.csv" if is_reversed else "a.pkl"
    layout = {
        "hidden_states": "a.pkl : []/hs -> L S D",
        "is_correct": "judge.csv : []/ok",
        field: f"{source} : []/text",
    }
    if is_shuffled:
        refuse(tmp_path, layout, "rows in another order")
        other = "a.pkl" if is_reversed else "judge.csv"
        layout["ignore"] = [f"{other} : []/{key}"]

    assert [trace.score for trace in convert(tmp_path, layout).values()] == [k % 2 for k in order]


def test_rule_13b_texts_of_one_row_may_differ(tmp_path):
    dump(tmp_path / "in/a.pkl", [{"hs": states(2, 4, 8, seed=k), "q": f"fact {k}?", "prompt": "Hi"} for k in range(3)])

    assert len(convert(tmp_path, {"hidden_states": "a.pkl : []/hs -> L S D", "question": "a.pkl : []/q"})) == 3


def test_rule_13b_rows_of_chunks(tmp_path):
    for k in range(2):
        dump(tmp_path / f"in/b{k}.pkl", {"h": states(2, 2, 4, 8, seed=k), "q": [f"fact {2 * k}", f"fact {2 * k + 1}"]})
    layout = {"hidden_states": "b{chunk}.pkl : h -> N L S D", "question": "b{chunk}.pkl : q -> N"}
    layout["is_correct"] = "t.csv : []/ok"
    table(tmp_path / "in/t.csv", [{"prompt": f"fact {k}", "ok": k % 2} for k in (0, 1, 3, 2)])
    refuse(tmp_path, layout, "rows in another order")

    table(tmp_path / "in/t.csv", [{"prompt": f"fact {k}", "ok": k % 2} for k in range(4)])
    assert [trace.score for trace in convert(tmp_path, layout, overwrite=True).values()] == [0, 1, 0, 1]


@pytest.mark.parametrize(("text", "is_right"), [("Paris", True), ("paris", False), ("Lyon", False), ("", False)])
def test_rule_14_a_span_equals_its_slice(tmp_path, text, is_right):
    spans = [{"start": 3, "end": 8, "text": text, "type": "conflict"}]
    write_rows(tmp_path, generated_answer=lambda _: "It Paris.", spans=lambda _: spans)
    layout = ROWS | {"records": ["*.pkl : [id=id]"]}

    if is_right:
        assert convert(tmp_path, layout)["q0", 0].spans[0]["text"] == text
    else:
        refuse(tmp_path, layout, "spans: found 'Paris' in the answer")


def test_rule_14_two_labels_agree(tmp_path):
    write_rows(tmp_path, ok=lambda k: k % 2, bad=lambda k: k % 2)
    layout = ROWS | {"is_correct": "*.pkl : [id=id]/ok", "is_hallucinated": "*.pkl : [id=id]/bad"}

    refuse(tmp_path, layout, "expected that they agree")


@pytest.mark.parametrize("key", ["is_correct", "is_hallucinated"])
@pytest.mark.parametrize("label", [0, 1, "missing"])
@pytest.mark.parametrize("value", [0, 1, 1.0])
def test_rule_14_a_label_of_a_built_in_layout_agrees(tmp_path, key, label, value):
    """A label of 1 is a hallucinated answer [1 is a correct one]."""
    item = {"question_id": "a", "hidden_states": states(2, 4, 8), "tokens": [1, 2, 3, 4], key: value}
    item |= {"attentions": np.broadcast_to(np.eye(4, dtype="f4"), (2, 1, 4, 4)).copy()}
    dump(tmp_path / "in/a.pkl", [item | ({} if label == "missing" else {"label": label})])
    if label != "missing" and (label == value) == (key == "is_correct"):
        refuse(tmp_path, None, f"found label {label} and {key} ., expected that they agree")
        return

    (trace,) = convert(tmp_path, None).values()

    assert trace.scores == {key: value}


@pytest.mark.parametrize("one", ["is_correct", "is_hallucinated"])
@pytest.mark.parametrize("where", ["items", "table"])
def test_rule_14_a_judgment_agrees_with_that_of_an_earlier_conversion(tmp_path, one, where):
    """The layout called the labels by the other name at first."""
    write_rows(tmp_path, ok=lambda k: k % 2)
    line = "*.pkl : [id=id]/ok"
    if where == "table":
        table(tmp_path / "in/t.csv", [{"id": f"q{k}", "y": k % 2} for k in range(3)])
        line = "t.csv : [id=id]/y"
    more = {} if where == "items" else {"ignore": "*.pkl : [id=id]/ok"}
    convert(tmp_path, ROWS | {one: line} | more)
    other = "is_correct" if one == "is_hallucinated" else "is_hallucinated"

    refuse(
        tmp_path,
        ROWS | {other: line} | more,
        "found is_correct . and is_hallucinated . of q0, one of them stored \\(lines for both",
    )

    assert [trace.scores for trace in tracestore.open(tmp_path / "s.zarr")] == [{one: k % 2} for k in range(3)]


@pytest.mark.parametrize("side", ["left", "right"])
def test_rule_17a_lengths_need_a_side_unless_the_padding_shows_it(tmp_path, side):
    lengths, stack = [5, 3], states(2, 2, 5, 8)
    dump(tmp_path / "in/a.pkl", {"hs": stack, "n": lengths})
    layout = {"hidden_states": "a.pkl : hs -> N L S D", "S.lengths": "a.pkl : n -> N"}
    refuse(tmp_path, layout, "S.side")
    traces = list(convert(tmp_path, layout | {"S.side": side}).values())
    kept = stack[1, :, :3] if side == "right" else stack[1, :, 2:]
    np.testing.assert_allclose(traces[1].hidden_states, kept, atol=2e-3)

    stack[1, :, 3:] = 0
    stack[1, :, :3] = states(2, 3, 8, seed=4)
    if side == "left":
        stack[1] = stack[1][:, ::-1]
    dump(tmp_path / "in/a.pkl", {"hs": stack, "n": lengths})
    traces = list(convert(tmp_path, layout, overwrite=True).values())
    kept = stack[1, :, :3] if side == "right" else stack[1, :, 2:]
    np.testing.assert_allclose(traces[1].hidden_states, kept, atol=2e-3)


def test_rule_17a_lengths_leave_out_one_id(tmp_path):
    """A length that is less by one leaves out a token of the trace."""
    ids = np.array([[5, 6, 7, 8, 9], [5, 6, 7, 0, 0]])
    dump(tmp_path / "in/a.pkl", {"hs": states(2, 2, 5, 8), "ids": ids, "n": [5, 2]})
    layout = {"hidden_states": "a.pkl : hs -> N L S D", "tokens": "a.pkl : ids -> N S", "S.lengths": "a.pkl : n -> N"}

    refuse(tmp_path, layout | {"S.side": "right"}, "S.lengths: the tokens that it leaves out have several ids")


@pytest.mark.parametrize("name", ["S.mask", "S.lengths"])
def test_rule_17_what_the_layout_says_of_padding_is_there(tmp_path, name):
    """A mask that was left out of one file."""
    for k in range(2):
        dump(tmp_path / f"in/{k}.pkl", {"hs": states(2, 2, 5, 8, seed=k)} | ({"m": np.ones((2, 5), int)} if k else {}))
    layout = {"hidden_states": "*.pkl : hs -> N L S D", name: "*.pkl : m -> N S"}

    refuse(tmp_path, layout, f"{name}: the trace has no value where the layout says")


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ([0, 0, 0, 0, 0], "no token"),
        ([1, 0, 1, 1, 0], "one run"),
        ([1, 2, 1, 0, 0], "0 and 1"),
        ([0, 0, 1, 1, 1], "several ids"),
    ],
)
def test_rule_17b_masks_are_one_run_of_ones_and_leave_out_one_id(tmp_path, mask, words):
    dump(tmp_path / "in/a.pkl", {"hs": states(1, 2, 5, 8), "m": np.array([mask]), "ids": np.array([[7, 8, 9, 7, 6]])})
    layout = {"hidden_states": "a.pkl : hs -> N L S D", "S.mask": "a.pkl : m -> N S", "tokens": "a.pkl : ids -> N S"}

    refuse(tmp_path, layout, words)


def test_rule_17b_an_inverted_mask_without_ids(tmp_path):
    stack = states(2, 2, 5, 8)
    stack[:, :, 3:] = 0
    dump(tmp_path / "in/a.pkl", {"hs": stack, "m": np.array([[0, 0, 0, 1, 1]] * 2)})
    layout = {"hidden_states": "a.pkl : hs -> N L S D", "S.mask": "a.pkl : m -> N S"}

    refuse(tmp_path, layout, "zero in all layers|constant")


def test_rule_17b_a_mask_of_the_answer_without_ids(tmp_path):
    dump(tmp_path / "in/a.pkl", {"hs": states(2, 2, 5, 8), "m": np.array([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]])})
    layout = {"hidden_states": "a.pkl : hs -> N L S D", "S.mask": "a.pkl : m -> N S"}

    refuse(tmp_path, layout, "constant")


@pytest.mark.parametrize(
    ("value", "label"), [(1, 1), (True, 1), ("1", 1), ("Yes", 1), ("correct", 1), ("wrong", 0), ("hallucinated", 0)]
)
def test_rule_22a_labels_are_0_1_missing_or_known_words(tmp_path, value, label):
    write_rows(tmp_path, ok=lambda k: value if k else None)

    traces = convert(tmp_path, ROWS | {"is_correct": "*.pkl : [id=id]/ok"})

    assert [traces[f"q{k}", 0].score for k in (1, 2)] == [label, label]
    assert np.isnan(traces["q0", 0].score)


@pytest.mark.parametrize("value", [0.3, -1, 2, "maybe", "not bad", "oui", [1], "unsure"])
def test_rule_22a_other_values_are_refused(tmp_path, value):
    write_rows(tmp_path, ok=lambda k: value)

    refuse(tmp_path, ROWS | {"is_correct": "*.pkl : [id=id]/ok"}, "is_correct")


def test_rule_22a_a_label_per_token_is_no_label_of_the_trace(tmp_path):
    rows = [{"id": "q", "pos": k, "h": 1.5 + k, "ok": k % 2} for k in range(4)]
    layout = {"hidden_states": "t.json : [id=id, token=pos]/h -> D"}
    table(tmp_path / "in/t.json", [row | {"h": [row["h"], 1.0]} for row in rows])

    refuse(
        tmp_path,
        layout | {"is_correct": "t.json : [id=id, token=pos]/ok"},
        "in the rows of one trace, expected one value",
    )


def test_rule_22a_words_are_added(tmp_path):
    write_rows(tmp_path, ok=lambda k: ["oui", "non", "oui"][k])

    traces = convert(tmp_path, ROWS | {"is_correct": "*.pkl : [id=id]/ok", "words.oui": True, "words.non": False})

    assert [traces[f"q{k}", 0].score for k in range(3)] == [1, 0, 1]


@pytest.mark.parametrize("key", ["answer", "sample", "label", "target", "verdict"])
def test_rule_22a_records_take_no_answers_and_labels(tmp_path, key):
    write_rows(tmp_path, **{key: lambda k: f"text {k}"})

    refuse(tmp_path, ROWS | {"records": ["*.pkl : [id=id]"]}, f"{key}: no line of the layout")


def test_rule_22a_records_give_fields_of_their_names_and_extras(tmp_path):
    write_rows(
        tmp_path, question=lambda k: f"Q{k}?", model=lambda _: "gpt2", top_p=lambda _: 0.9, notes=lambda _: ["a"]
    )

    traces = convert(tmp_path, ROWS | {"records": ["*.pkl : [id=id]"]})

    assert traces["q1", 0].question == "Q1?"
    assert traces["q1", 0].extras == {"model": "gpt2", "top_p": 0.9}


@pytest.mark.parametrize("with_states", [False, True])
def test_rule_21_a_mean_over_tokens_is_no_last_token(tmp_path, with_states):
    write_rows(tmp_path, mean=lambda k: states(2, 8, seed=50 + k))
    layout = {"vector": "*.pkl : [id=id]/mean -> L D"}
    if with_states:
        assert len(convert(tmp_path, ROWS | layout)) == 3
        return

    with pytest.raises(UsageError, match="mean-pooled states cannot be stored"):
        parse_layout(layout)


def test_rule_24_a_token_of_zeros(tmp_path):
    """A memory-mapped file that was preallocated before a crash."""
    stack = states(3, 2, 4, 8)
    stack[2] = 0
    save(tmp_path / "in/h.npy", stack)

    layout = {"hidden_states": "h.npy -> N L S D"}
    refuse(tmp_path, layout, "trace 2, hidden_states: token 0 is zero in all layers")
    refuse(tmp_path, layout | {"S.padding": "none"}, "zero in all layers")


def test_rule_24_a_last_token_of_zeros(tmp_path):
    stack = states(3, 2, 8)
    stack[1] = 0
    save(tmp_path / "in/h.npy", stack)

    refuse(tmp_path, {"last_token": "h.npy -> N L D"}, "trace 1, last_token: token 0 is zero in all layers")


@pytest.mark.parametrize("text", ["[1. 2. ... 3.]", "[1, 2", "nan?", "[[1, 2], [3]]"])
def test_rule_24_text_parses_whole(tmp_path, text):
    table(tmp_path / "in/t.csv", [{"id": "q0", "h": text}])

    refuse(tmp_path, {"last_token": "t.csv : [id=id]/h -> D"}, "no JSON|expected")


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("fill", [0, np.nan])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("has_ids", [True, False])
def test_rule_17a_states_that_are_filled_show_the_side(tmp_path, count, fill, side, has_ids):
    """One id at the other end may be a token."""
    hs, ids = states(2, 2, 6, 8), np.arange(12).reshape(2, 6) + 5
    kept, left_out = (slice(count, None), slice(count)) if side == "left" else (slice(-count), slice(6 - count, None))
    hs[0, :, left_out], ids[0, left_out] = fill, 0
    dump(tmp_path / "in/a.pkl", {"hs": hs, "ids": ids, "n": np.asarray([6 - count, 6])})
    layout = {"hidden_states": "a.pkl : hs -> N L S D", "S.lengths": "a.pkl : n -> N"}
    layout |= {"tokens": "a.pkl : ids -> N S"} if has_ids else {"ignore": "a.pkl : ids"}

    first = convert(tmp_path, layout, dtype="keep")["a.pkl:0", 0]

    np.testing.assert_array_equal(first.hidden_states, hs[0, :, kept])
    assert not has_ids or first.tokens.tolist() == ids[0, kept].tolist()
