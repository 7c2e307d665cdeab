"""Test small folders whose layouts state something else than the files hold: each is refused, or has its only meaning."""

import base64
import importlib
import itertools
import json
import time
from unittest import TestCase

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.ingest.execute.folders import convert, dump, refuse, save, states, table
from tracestore.errors import UsageError
from tracestore.ingest.execute import values
from tracestore.ingest.layout.language import parse_layout
from tracestore.ingest.readers import text

ITEM = "a.pkl : [id=id]/"
STATES = {"hidden_states": f"{ITEM}hs -> L S D"}
IN_ORDER = {"hidden_states": "a.pkl : []/hs -> L S D", "question_id": "a.pkl : []/id"}


def items(tmp_path, count=4, **values):
    """Write dicts with the ids a, b, ..., each with states and one of the values."""
    dump(
        tmp_path / "in/a.pkl",
        [
            {"id": "abcdef"[k], "hs": states(2, 3, 8, seed=k), **{key: found[k] for key, found in values.items()}}
            for k in range(count)
        ],
    )


def lines(path, rows):
    """Write dicts as lines of JSON."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def one(tmp_path, **values):
    """Write one dict."""
    dump(tmp_path / "in/a.pkl", [{"id": "a", "hs": states(2, 3, 8), **values}])


@pytest.mark.parametrize("text", ["1_0", "0x1", "1/2", "50%", "0,5", "١ ٢", "1e", "inf", "true-ish"])
def test_texts_that_are_no_numbers(tmp_path, text):
    """Python reads 1_0 as 10."""
    one(tmp_path, score=text, length=text)

    refuse(
        tmp_path, STATES | {"correctness.f1": f"{ITEM}score", "ignore": [f"{ITEM}length"]}, "expected a finite number"
    )
    refuse(tmp_path, STATES | {"prompt_length": f"{ITEM}length", "ignore": [f"{ITEM}score"]}, "prompt_length: found")


@pytest.mark.parametrize("shape", [[2.5, 3, 8], [2.0, 3.0, 8.0], [-2, -3, 8], [2, -1, 8], [0, 3, 8], [3, 8], [2, 3, 9]])
def test_shapes_of_flat_numbers(tmp_path, shape):
    one(tmp_path, flat=np.arange(48, dtype="f4"), shape=shape)
    layout = {"hidden_states": f"{ITEM}flat", "shape.hidden_states": f"{ITEM}shape", "ignore": [f"{ITEM}hs"]}

    refuse(tmp_path, layout, "positive integers|expected the shape")


@pytest.mark.parametrize("numbers", [[8.5, 16.2], [8.0, 16.0], [8, 8], [8]])
@pytest.mark.parametrize("is_joined", [True, False])
def test_numbers_of_layers(tmp_path, numbers, is_joined):
    one(tmp_path, layers=numbers)
    layout = STATES | {"L.ids": f"{ITEM}layers"}
    layout |= {"S.padding": "zeros"} if is_joined else {}

    refuse(tmp_path, layout, "L.ids: found|L: found 2 layers|expected numbers")


def test_a_scale_of_floats(tmp_path):
    """It would have no effect."""
    one(tmp_path)

    refuse(
        tmp_path, STATES | {"scale.hidden_states": 0.5}, "scale.hidden_states: found float32 values, expected integers"
    )


@pytest.mark.parametrize("names", [("pt", "at"), ("at", "pt")])
@pytest.mark.parametrize("field", ["tokens", "tokens_decoded"])
def test_parts_of_a_field_belong_to_parts_of_the_states(tmp_path, names, field):
    """Prompt and answer in the other order [ids of the answer in front]."""
    one(tmp_path, more=states(2, 2, 8, seed=1), pt=[1, 2, 3], at=[4, 5])
    if field == "tokens_decoded":
        one(tmp_path, more=states(2, 2, 8, seed=1), pt=["a", "b", "c"], at=["d", "e"])
    layout = {"hidden_states": [f"{ITEM}hs -> L S D", f"{ITEM}more -> L S D"]}
    layout |= {field: [f"{ITEM}{name} -> S" for name in names]}
    if names[0] == "at":
        refuse(tmp_path, layout, f"{field}: found 2 values in the first part, and 3 states")
        return

    trace = convert(tmp_path, layout)["a", 0]

    assert trace.prompt_length == 3
    assert list(getattr(trace, field)) in ([1, 2, 3, 4, 5], list("abcde"))


@pytest.mark.parametrize(
    "column", ["name", "title", "uid", "uuid", "sample_id", "prompt_id", "original_index", "data_idx"]
)
@pytest.mark.parametrize("is_other_order", [True, False])
def test_rule_13_a_column_holds_the_ids_of_other_rows(tmp_path, column, is_other_order):
    """Rows in another order, and no name that says id [a label of another trace]."""
    items(tmp_path)
    ids = "dcba" if is_other_order else "abcd"
    table(tmp_path / "in/t.csv", [{column: name, "ok": k % 2} for k, name in enumerate(ids)])
    layout = IN_ORDER | {"is_correct": "t.csv : []/ok"}
    if is_other_order or column not in ("name", "title"):
        refuse(tmp_path, layout, "rows in another order|this column of ids is left out")
        layout["ignore"] = [f"t.csv : []/{column}"]

    assert [trace.score for trace in convert(tmp_path, layout).values()] == [0, 1, 0, 1]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)])
def test_a_column_without_a_name_joins_by_its_values(tmp_path, order):
    dump(tmp_path / "in/a.pkl", [{"id": str(k), "hs": states(2, 3, 8, seed=k)} for k in range(4)])
    table(tmp_path / "in/t.csv", [{"": k, "ok": k % 2} for k in order])

    traces = convert(tmp_path, STATES | {"is_correct": "t.csv : [id=]/ok"})

    assert [traces[str(k), 0].score for k in range(4)] == [0, 1, 0, 1]


def test_a_column_without_a_name_is_a_field(tmp_path):
    items(tmp_path)
    table(tmp_path / "in/t.csv", [{"": name, "ok": k % 2} for k, name in enumerate("wxyz")])
    layout = {"hidden_states": "a.pkl : []/hs -> L S D", "question_id": "t.csv : []/", "is_correct": "t.csv : []/ok"}
    layout["ignore"] = ["a.pkl : []/id"]

    assert {key[0]: trace.score for key, trace in convert(tmp_path, layout).items()} == {"w": 0, "x": 1, "y": 0, "z": 1}


def test_a_column_without_a_name_that_is_not_there(tmp_path):
    items(tmp_path)
    table(tmp_path / "in/t.csv", [{"row": name, "ok": 1} for name in "abcd"])

    refuse(tmp_path, STATES | {"question": "t.csv : [id=row]/", "is_correct": "t.csv : [id=row]/ok"}, "no such value")
    refuse(tmp_path, IN_ORDER | {"is_correct": "t.csv : [id=]/ok"}, "has no value in the column without a name")


@pytest.mark.parametrize("column", ["", "Unnamed: 0", "row"])
@pytest.mark.parametrize("last", [(0, 1, 2), (0, 2, 1)])
@pytest.mark.parametrize("rows", ["[id=#]", "[]"])
def test_rule_13_rows_are_counted_for_each_layer(tmp_path, column, last, rows):
    numbers = {1: (0, 1, 2), 2: last}
    for layer, found in numbers.items():
        vectors = [str(states(8, seed=9 * layer + k).tolist()) for k in range(3)]
        table(tmp_path / f"in/l{layer}.csv", [{column: n, "v": v} for n, v in zip(found, vectors, strict=True)])
    layout = {"last_token": f"l{{layer}}.csv : {rows}/v -> D"}
    if last != (0, 1, 2):
        refuse(tmp_path, layout, "rows in another order|column of ids is left out")
        return

    assert [len(trace.last_token) for trace in convert(tmp_path, layout).values()] == [2] * 3


@pytest.mark.parametrize(
    ("numbers", "is_read"), [((0, 1, 2, 3), True), ((0, 2, 5, 9), True), ((3, 2, 1, 0), False), ((0, 2, 2, 3), False)]
)
@pytest.mark.parametrize("column", ["", "Unnamed: 0"])
def test_rule_13_the_index_of_a_table_increases(tmp_path, numbers, is_read, column):
    items(tmp_path)
    table(tmp_path / "in/t.csv", [{column: number, "ok": k % 2} for k, number in enumerate(numbers)])
    layout = IN_ORDER | {"is_correct": "t.csv : []/ok"}
    if not is_read:
        refuse(tmp_path, layout, "is behind .: rows in another order")
        return

    assert [trace.score for trace in convert(tmp_path, layout).values()] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("ids", "rows"),
    [
        (["01", "02", "03"], ["1", "2", "3"]),
        (["1.0", "2.0", "x"], ["1", "2", "x"]),
        (["Q1", "q2", "q3"], ["q1", "q2", "q3"]),
        (["a\u00a0b", "b", "c"], ["a b", "b", "c"]),
        (["\uff11", "b", "c"], ["1", "b", "c"]),
        ([1, "1", "b"], ["1", "b", "c"]),
        ([0, 1, 2], ["1", "2", "3"]),
        (["q 1", "q2", "q3"], ["q1", "q2", "q3"]),
        (["q-1", "q-2", "q_3"], ["q_1", "q_2", "q_3"]),
        ([0, 1, 3, 4], ["1", "2", "4", "5"]),
        ([0, 1, 2, 4, 5, 9], ["1", "2", "5", "6"]),
        (["a_0", "a_1", "a_3", "b_0", "b_1"], ["a_1", "a_2", "a_4", "b_1", "b_2"]),
    ],
)
def test_rule_12b_ids_in_another_spelling(tmp_path, ids, rows):
    dump(tmp_path / "in/a.pkl", [{"id": i, "hs": states(2, 3, 8, seed=k)} for k, i in enumerate(ids)])
    table(tmp_path / "in/t.csv", [{"id": name, "ok": k % 2} for k, name in enumerate(rows)])

    refuse(
        tmp_path,
        STATES | {"is_correct": "t.csv : [id=id]/ok"},
        "spelling|no id of it|two values|twice|numbered from|serves several",
    )


@pytest.mark.parametrize(
    ("ids", "rows"),
    [
        ([1, 2, 3], ["1", "2", "3"]),
        ([1.0, 2.0, 3.0], ["1", "2", "3"]),
        ([" 1", "2 ", "3"], ["1", "2", "3"]),
        (["e\u0301", "b", "c"], ["\u00e9", "b", "c"]),
        ([-1, -2, -3], ["-1", "-2", "-3"]),
        ([2**60, "b", "c"], [str(2**60), "b", "c"]),
    ],
)
def test_ids_that_are_equal(tmp_path, ids, rows):
    dump(tmp_path / "in/a.pkl", [{"id": i, "hs": states(2, 3, 8, seed=k)} for k, i in enumerate(ids)])
    table(tmp_path / "in/t.csv", [{"id": name, "ok": k % 2} for k, name in reversed(list(enumerate(rows)))])

    traces = convert(tmp_path, STATES | {"is_correct": "t.csv : [id=id]/ok"})

    for k, trace in enumerate(traces.values()):
        assert trace.score == k % 2
        np.testing.assert_allclose(trace.hidden_states[0], states(2, 3, 8, seed=k)[0], atol=2e-3)


@pytest.mark.parametrize("text", ['{"a": {"ok": 1}, "a": {"ok": 0}}', '{"a": {"ok": 1, "ok": 0}}'])
def test_a_refusal_names_the_table(tmp_path, text):
    """Not the file of the states, which is read at the same time."""
    one(tmp_path)
    (tmp_path / "in/t.json").write_text(text)

    refuse(tmp_path, STATES | {"is_correct": "t.json : {id}/ok"}, "^t.json: not JSON: the name .* appears twice")


@pytest.mark.parametrize(
    "name",
    ["README.txt", "readme.txt", "LICENSE.txt", "requirements.txt", "notes.md", "run.log", "s.zarr.refused.jsonl"],
)
def test_files_without_data_need_no_entry(tmp_path, name):
    one(tmp_path)
    (tmp_path / "in" / name).write_text("made by run.py\n")

    assert len(convert(tmp_path, STATES)) == 1


@pytest.mark.parametrize("compress", ["gzip", "bz2", "lzma"])
@pytest.mark.parametrize("rows", ["table", "dict of lists", "words"])
def test_tables_of_docs(tmp_path, compress, rows):
    """Compressed JSON, lists in a dict, and rows that say a word of the names of files."""
    module, suffix = importlib.import_module(compress), {"gzip": "gz", "bz2": "bz2", "lzma": "xz"}[compress]
    for split in ("train", "test"):
        dump(tmp_path / f"in/{split}.pkl", [{"id": k, "hs": states(2, 3, 8, seed=k)} for k in range(2)])
    table = [{"part": s, "qid": k, "ok": int(s == "test")} for s in ("train", "test") for k in range(2)]
    if rows == "dict of lists":
        table = {key: [row[key] for row in table] for key in table[0]}
    (tmp_path / f"in/t.json.{suffix}").write_bytes(module.compress(json.dumps(table).encode()))
    layout = {"hidden_states": "{split}.pkl : [id=id]/hs -> L S D", "id": "={split}/{id}"}
    layout |= {"is_correct": f"t.json.{suffix} : [split=part, id=qid]/ok"}

    traces = convert(tmp_path, layout)

    assert {key[0]: trace.score for key, trace in traces.items()} == {
        "train/0": 0,
        "train/1": 0,
        "test/0": 1,
        "test/1": 1,
    }


LENGTHS = (4, 5, 6)


def padded(tmp_path, side, fill, more):
    """Write three rows of 8 tokens, padded at one side, with lengths and masks that are `more` too long."""
    stack, ids = states(3, 2, 8, 6), np.zeros((3, 8), int)
    mask, kept = np.zeros((3, 8), int), []
    for n, length in enumerate(LENGTHS):
        own = slice(0, length) if side == "right" else slice(8 - length, 8)
        ids[n, own] = np.arange(10, 10 + length) + 10 * n
        mask[n, : length + more] = 1
        kept.append(stack[n][:, own].copy())
        if fill is not None:
            stack[n][:, ids[n] == 0] = fill
    mask = mask if side == "right" else mask[:, ::-1]
    dump(
        tmp_path / "in/a.pkl", {"hs": stack, "ids": ids, "n": np.array(LENGTHS) + more, "mask": mask, "q": list("abc")}
    )
    return kept


@pytest.mark.parametrize("fill", [None, np.nan, 3.0, 0.0])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("by", ["S.lengths", "S.mask"])
@pytest.mark.parametrize("with_ids", [True, False])
@pytest.mark.parametrize("more", [1, 0, -1])
def test_rule_17c_lengths_of_other_rows(tmp_path, fill, side, by, with_ids, more):
    """A token of padding is kept, or one of the trace is left out, where no row is full."""
    if fill is None and not with_ids:
        pytest.skip("nothing shows it")
    kept = padded(tmp_path, side, fill, more)
    layout = {"hidden_states": "a.pkl : hs -> N L S D", "question_id": "a.pkl : q -> N"}
    layout |= {by: "a.pkl : n -> N", "S.side": side} if by == "S.lengths" else {by: "a.pkl : mask -> N S"}
    layout |= {"tokens": "a.pkl : ids -> N S"} if with_ids else {}
    layout |= {"S.padding": 0} if with_ids and side == "left" else {}  # no row is full in front
    unused = [name for name in ("n", "mask", "ids") if f": {name} " not in str(layout)]
    layout["ignore"] = [f"a.pkl : {name}" for name in unused]
    if more:
        refuse(tmp_path, layout, "equal states|of the padding|zero in all layers|left out|leaves out")
        return

    for trace, hidden in zip(convert(tmp_path, layout).values(), kept, strict=True):
        np.testing.assert_allclose(trace.hidden_states, hidden, atol=2e-3)


def test_rule_17c_a_row_keeps_an_id_of_the_padding(tmp_path):
    """The id also ends rows, which the layout states."""
    padded(tmp_path, "right", None, 1)
    layout = {"hidden_states": "a.pkl : hs -> N L S D", "question_id": "a.pkl : q -> N", "tokens": "a.pkl : ids -> N S"}
    layout |= {"S.mask": "a.pkl : mask -> N S", "ignore": "a.pkl : n"}
    refuse(tmp_path, layout, r"the token 4 has the id 0 of the padding: S.pad = \[0, 0\]")

    traces = convert(tmp_path, layout | {"S.pad": [0, 0]})

    assert [trace.num_tokens for trace in traces.values()] == [5, 6, 7]


@pytest.mark.parametrize("fill", [np.nan, 0.0, 3.0])
def test_rule_17c_padding_without_a_line(tmp_path, fill):
    padded(tmp_path, "right", fill, 0)
    layout = {"hidden_states": "a.pkl : hs -> N L S D", "question_id": "a.pkl : q -> N"}

    refuse(tmp_path, layout | {"ignore": [f"a.pkl : {n}" for n in ("n", "mask", "ids")]}, "in all layers: padding")


FRONTS = (3, 2, 1)


@pytest.mark.parametrize("pad", [0, 2])
@pytest.mark.parametrize("by", ["S.mask", "S.lengths"])
@pytest.mark.parametrize("passes", [False, True])
@pytest.mark.parametrize("end", [2, 9])
def test_rule_17c_every_row_is_padded_in_front(tmp_path, pad, by, passes, end):
    """Prompts are padded to one length, and the id that fills them may stand inside of them and end rows, too."""
    ids = np.array(
        [[pad, pad, pad, 4, 2, 5, 6, end, 0], [pad, pad, 6, 2, 7, 8, 9, 5, end], [pad, 3, 4, 2, 5, 6, end, 0, 0]]
    )
    ends = (8, 9, 7)
    for row, stop in zip(ids, ends, strict=True):
        row[stop:] = pad
    if pad == end or not passes:
        ids, ends = ids[:, :7], (7, 7, 7)
        ids[:, -1] = 9
    num_states = ids.shape[1] - passes
    mask = (np.arange(num_states if by == "S.lengths" or not passes else 4) >= np.array(FRONTS)[:, None]).astype(int)
    sizes = [4] + [1] * (num_states - 4) if passes else [num_states]
    parts = [[states(3, n, 8, seed=7 * p + k) for k in range(2)] for p, n in enumerate(sizes)]
    stack = np.concatenate([np.stack(part, 1) for part in parts], 2)
    dump(tmp_path / "in/a.pkl", {"hs": parts if passes else stack, "ids": ids, "mask": mask, "n": mask.sum(1)})
    layout = {"hidden_states": f"a.pkl : hs -> {'P L N' if passes else 'N L'} S D"}
    layout |= {"tokens": f"a.pkl : ids -> N {'T' if passes else 'S'}"}
    layout |= {by: "a.pkl : mask -> N S"} if by == "S.mask" else {by: "a.pkl : n -> N", "S.side": "left"}
    layout |= {"S.pad": [pad, end]} if passes and pad != end else {}
    layout["ignore"] = f"a.pkl : {'n' if by == 'S.mask' else 'mask'}"
    refuse(tmp_path, layout, f"every row leaves out tokens in front, .* S.padding = {pad} states")

    traces = convert(tmp_path, layout | {"S.padding": pad}).values()

    for trace, row, hidden, begin, stop in zip(traces, ids, stack, FRONTS, ends, strict=True):
        assert list(trace.tokens) == list(row[begin:stop])
        np.testing.assert_allclose(trace.hidden_states, hidden[:, begin : stop - passes], atol=2e-3)


@pytest.mark.parametrize(
    "mask",
    [
        [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]],
        [[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]],
        [[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]],
        [[0, 0, 1, 1, 0], [1, 1, 1, 1, 1]],
        [[0, 0, 1, 1, 1], [0, 0, 1, 1, 1]],
        [[0, 0, 1, 1, 1], [0, 1, 1, 1, 0]],
    ],
)
def test_rule_17c_a_mask_contradicts_the_id_of_the_padding(tmp_path, mask):
    ids = np.array([[0, 0, 5, 6, 2], [4, 3, 7, 5, 2]])
    dump(tmp_path / "in/a.pkl", {"hs": states(2, 2, 5, 8), "ids": ids, "mask": np.array(mask)})
    layout = {"hidden_states": "a.pkl : hs -> N L S D", "tokens": "a.pkl : ids -> N S", "S.padding": 0}

    refuse(tmp_path, layout | {"S.mask": "a.pkl : mask -> N S"}, "of the padding: S.pad|have several ids")


@pytest.mark.parametrize("with_ids", [True, False])
def test_rule_17c_a_batch_and_a_stack_are_padded_by_two_programs(tmp_path, with_ids):
    """Refuse states of padding and zeros, which may be the last token of rows and padding."""
    stack, lengths = states(3, 2, 8, 8), [6, 3, 4]
    stack[:, :, 6:] = 0
    ids = np.where(np.arange(8) < np.array(lengths)[:, None], np.arange(5, 13), 0)
    dump(tmp_path / "in/a.pkl", {"hs": stack, "ids": ids, "n": lengths})
    layout = {"hidden_states": "a.pkl : hs -> N L S D", "S.lengths": "a.pkl : n -> N", "S.side": "right"}
    layout |= {"tokens": "a.pkl : ids -> N S"} if with_ids else {"ignore": "a.pkl : ids"}
    refuse(tmp_path, layout, 'the tokens 7 and 3 are left out, and only one is filled: S.padding = "none" states')

    traces = convert(tmp_path, layout | {"S.padding": "none"}).values()

    assert [trace.num_tokens for trace in traces] == lengths


@pytest.mark.parametrize("end", [2, 9])
def test_rows_are_padded_at_both_ends(tmp_path, end):
    """Prompts in front, answers behind; another id ends rows."""
    ids = np.array([[0, 0, 5, 6, end, 0, 0], [4, 5, 6, 7, 8, 9, 2], [0, 3, 4, 5, end, 0, 0]])
    dump(tmp_path / "in/a.pkl", {"hs": states(3, 2, 7, 8), "ids": ids})
    layout = {"hidden_states": "a.pkl : hs -> N L S D", "tokens": "a.pkl : ids -> N S", "S.padding": 0}
    refuse(tmp_path, layout, r"begins rows and ends rows, .* S.pad = \[0, END\]")

    traces = convert(tmp_path, layout | {"S.pad": [0, end]}).values()

    assert [list(trace.tokens) for trace in traces] == [[5, 6, end], list(ids[1]), [3, 4, 5, end]]


@pytest.mark.parametrize(
    ("prompts", "count"), [((1,), 1), ((1, 1), 2), ((1, 1, 1), 3), ((3, 3), 2), ((1, 2, 3), 3), ((2, 1), 2)]
)
def test_rule_17c_a_mask_of_the_answer(tmp_path, prompts, count):
    """The prompt is one id, such as that of an image [a mask of the answer]."""
    ids = np.arange(10, 10 + 6 * count).reshape(count, 6)
    for n, length in enumerate(prompts):
        ids[n, :length] = 1
    dump(tmp_path / "in/a.pkl", {"hs": states(count, 2, 6, 8), "ids": ids, "mask": (ids != 1).astype(int)})
    layout = {"hidden_states": "a.pkl : hs -> N L S D", "tokens": "a.pkl : ids -> N S", "S.mask": "a.pkl : mask -> N S"}
    refuse(tmp_path, layout, "every row leaves out tokens in front, .*: a prompt")

    traces = convert(tmp_path, layout | {"S.padding": 1})

    assert [trace.num_tokens for trace in traces.values()] == [6 - length for length in prompts]


@pytest.mark.parametrize(
    "rows",
    [
        [[11, 12, 21, 22, 2, 0, 0], [13, 14, 31, 32, 33, 34, 2]],
        [[11, 12, 21, 2, 0, 0, 0], [13, 14, 31, 2, 0, 0, 0], [13, 14, 31, 32, 33, 34, 2]],
        [[13, 14, 31, 32, 33, 34, 2], [11, 12, 21, 22, 23, 2, 0]],
        [[0, 12, 21, 22, 2, 0, 0], [0, 14, 31, 32, 33, 34, 2]],
        [[11, 12, 2, 0, 0, 0, 0], [13, 14, 31, 32, 33, 34, 2], [13, 14, 31, 32, 33, 34, 35]],
    ],
)
def test_rule_3a_an_id_that_ends_another_row(tmp_path, rows):
    """S.pad = [0, 0] where 2 ends sequences and 0 fills rows [a state of padding as that of the last token]."""
    passes = [[states(len(rows), n, 8, seed=7 * p + k) for k in range(2)] for p, n in enumerate([2, 1, 1, 1, 1])]
    dump(tmp_path / "in/a.pkl", {"hs": passes, "ids": np.array(rows)})
    layout = {"hidden_states": "a.pkl : hs -> P L N S D", "tokens": "a.pkl : ids -> N T"}
    refuse(tmp_path, layout | {"S.pad": [0, 0]}, r"S.pad: the id 2 stands before the padding .* S.pad = \[0, 2\]")

    traces = convert(tmp_path, layout | {"S.pad": [0, 2]}).values()

    assert [list(trace.tokens) for trace in traces] == [row[: row.index(2) + 1] if 2 in row else row for row in rows]


def write_passes(tmp_path, rows, num_prompt=3):
    """Write rows of ids with passes of generate()."""
    sizes = [num_prompt, *[1] * (len(rows[0]) - num_prompt - 1)]
    passes = [[states(len(rows), n, 8, seed=7 * p + k) for k in range(2)] for p, n in enumerate(sizes)]
    dump(tmp_path / "in/a.pkl", {"hs": passes, "ids": np.array(rows)})
    return {"hidden_states": "a.pkl : hs -> P L N S D", "tokens": "a.pkl : ids -> N T"}


@pytest.mark.parametrize(
    "rows",
    [
        [[11, 12, 0, 21, 22, 2, 0], [13, 14, 15, 31, 32, 33, 2]],
        [[11, 0, 0, 21, 22, 23, 2], [13, 14, 15, 31, 32, 2, 0]],
        [[11, 0, 0, 21, 22, 2, 0], [13, 14, 0, 31, 32, 33, 2]],
        [[13, 14, 15, 31, 2, 0, 0], [13, 14, 0, 31, 32, 33, 2]],
    ],
)
@pytest.mark.parametrize("pad", [0, [0, 2], [0, -1]])
def test_rule_3a_padding_inside_of_prompts(tmp_path, rows, pad):
    """Prompts padded behind their tokens, without a mask [padding as tokens of the prompt]."""
    refuse(tmp_path, write_passes(tmp_path, rows) | {"S.pad": pad}, "the id 0 that fills rows is inside a prompt")


@pytest.mark.parametrize("pad", [[2, 2], [7, 2], [5, 2]])
@pytest.mark.parametrize(
    "rows",
    [
        [[11, 12, 13, 21, 2, 0, 0], [13, 14, 15, 31, 32, 33, 2]],
        [[11, 12, 13, 2, 0, 0, 0], [13, 14, 15, 31, 32, 2, 0]],
        [[13, 14, 15, 31, 32, 33, 2], [11, 12, 13, 21, 22, 2, 0]],
        [[13, 14, 15, 31, 2, 9, 9]],
    ],
)
def test_rule_3a_ids_behind_the_end(tmp_path, rows, pad):
    """The id of the padding is another one than the layout says [padding as tokens of the answer]."""
    refuse(
        tmp_path,
        write_passes(tmp_path, rows) | {"S.pad": pad},
        "the id 2 that ends rows by the layout stands before|id . twice",
    )


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("lengths", [(4, 3), (4, 2), (4, 1), (3, 4), (4, 4)])
def test_texts_of_padded_rows(tmp_path, side, lengths):
    """A row with one token of padding has as many texts as tokens of the trace and one more."""
    mask = np.array([[1] * length + [0] * (4 - length) for length in lengths])
    mask = mask if side == "right" else mask[:, ::-1]
    texts = [["<pad>" if not own else "abcd"[k] for k, own in enumerate(row)] for row in mask]
    stack = states(2, 2, 4, 8)
    stack[mask[:, None].repeat(2, 1) == 0] = 0
    dump(tmp_path / "in/a.pkl", {"hs": stack, "mask": mask, "texts": texts})
    layout = {"hidden_states": "a.pkl : hs -> N L S D", "S.mask": "a.pkl : mask -> N S"}

    traces = convert(tmp_path, layout | {"tokens_decoded": "a.pkl : texts -> N S"})

    for trace, row in zip(traces.values(), texts, strict=True):
        assert list(trace.tokens_decoded) == [text for text in row if text != "<pad>"]


@pytest.mark.parametrize("rows", [[3, 0, 2, 1], [0, 1, 2, 3], [3, 2, 1, 0]])
@pytest.mark.parametrize("is_flat", [True, False])
def test_a_value_that_names_a_row(tmp_path, rows, is_flat):
    """Batches are sorted by length, and an array holds the row of each trace in a table."""
    stack = states(4, 2, 3, 8)
    if is_flat:
        dump(
            tmp_path / "in/a.pkl", {"hs": np.concatenate(stack.swapaxes(1, 2)), "row": np.repeat(rows, 3), "n": [3] * 4}
        )
        layout = {"hidden_states": "a.pkl : hs -> (N S) L D", "S.lengths": "a.pkl : n -> N"}
        layout["key.row"] = "a.pkl : row -> (N S)"
    else:
        dump(tmp_path / "in/a.pkl", {"hs": stack, "row": np.array(rows)})
        layout = {"hidden_states": "a.pkl : hs -> N L S D", "key.row": "a.pkl : row -> N"}
    table(tmp_path / "in/t.csv", [{"qid": "abcd"[k], "ok": k % 2} for k in range(4)])
    layout |= {"question_id": "t.csv : [row=#]/qid", "is_correct": "t.csv : [row=#]/ok"}

    traces = convert(tmp_path, layout)

    for k, row in enumerate(rows):
        trace = traces["abcd"[row], 0]
        assert trace.score == row % 2
        np.testing.assert_allclose(trace.hidden_states, stack[k], atol=2e-3)


@pytest.mark.parametrize("rows", [[1, 2, 3, 4], [0, 1, 2, 2], [0, 1, 2, 5], [-1, 0, 1, 2], [0.5, 1, 2, 3]])
def test_a_value_that_names_no_row(tmp_path, rows):
    """Rows counted from 1, a row twice, and numbers that are none [labels of other rows]."""
    dump(tmp_path / "in/a.pkl", {"hs": states(4, 2, 3, 8), "row": np.array(rows)})
    table(tmp_path / "in/t.csv", [{"qid": "abcd"[k], "ok": k % 2} for k in range(4)])
    layout = {"hidden_states": "a.pkl : hs -> N L S D", "key.row": "a.pkl : row -> N", "ignore": "t.csv : [row=#]/qid"}

    refuse(tmp_path, layout | {"is_correct": "t.csv : [row=#]/ok"}, "rows in order belong to|serves several traces")


@pytest.mark.parametrize("name", ["key.id", "key.file", "key.layer", "key.", "key.a b"])
def test_names_of_keys(name):
    with pytest.raises(UsageError, match="no such field"):
        parse_layout({"hidden_states": "a.pkl : hs -> N L S D", name: "a.pkl : row -> N"})


def test_a_key_that_no_line_joins_by(tmp_path):
    dump(tmp_path / "in/a.pkl", {"hs": states(4, 2, 3, 8), "row": np.arange(4)})

    with pytest.raises(UsageError, match=r"key.row: has no effect"):
        convert(tmp_path, {"hidden_states": "a.pkl : hs -> N L S D", "key.row": "a.pkl : row -> N"})


@pytest.mark.parametrize("axis", ["N", "K"])
@pytest.mark.parametrize("dump_of", ["stack", "passes"])
@pytest.mark.parametrize("known", ["nothing", "mask", "id"])
def test_answers_of_one_array_are_padded(tmp_path, axis, dump_of, known):
    """Several answers to a question are rows of equal shape, as several questions are [padding as tokens]."""
    ids = np.array([[5, 6, 7, 8, 9, 2], [5, 6, 7, 2, 0, 0], [5, 6, 8, 2, 0, 0]])
    values = {"ids": ids, "mask": (ids != 0).astype(int), "hs": states(3, 2, 6, 8)}
    if dump_of == "passes":
        values["hs"] = [[states(3, n, 8, seed=7 * p + k) for k in range(2)] for p, n in enumerate((2, 1, 1, 1))]
    dump(tmp_path / "in/q.pkl", values)
    passes = dump_of == "passes"
    layout = {"hidden_states": f"{{id}}.pkl : hs -> {'P L ' * passes}{axis} {'L ' * (not passes)}S D"}
    layout |= {"tokens": f"{{id}}.pkl : ids -> {axis} {'T' if passes else 'S'}"}
    layout |= {"S.mask": f"{{id}}.pkl : mask -> {axis} S"} if known == "mask" else {"ignore": "{id}.pkl : mask"}
    layout |= {"S.pad": [0, 2]} if known != "nothing" and passes else {"S.padding": 0} if known == "id" else {}
    if axis == "N":
        layout = json.loads(json.dumps(layout).replace("{id}.pkl", "*.pkl"))
    if known == "nothing":
        refuse(tmp_path, layout, "the id 0 twice at one end|the row ends with the id 0")
        return

    traces = convert(tmp_path, layout)

    assert [trace.num_tokens for trace in traces.values()] == ([5, 3, 3] if passes else [6, 4, 4])


@pytest.mark.parametrize("prefix", ["", "q", "tqa-", "item_00"])
@pytest.mark.parametrize("count", [2, 3, 6])
def test_rule_12b_rows_are_numbered_from_1_and_one_is_missing(tmp_path, prefix, count):
    """Every row has a trace then, the one before its own [labels of other rows]."""
    dump(tmp_path / "in/a.pkl", [{"id": f"{prefix}{k}", "hs": states(2, 3, 8, seed=k)} for k in range(count)])
    table(tmp_path / "in/t.csv", [{"id": f"{prefix}{k}", "ok": k % 2} for k in range(1, count)])

    refuse(tmp_path, STATES | {"is_correct": "t.csv : [id=id]/ok"}, "left over: numbered from 0 and from 1")


@pytest.mark.parametrize("name", ["split", "dataset"])
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("a", 1), ("a", 2), ("b", 1), ("b", 2)], "numbered from 0 and from 1"),
        ([("A", 0), ("A", 1), ("b", 0), ("b", 1)], "A.*' and the trace .*a.*' differ in spelling only"),
        ([("a", 0), ("a", 7), ("b", 0), ("b", 1)], None),
    ],
)
def test_rule_12b_rows_say_two_names(tmp_path, name, rows, message):
    """Remainders are compared by all of what joins them, wherever the id is in the alphabet."""
    for word in "ab":
        dump(tmp_path / f"in/{word}.pkl", [{"id": k, "hs": states(2, 3, 8, seed=ord(word) + k)} for k in range(2)])
    table(tmp_path / "in/t.csv", [{"w": word, "n": k, "ok": k % 2} for word, k in rows])
    layout = {"hidden_states": f"{{{name}}}.pkl : [id=id]/hs -> L S D", "id": f"={{{name}}}-{{id}}"}
    layout |= {"is_correct": f"t.csv : [{name}=w, id=n]/ok"}
    if message:
        refuse(tmp_path, layout, message)
        return

    scores = {key: trace.score for key, trace in convert(tmp_path, layout).items()}

    np.testing.assert_equal(scores, {("a-0", 0): 0, ("a-1", 0): np.nan, ("b-0", 0): 0, ("b-1", 0): 1})


@pytest.mark.parametrize("rows", [[0, 1, 3, 4, 5], [3, 5, 7], [5, 6, 7], [0, 9], [2, 7]])
def test_rule_12b_some_rows_have_no_trace_and_some_traces_no_row(tmp_path, rows):
    """A trace failed, and some have no label: nothing shows that rows are numbered otherwise."""
    dump(tmp_path / "in/a.pkl", [{"id": k, "hs": states(2, 3, 8, seed=k)} for k in (0, 1, 2, 3, 4, 6, 7)])
    table(tmp_path / "in/t.csv", [{"id": k, "ok": k % 2} for k in rows])

    traces = convert(tmp_path, STATES | {"is_correct": "t.csv : [id=id]/ok"})

    scores = {int(key): trace.score for (key, _), trace in traces.items()}
    np.testing.assert_equal(scores, {k: k % 2 if k in rows else np.nan for k in scores})


@pytest.mark.parametrize("count", [2, 3])
def test_rule_12b_answers_are_numbered_from_1(tmp_path, count):
    dump(tmp_path / "in/a.pkl", {name: [states(2, 3, 8, seed=k) for k in range(count)] for name in "ab"})
    table(tmp_path / "in/t.csv", [{"id": name, "n": k, "ok": 1} for name in "ab" for k in range(1, count)])
    layout = {"hidden_states": "a.pkl : {id}/[K] -> L S D", "is_correct": "t.csv : [id=id, sample=n]/ok"}

    refuse(tmp_path, layout, "numbered from 0 and from 1")


@pytest.mark.parametrize("first", [1, 2, 5])
@pytest.mark.parametrize("last", [0, 1, 2])
def test_rule_12b_answers_and_rows_are_numbered_alike(tmp_path, first, last):
    """Names of files number answers as rows do, and the row of one answer is missing."""
    for n in range(3):
        for name in "ab":
            dump(tmp_path / f"in/{name}_{first + n}.pkl", {"hs": states(2, 3, 8, seed=n)})
    rows = [{"id": name, "n": first + n, "ok": n % 2} for name in "ab" for n in range(3) if (name, n) != ("b", last)]
    table(tmp_path / "in/t.csv", rows)
    layout = {"hidden_states": "{id}_{sample}.pkl : hs -> L S D", "is_correct": "t.csv : [id=id, sample=n]/ok"}

    traces = convert(tmp_path, layout)

    expected = {(row["id"], row["n"]): row["ok"] for row in rows}
    assert {key: trace.score for key, trace in traces.items() if key != ("b", first + last)} == expected
    assert np.isnan(traces["b", first + last].score)


def test_ids_by_a_number_that_is_not_known_yet(tmp_path):
    dump(tmp_path / "in/a.pkl", {"x": [states(2, 3, 8, seed=k) for k in range(2)]})
    table(tmp_path / "in/t.csv", [{"n": 0, "qid": "a"}])
    layout = {"hidden_states": "a.pkl : {w}/[K] -> L S D", "question_id": "t.csv : [sample=n]/qid"}

    refuse(tmp_path, layout, "question_id: the trace has no id where the layout says")


@pytest.mark.parametrize("prefix", ["", "q"])
@pytest.mark.parametrize("of_answers", [True, False])
def test_rule_12b_the_first_row_has_no_value(tmp_path, prefix, of_answers):
    """The way out of a refusal: a row for the first trace, whose value is missing."""
    table(tmp_path / "in/t.csv", [{"id": f"{prefix}{k}", "n": k, "ok": k % 2 if k else ""} for k in range(4)])
    layout = {"hidden_states": "a.pkl : [id=id]/hs -> L S D", "is_correct": "t.csv : [id=id]/ok"}
    if of_answers:
        table(tmp_path / "in/t.csv", [{"id": "x", "n": k, "ok": k % 2 if k else ""} for k in range(4)])
        layout = {"hidden_states": "a.pkl : {id}/[K] -> L S D", "is_correct": "t.csv : [id=id, sample=n]/ok"}
    found = [states(2, 3, 8, seed=k) for k in range(4)]
    items = [{"id": f"{prefix}{k}", "hs": one} for k, one in enumerate(found)]
    dump(tmp_path / "in/a.pkl", {"x": found} if of_answers else items)

    scores = [trace.score for trace in convert(tmp_path, layout).values()]

    assert np.isnan(scores[0])
    assert scores[1:] == [1, 0, 1]


@pytest.mark.parametrize("value", [float("nan"), True, np.nan, b"a", np.array([97], "u1"), np.False_])
@pytest.mark.parametrize("is_bound", [True, False])
def test_values_that_are_no_ids(tmp_path, value, is_bound):
    one(tmp_path, qid=value)
    layout = {"hidden_states": "a.pkl : [id=qid]/hs -> L S D"}
    if not is_bound:
        layout = {"hidden_states": "a.pkl : []/hs -> L S D", "question_id": "a.pkl : []/qid"}

    refuse(
        tmp_path,
        layout | {"ignore": "a.pkl : []/id"} if not is_bound else layout,
        "expected an id|has no qid|expected one value",
    )


VALUES_OF_ANSWERS = {
    "is_correct": [1, 0, 1, 1],
    "generated_answer": ["one", "two", "three", "four"],
    "prompt_length": [1, 2, 1, 1],
    "tokens": [[5, 6, 7]] * 4,
    "token_logprob": [[-1.0, -2.0, -3.0]] * 4,
}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("where", ["beside", "json", "items", "rows"])
@pytest.mark.parametrize("field", VALUES_OF_ANSWERS)
def test_rule_12_a_list_of_answers_that_is_too_short(tmp_path, count, where, field):
    """Nothing shows which answer has no value."""
    values = {name: VALUES_OF_ANSWERS[field][: count if name == "b" else 3] for name in "ab"}
    dump(tmp_path / "in/a.pkl", {n: {"hs": [states(2, 3, 8, seed=k) for k in range(3)], "ok": values[n]} for n in "ab"})
    layout = {"hidden_states": "a.pkl : {id}/hs -> K L S D"}
    axes = ["S"] * (field in ("tokens", "token_logprob"))
    layout[field] = " ".join(["a.pkl : {id}/ok -> K", *axes])
    if where != "beside":
        table(tmp_path / "in/t.json", values)
        line = "t.json : {id}" if where == "json" else "t.json : {id}/[K]"
        layout[field] = f"{line} -> {' '.join(['K'] * (where == 'json') + axes)}".removesuffix(" -> ")
        layout["ignore"] = "a.pkl : {id}/ok"
    if where == "rows":
        table(tmp_path / "in/t.json", [{"qid": name, "ok": value} for name in "ab" for value in values[name]])
        layout[field] = "t.json : [id=qid, sample=#]/ok"

    refuse(tmp_path, layout, f"{field}: the list has no value of the answer {count}")


def test_rule_12_rows_in_the_order_of_answers_that_are_too_many(tmp_path):
    """[the label of an answer that was left out]"""
    dump(tmp_path / "in/a.pkl", [{"id": name, "hs": states(2, 3, 8, seed=k)} for k, name in enumerate("aabb")])
    table(tmp_path / "in/t.csv", [{"id": name, "ok": k % 2} for k, name in enumerate("aabbb")])
    layout = {"hidden_states": "a.pkl : [id=id, sample=#]/hs -> L S D"}

    refuse(tmp_path, layout | {"is_correct": "t.csv : [id=id, sample=#]/ok"}, "belongs to no trace, others of the list")


@pytest.mark.parametrize(
    ("paths", "is_read"),
    [
        (["m/q1.npy", "m/q2.npy"], True),
        (["/data/x/m/q1.npy", "m/q2"], True),
        (["q1.npy", "q2"], True),
        (["other/q1.npy", "other/q2.npy"], False),
        (["/data/m/q1.npy", "/data/other/q2.npy"], None),
        (["q1.1.npy", "q2"], None),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".5"])
def test_files_that_rows_name(tmp_path, paths, is_read, suffix):
    """Folders of another model, and numbers behind a dot [the label of another run]."""
    for k in (1, 2):
        save(tmp_path / f"in/m/q{k}{suffix}.npy", states(2, 3, 8, seed=k))
    table(tmp_path / "in/t.csv", [{"path": path, "ok": k} for k, path in enumerate(paths)])
    layout = {"hidden_states": "m/{id}.npy -> L S D", "is_correct": "t.csv : [file=path]/ok"}
    if suffix or is_read is False:
        refuse(tmp_path, layout, "no file of it is that of a trace")
        return

    scores = [trace.score for trace in convert(tmp_path, layout).values()]

    wrong = next((k for k, path in enumerate(paths) if "other" in path or "1.1" in path), None)
    np.testing.assert_equal(scores, [np.nan if k == wrong else k for k in range(2)])


@pytest.mark.parametrize("others", ["shifted", "more", "less", "spelling", "equal"])
@pytest.mark.parametrize("by", ["[id=id]", "[]"])
def test_a_table_of_records_has_accounts(tmp_path, others, by):
    """Its texts and numbers belong to traces, too [the question of another trace]."""
    items(tmp_path)
    ids = {"shifted": "bcde", "more": "xabcd", "less": "abc", "spelling": ["A", "b", "c", "d"], "equal": "abcd"}[others]
    found = [{"id": name, "question": f"What is {name}?", "topic": f"about {name}"} for name in ids]
    table(tmp_path / "in/t.json", found if by == "[id=id]" else [{**row, "id": None} for row in found])
    layout = IN_ORDER | {"records": f"t.json : {by}"}
    is_read = others == "equal" or (by == "[]" and others in ("shifted", "spelling"))
    is_read |= by == "[id=id]" and others in ("shifted", "more", "less")
    if not is_read:
        refuse(tmp_path, layout, "records: t.json : .* rows belong to 4 traces|differ in spelling only")
        return

    traces = convert(tmp_path, layout)

    for k, ((name, _), trace) in enumerate(traces.items()):
        own = ids[k] if by == "[]" else name if name in ids else None
        assert trace.question == (own and f"What is {own}?")
        assert trace.extras.get("topic") == (own and f"about {own}")


@pytest.mark.parametrize("form", ["rows", "dict"])
@pytest.mark.parametrize(
    ("texts", "is_other"),
    [
        (["What is b?", "What is c?", "What is d?", "What is a?"], True),
        (["What is a?", "What is c?", "What is b?", "What is d?"], True),
        (["Who was a?", "Who was b?", "Who was c?", "Who was d?"], True),
        (["What is a?", "What is b?", "What is c?", "What is d?"], False),
        (["Q: what is A? A:", "Q: what is B? A:", "Q: what is C? A:", "Q: what is D? A:"], False),
        (["a", "x", "y", "z"], False),
    ],
)
def test_rule_13b_ids_that_number_other_questions(tmp_path, texts, is_other, form):
    """Two programs have numbered the questions of a data set that each had shuffled [labels of other questions]."""
    items(tmp_path, q=[f"What is {name}?" for name in "abcd"])
    found = [{"id": "abcd"[k], "question": text, "ok": k % 2} for k, text in enumerate(texts)]
    table(tmp_path / "in/t.json", found if form == "rows" else {row.pop("id"): row for row in found})
    line = "t.json : [id=id]/" if form == "rows" else "t.json : {id}/"
    layout = STATES | {"question": f"{ITEM}q", "is_correct": f"{line}ok"}
    if is_other:
        refuse(tmp_path, layout, "question is 'Wh.*', and the trace has 'What is .*': rows in another order")
        layout["ignore"] = f"{line}question"

    assert [trace.score for trace in convert(tmp_path, layout).values()] == [0, 1, 0, 1]


@pytest.mark.parametrize("length", [2, 3, 4])
def test_rule_05b_a_stated_length_is_that_of_the_first_pass(tmp_path, length):
    """[an answer that begins with the last token of the prompt]"""
    layout = write_passes(tmp_path, [[11, 12, 13, 21, 22, 2]]) | {"prompt_length": f"={length}"}
    if length != 3:
        refuse(
            tmp_path, layout, "prompt_length: found .*, expected 3 as in the first part|part of the prompt was cached"
        )
        return

    assert [trace.prompt_length for trace in convert(tmp_path, layout).values()] == [3]


@pytest.mark.parametrize("entries", [{}, {"S.side": "left"}, {"S.pad": [0, 0]}, {"S.pad": [0, 0], "S.side": "left"}])
@pytest.mark.parametrize("more", [[], [[0, 0, 0, 9, 9, 8]], [[0, 7, 0, 0, 0, 0]]])
def test_rule_17_an_id_pads_rows_at_the_left_and_ends_them(tmp_path, entries, more):
    """[an end of sequence with the id of the padding]"""
    ids = np.array([[0, 0, 0, 5, 6, 0], [0, 0, 7, 8, 9, 4], [5, 6, 7, 8, 9, 0], *more])
    dump(tmp_path / "in/a.pkl", {"hs": states(len(ids), 2, 6, 8), "ids": ids})
    layout = {"hidden_states": "a.pkl : hs -> N L S D", "tokens": "a.pkl : ids -> N S", "S.padding": 0} | entries
    if len(entries) < 2:
        refuse(tmp_path, layout, "S.pad|S.side")
        return

    traces = convert(tmp_path, layout).values()

    expected = [[5, 6, 0], [7, 8, 9, 4], [5, 6, 7, 8, 9, 0], *([k for k in row if k] for row in more)]
    expected[3:] = [row + [0] * (row == [7]) for row in expected[3:]]  # its first 0 ends it, the others fill it
    assert [trace.tokens.tolist() for trace in traces] == expected


def test_rule_17_a_side_of_an_id_is_the_left_one(tmp_path):
    dump(tmp_path / "in/a.pkl", {"hs": states(2, 2, 3, 8), "ids": np.array([[5, 6, 0], [7, 8, 9]])})
    layout = {"hidden_states": "a.pkl : hs -> N L S D", "tokens": "a.pkl : ids -> N S", "S.padding": 0}

    with pytest.raises(UsageError, match=r"S\.side: has no effect"):
        convert(tmp_path, layout | {"S.side": "right"})


@pytest.mark.parametrize(("line", "expected"), [("=0", [0, 0, 0]), ("=2", [2, 2, 2]), ("={n}", [1, 2, 3])])
def test_a_number_of_every_trace(tmp_path, line, expected):
    dump(tmp_path / "in/a.pkl", {f"q{k}_{k}": states(2, 4, 8, seed=k) for k in (1, 2, 3)})
    layout = {"hidden_states": "a.pkl : {id}_{n:d} -> L S D", "prompt_length": line}

    assert [trace.prompt_length for trace in convert(tmp_path, layout).values()] == expected


@pytest.mark.parametrize("line", ["={id}", "=x", "=1_0", "="])
def test_a_number_of_every_trace_that_is_none(tmp_path, line):
    dump(tmp_path / "in/a.pkl", {f"q{k}": states(2, 4, 8, seed=k) for k in range(3)})

    refuse(tmp_path, {"hidden_states": "a.pkl : {id} -> L S D", "prompt_length": line}, "prompt_length: .*a number")


def test_an_id_and_its_group_are_made_of_names(tmp_path):
    dump(tmp_path / "in/a/q0.pkl", states(2, 4, 8))
    layout = {"hidden_states": "{split}/{id}.pkl -> L S D", "question_id": "={split}_{id}", "group": "={split}"}

    assert list(convert(tmp_path, layout)) == [("a_q0", 0)]


def test_a_made_id_has_zeros_in_front_and_a_table_another_spelling(tmp_path):
    numbers = (7, 12, 123456)
    for k in numbers:
        save(tmp_path / f"in/x-{k:05d}.npy", states(2, 4, 8, seed=k))
    table(tmp_path / "in/t.csv", [{"doc": f"X_{k}", "ok": k % 2} for k in numbers[::-1]])
    layout = {"hidden_states": "x-{n:d}.npy -> L S D", "question_id": "=x-{n:05d}"}

    traces = convert(tmp_path, layout | {"is_correct": 't.csv : [doc="X_{n:d}"]/ok'})

    assert {key: trace.score for (key, _), trace in traces.items()} == {"x-00007": 1, "x-00012": 0, "x-123456": 0}
    with pytest.raises(UsageError, match=r'it binds doc, .*; \[n=COLUMN\] joins it, and \[COLUMN="TEXT\{n\}"\]'):
        convert(tmp_path, layout | {"is_correct": "t.csv : [doc=doc]/ok"})


def test_a_width_of_a_text_is_refused(tmp_path):
    dump(tmp_path / "in/qa.pkl", states(2, 4, 8))

    refuse(
        tmp_path, {"hidden_states": "q{n}.pkl -> L S D", "question_id": "=q{n:03d}"}, "expected a number of 3 digits"
    )


@pytest.mark.parametrize("line", ["@names -> N", "@names/[]"])
def test_a_list_as_text_in_a_header(tmp_path, line):
    (tmp_path / "in").mkdir()
    header = {"names": json.dumps(["2023-a", "2023-b", "c"])}
    save_file({"hs": states(3, 2, 4, 8)}, tmp_path / "in/a.safetensors", header)
    layout = {"hidden_states": "a.safetensors : hs -> N L S D", "question_id": f"a.safetensors : {line}"}

    assert [key for key, _ in convert(tmp_path, layout)] == ["2023-a", "2023-b", "c"]
    header["names"] = "2023-a"
    save_file({"hs": states(3, 2, 4, 8)}, tmp_path / "in/a.safetensors", header)
    refuse(tmp_path, layout, "which is no JSON")


def test_an_array_is_no_value_of_names(tmp_path):
    with pytest.raises(UsageError, match="= makes texts and numbers"):
        parse_layout({"hidden_states": "a.npy -> N L S D", "tokens": "={id}"})


def test_a_number_that_is_a_key_leaves_out_no_row(tmp_path):
    """[a column of the name 0]"""
    hidden = [states(1, 3, 8, seed=k) for k in range(3)]
    dump(tmp_path / "in/a.pkl", {"hs": hidden, "id": ["a", "b", "c"], 0: [0.5, 0.5, 0.5]})

    traces = convert(tmp_path, {"hidden_states": "a.pkl : [id=id]/hs -> L S D", "ignore": "a.pkl : 0"})

    assert [key for key, _ in traces] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("judged", "line", "expected"),
    [
        ({"correct": ["q0", "q1"], "hallucinated": ["q2"]}, "{value}/[id=]", [1, 1, 0]),
        ({"correct": ["q1"], "hallucinated": ["q0"]}, "{value}/[id=]", [0, 1, None]),
        ({"1": ["q0", "q1"], "0": ["q2"]}, "{value}/[id=]", [1, 1, 0]),
        ({"correct": [{"": "q0", "ok": 0}], "wrong": []}, "{value}/[id=]", "a mapping"),
        ({"correct": ["q0", "q1"], "wrong": ["q1", "q2"]}, "{value}/[id=]", "two values of id q1"),
        ({"correct": ["q0"], "unsure": ["q2"]}, "{value}/[id=]", "found 'unsure'"),
        ({"correct": ["q0"], "wrong": "q2"}, "{value}/[id=]", "which is no JSON"),
    ],
)
def test_lists_of_ids_by_verdict(judged, line, expected, tmp_path):
    for k in range(3):
        dump(tmp_path / f"in/q{k}.pkl", {"hs": states(2, 3 + k, 8, seed=k)})
    (tmp_path / "in/j.json").write_text(json.dumps(judged))
    layout = {"hidden_states": "{id}.pkl : hs -> L S D", "is_correct": f"j.json : {line}"}

    if isinstance(expected, str):
        refuse(tmp_path, layout, expected)
    else:
        traces = convert(tmp_path, layout)
        assert [traces[f"q{k}", 0].scores.get("is_correct") for k in range(3)] == expected


@pytest.mark.parametrize("line", ["{value}", "{value}/{id}", "{value}/[id=qid]"])
def test_a_key_is_a_value_of_lists_of_ids_alone(line, tmp_path):
    """[values under the ids, and keys next to them]"""
    dump(tmp_path / "in/q1.pkl", {"hs": states(2, 3, 8)})
    (tmp_path / "in/j.json").write_text(json.dumps({"correct": {"q1": False}}))

    with pytest.raises(UsageError, match="value"):
        convert(tmp_path, {"hidden_states": "{id}.pkl : hs -> L S D", "is_correct": f"j.json : {line}"})


def test_value_is_also_a_name(tmp_path):
    """[a name that is the value elsewhere]"""
    for k in range(2):
        dump(tmp_path / f"in/q{k}.pkl", {"hs": states(2, 3 + k, 8, seed=k)})
    table(tmp_path / "in/t.csv", [{"id": f"q{k}", "value": v, "ok": v == k} for k in range(2) for v in range(2)])
    layout = {"hidden_states": "{id}.pkl : hs -> L S D", "is_correct": "t.csv : [id=id, value=value]/ok"}

    traces = convert(tmp_path, layout | {"keep.value": "1"})

    assert [traces[f"q{k}", 0].scores["is_correct"] for k in range(2)] == [0, 1]


def test_numbers_of_rows_next_to_an_item_that_is_left_out(tmp_path):
    """[slots that count the item]"""
    dump(tmp_path / "in/a.pkl", [{"id": f"q{k}", "hs": states(2, 3, 8, seed=k)} for k in range(4)])
    table(tmp_path / "in/t.csv", [{"slot": k, "y": k % 2} for k in range(3)])
    layout = {"hidden_states": "a.pkl : []/hs -> L S D", "question_id": "a.pkl : []/id"}

    with pytest.raises(UsageError, match="leaves out an item, and a line joins by the numbers of items"):
        convert(tmp_path, layout | {"is_correct": "t.csv : [N=slot]/y", "ignore": "a.pkl : 1"})


def test_numbers_as_text_take_linear_time():
    begin = time.process_time()
    for pattern in (values._NUMBER, text._NUMBER):
        assert pattern.fullmatch("1" * 200_000 + "x") is None
    assert time.process_time() - begin < 5


BASE64 = {"hidden_states": "a.pkl : [id=id]/hs -> L S D", "dtype.hidden_states": "float32"}


@pytest.mark.parametrize(
    ("change", "entries", "message"),
    [
        (
            lambda text: text,
            {"ignore": "a.pkl : []/shape"},
            "which is no JSON; shape.hidden_states and dtype.hidden_states",
        ),
        (lambda text: text, {"dtype.hidden_states": "float64"}, "found 24 float64 values, expected the shape"),
        (lambda text: text[:-4], {}, "found 45 float32 values|a text"),
        (lambda text: text.replace("A", "-"), {}, "found a text"),
        (lambda text: base64.b64decode(text).hex(), {}, "found 72 float32 values"),
    ],
)
def test_base64_that_is_other_than_stated(change, entries, message, tmp_path):
    text = change(base64.b64encode(states(2, 3, 8).tobytes()).decode())
    dump(tmp_path / "in/a.pkl", [{"id": "q0", "hs": text, "shape": [2, 3, 8]}])
    shape = {} if "ignore" in entries else {"shape.hidden_states": "a.pkl : [id=id]/shape"}

    refuse(tmp_path, BASE64 | shape | entries, message)


def test_base64_of_a_stated_shape(tmp_path):
    hidden = states(2, 3, 8)
    dump(tmp_path / "in/a.pkl", [{"id": "q0", "hs": base64.b64encode(hidden.tobytes()).decode(), "shape": [2, 3, 8]}])

    (trace,) = convert(tmp_path, BASE64 | {"shape.hidden_states": "a.pkl : [id=id]/shape"}).values()

    np.testing.assert_allclose(trace.hidden_states, hidden, atol=2e-3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[0.5 1. -2e-3 .25]", None),
        ("0.5  1.\n -0.002 0.25", None),
        ("[0.5, 1.0, -0.002, 0.25]", None),
        ("[0.5 1. ... 0.25]", "which is no JSON"),
        ("0.5 1. -0.002 0.25]", "which is no JSON"),
        ("0.5 1_0 -0.002 0.25", "which is no JSON"),
        ("0.5 1. -0.002-0.25 0.25", "which is no JSON"),
        ("[0.5 1. -0.002]", "expected 3 as in"),
        ("[[0.5 1.]\n [-0.002 0.25]]", "which is no JSON"),
    ],
)
def test_vectors_as_text(text, message, tmp_path):
    table(tmp_path / "in/a.csv", [{"id": "q0", "v": text}, {"id": "q1", "v": "[1. 2. 3. 4.]"}])
    layout = {"last_token": "a.csv : [id=id]/v -> D"}

    if message:
        refuse(tmp_path, layout, message)
    else:
        first, second = convert(tmp_path, layout).values()
        np.testing.assert_allclose(first.last_token, [[0.5, 1, -0.002, 0.25]], atol=1e-5)
        np.testing.assert_array_equal(second.last_token, [[1, 2, 3, 4]])


@pytest.mark.parametrize(("left_out", "ids", "is_right"), [(0, 2, True), (0, 3, False), (2, 2, True), (1, 2, False)])
def test_an_item_that_is_left_out_shifts_no_row(left_out, ids, is_right, tmp_path):
    """[rows in order that count the header]"""
    items = [{"hs": states(1, 3, 8, seed=k)} for k in range(2)]
    kept = [item["hs"] for item in items]
    items.insert(left_out if left_out != 1 else 0, {"model": "m"})
    dump(tmp_path / "in/a.pkl", items)
    (tmp_path / "in/ids.txt").write_text("".join(f"q{k}\n" for k in range(ids)))
    layout = {"hidden_states": "a.pkl : []/hs -> L S D", "question_id": "ids.txt : []", "ignore": f"a.pkl : {left_out}"}

    if not is_right:
        refuse(tmp_path, layout, "rows|missing key|no trace|hs")
        return
    for k, trace in enumerate(convert(tmp_path, layout).values()):
        assert trace.question_id == f"q{k}"
        np.testing.assert_allclose(trace.hidden_states, kept[k], atol=2e-3)


def test_rule_01_layers_in_another_order(tmp_path):
    """[layers from the top down]"""
    dump(tmp_path / "in/a.pkl", {"hs": states(2, 3, 4, 8), "layers": np.array([3, 2, 1])})
    layout = {"hidden_states": "a.pkl : hs -> N L S D"}

    with TestCase().assertLogs("tracestore") as logged:
        convert(tmp_path, layout | {"ignore": "a.pkl : layers"})

    assert "a.pkl : layers is ignored: the layers are stored in the order of the arrays" in "".join(logged.output)


@pytest.mark.parametrize("more", [{}, {"L.size": 9}])
def test_rule_01_the_summary_says_that_numbers_from_the_end_are_not_stored(tmp_path, more):
    for k in (1, 2):
        dump(tmp_path / f"in/h_{-k}.pkl", {f"q{n}": states(8, seed=k + n) for n in range(3)})

    with TestCase().assertLogs("tracestore") as logged:
        traces = convert(tmp_path, {"last_token": "h_{layer:-d}.pkl : {id} -> D"} | more)

    assert ("L.size = N gives those" in "".join(logged.output)) == (not more)
    assert all(len(trace.last_token) == 2 for trace in traces.values())


@pytest.mark.parametrize("container", ["group", "array", "safetensors", "layers"])
def test_rule_08a_attributes_that_may_be_labels(tmp_path, container):
    """[labels that are dropped]"""
    h5py, safetensors = pytest.importorskip("h5py"), pytest.importorskip("safetensors.numpy")
    (tmp_path / "in").mkdir()
    if container in ("group", "array"):
        with h5py.File(tmp_path / "in/a.h5", "w") as file:
            file.attrs["accuracy"] = 0.5
            for k in range(2):
                file[f"q{k}/hs"] = states(2, 3, 8, seed=k)
                file[f"q{k}" if container == "group" else f"q{k}/hs"].attrs["is_correct"] = k
        layout, place = {"hidden_states": "a.h5 : {id}/hs -> L S D"}, f"a.h5 : {{id}}/{'hs/' * (container == 'array')}"
    else:
        for k in range(2):
            values = {"hs": states(2, 3, 8, seed=k)} | ({"more": states(3)} if container == "layers" else {})
            path = tmp_path / "in" / f"q{k}.safetensors"
            safetensors.save_file(values, path, metadata={"is_correct": str(k), "format": "pt"})
        layout, place = {"hidden_states": "{id}.safetensors : hs -> L S D"}, "{id}.safetensors : "
        if container == "layers":
            layout = {"hidden_states": "q{layer}.safetensors : hs -> N S D", "S.padding": "none"}
            layout["ignore"] = "q{layer}.safetensors : more"
            assert len(convert(tmp_path, layout)) == 2  # of a layer, which has no label
            return
    refuse(tmp_path, layout, f"{place}@is_correct: no line of the layout names what may be a label")

    assert len(convert(tmp_path, layout | {"ignore": f"{place}@is_correct"})) == 2
    traces = convert(tmp_path, layout | {"is_correct": f"{place}@is_correct"}, overwrite=True)
    assert [trace.score for trace in traces.values()] == [0, 1]


def test_attributes_of_traces_that_no_line_names_are_listed(tmp_path):
    """[a number of tokens of the prompt that is left out without a word]"""
    h5py = pytest.importorskip("h5py")
    (tmp_path / "in").mkdir()
    with h5py.File(tmp_path / "in/a.h5", "w") as file:
        file.attrs["model"] = "m"  # of the file, not of a trace
        for k in range(2):
            file[f"q{k}/hs"] = states(2, 3, 8, seed=k)
            file[f"q{k}"].attrs.update({"words_of_prompt": k, "kind": "x", "CLASS": "GROUP"})

    with TestCase().assertLogs("tracestore") as logged:
        convert(tmp_path, {"hidden_states": "a.h5 : {id}/hs -> L S D", "question": "a.h5 : {id}/@kind"})

    assert "left out: a.h5 : {id}/@words_of_prompt" in "".join(logged.output)
    assert all(name not in "".join(logged.output) for name in ("@CLASS", "@kind", "@model"))


def test_an_empty_prompt_has_a_length(tmp_path):
    for k, size in enumerate((0, 3)):
        save(tmp_path / f"in/q{k}_p.npy", states(2, size, 8, seed=k))
        save(tmp_path / f"in/q{k}_a.npy", states(2, 4, 8, seed=k + 5))

    traces = convert(tmp_path, {"hidden_states": ["{id}_p.npy -> L S D", "{id}_a.npy -> L S D"]})

    assert [traces[f"q{k}", 0].prompt_length for k in range(2)] == [0, 3]


def test_rule_12_a_numbered_row_without_the_key_is_one_without_a_value(tmp_path):
    for name in ("q1_0", "q1_1", "q2_0", "q2_1"):
        save(tmp_path / f"in/{name}.npy", states(2, 4, 8))
    found = [{"qid": "q1", "ok": 1}, {"qid": "q1"}, {"qid": "q2", "ok": 0}, {"qid": "q2", "ok": 1}]
    (tmp_path / "in/t.jsonl").write_text("\n".join(map(json.dumps, found)))

    layout = {"hidden_states": "{id}_{sample}.npy -> L S D", "is_correct": "t.jsonl : [id=qid, sample=#]/ok"}
    traces = convert(tmp_path, layout)

    np.testing.assert_equal([trace.score for trace in traces.values()], [1, np.nan, 0, 1])


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        ([f"train_{k}" for k in range(6)], [*(f"train_{k}" for k in range(1, 6)), *(f"test_{k}" for k in range(3))]),
        (range(6), [*range(1, 6), "x"]),
        (["d1-5", "d1-6", "d2-5", "d2-6"], ["d1-6", "d2-6", "d3-6", "zz"]),
    ],
)
def test_rule_12b_rows_of_traces_that_failed_are_not_shifted(tmp_path, rows, names):
    for name in names:
        save(tmp_path / f"in/h/{name}.npy", states(2, 4, 8))
    table(tmp_path / "in/t.csv", [{"qid": row, "ok": k % 2} for k, row in enumerate(rows)])

    traces = convert(tmp_path, {"hidden_states": "h/{id}.npy -> L S D", "is_correct": "t.csv : [id=qid]/ok"})

    own = {str(row): k % 2 for k, row in enumerate(rows)}
    np.testing.assert_equal([trace.score for trace in traces.values()], [own.get(name, np.nan) for name, _ in traces])


@pytest.mark.parametrize("path", ["q{}", "q{}.hidden", "q{}.hidden.npy"])
def test_a_file_with_two_suffixes_that_a_row_names(tmp_path, path):
    for k in range(2):
        save(tmp_path / f"in/q{k}.hidden.npy", states(2, 4, 8))
    table(tmp_path / "in/t.csv", [{"path": path.format(k), "ok": k} for k in range(2)])

    traces = convert(tmp_path, {"hidden_states": "{id}.hidden.npy -> L S D", "is_correct": "t.csv : [file=path]/ok"})

    assert [trace.score for trace in traces.values()] == [0, 1]


def test_values_of_a_table_of_columns_are_no_ids(tmp_path):
    """Only a column that joins is compared with what a float can count."""
    hidden = states(2, 3, 4, seed=1) + np.float32(3000)
    dump(tmp_path / "in/t.pkl", {"ids": ["a", "b"], "hs": hidden.astype("f2")})
    traces = convert(tmp_path, {"last_token": "t.pkl : [id=ids]/hs -> L D"})
    np.testing.assert_array_equal(traces["b", 0].last_token, hidden[1].astype("f2"))


@pytest.mark.parametrize("begins", [(0, 3), (0, 0), (3, 0)])
def test_rule_13_rows_of_chunks_of_layers(tmp_path, begins):
    """Chunks are read in any order: each begins with a number of its own, the same in all of its layers."""
    hidden = states(6, 2, 4, seed=2)
    for chunk, begin in enumerate(begins):
        for layer in range(2):
            rows = [{"idx": begin + k, "vec": hidden[3 * chunk + k, layer].tolist()} for k in range(3)]
            lines(tmp_path / f"in/l{layer}_c{chunk}.jsonl", rows)
    traces = convert(tmp_path, {"last_token": "l{layer}_c{chunk}.jsonl : []/vec -> D"})
    np.testing.assert_allclose(list(traces.values())[4].last_token, hidden[4], atol=2e-3)


def test_rule_13_layers_of_a_chunk_with_other_rows(tmp_path):
    for chunk, layer in itertools.product(range(2), range(2)):
        rows = [{"idx": 3 * (chunk ^ layer) + k, "vec": [1.0 + k, 2.0]} for k in range(3)]
        lines(tmp_path / f"in/l{layer}_c{chunk}.jsonl", rows)
    refuse(tmp_path, {"last_token": "l{layer}_c{chunk}.jsonl : []/vec -> D"}, "idx")


def test_rule_13_rows_of_layers_that_are_keys(tmp_path):
    hidden = states(3, 2, 4, seed=3)
    layers = {f"layer_{k}": [{"idx": n, "vec": hidden[n, k].tolist()} for n in range(3)] for k in range(2)}
    dump(tmp_path / "in/a.pkl", layers)
    traces = convert(tmp_path, {"last_token": "a.pkl : layer_{layer}/[]/vec -> D"})
    np.testing.assert_allclose(list(traces.values())[2].last_token, hidden[2], atol=2e-3)


@pytest.mark.parametrize("text", ["null", "[]", "3"])
def test_a_text_along_rows_is_a_list(tmp_path, text):
    dump(tmp_path / "in/a.pkl", {"h": states(3, 2, 4, 5)})
    (tmp_path / "in/l.json").write_text(json.dumps({"l": text}))
    refuse(
        tmp_path, {"hidden_states": "a.pkl : h -> N L S D", "is_correct": "l.json : l -> N"}, "expected a list along N"
    )


def test_a_text_along_rows_behind_each_other(tmp_path):
    dump(tmp_path / "in/a.pkl", {"h": states(4, 2, 5), "ids": ["a", "b"]})
    (tmp_path / "in/l.json").write_text(json.dumps({"l": "[1, 0, 1, 1]"}))
    layout = {
        "last_token": "a.pkl : h -> (N K) L D",
        "question_id": "a.pkl : ids -> N",
        "is_correct": "l.json : l -> (N K)",
    }
    traces = convert(tmp_path, layout)
    assert [traces[key].scores["is_correct"] for key in traces] == [1, 0, 1, 1]


def test_a_label_is_no_list_of_layers(tmp_path):
    """Its name states that, though its values are those of the stated layers."""
    dump(tmp_path / "in/a.pkl", {"h": states(2, 3, 4), "layer_correct": [0, 1]})
    refuse(tmp_path, {"last_token": "a.pkl : h -> L N D", "L.ids": [0, 1]}, "layer_correct")
