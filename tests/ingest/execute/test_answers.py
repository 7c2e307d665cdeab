"""Test states, ids and values that begin behind others: a first token without id or state, and tokens from prompt_length on."""

import numpy as np
import pytest

import tracestore
from tests.ingest.execute.folders import convert, dump, refuse, save, states, table
from tracestore.errors import TracestoreError, UsageError
from tracestore.ingest.layout.effects import check_effects
from tracestore.ingest.layout.language import parse_layout
from tracestore.ingest.layout.places import plan_of
from tracestore.ingest.pickles.sparse import PickledSparse

ITEM = "a.pkl : [id=id]/"
STATES = {"hidden_states": f"{ITEM}hs -> L S D"}
ANSWER = {"hidden_states": f"{ITEM}hs -> L G D", "prompt_length": f"{ITEM}n"}


def one(tmp_path, num_states=5, **values):
    """Write one dict with states (L 2, S, D 8)."""
    dump(tmp_path / "in/a.pkl", [{"id": "a", "hs": states(2, num_states, 8), **values}])


# A first token without id


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("field", "first", "rest"),
    [
        ("tokens", 1, [5, 6, 7, 8, 9, 10, 11]),
        ("tokens", 0, np.arange(3, 10, dtype="i4")),
        ("tokens_decoded", "<s>", list("abcdefg")),
        ("token_logprob", "nan", [-0.5, -1, -2.5, -3, -0.25, -4, -5]),
        ("token_label", -1, [0, 1, 0, 1, 1, 0, 0]),
        ("token_entropy", "0.5", np.arange(7, dtype="f2")),
    ],
)
def test_a_first_token_that_no_list_holds(tmp_path, count, field, first, rest):
    one(tmp_path, count + 1, rest=rest[:count], n=count)
    layout = {field: [f"={first}", f"{ITEM}rest"], "prompt_length": ["=1", f"{ITEM}n"]}

    trace = convert(tmp_path, STATES | layout)["a", 0]

    expected = [first if field == "tokens_decoded" else float(first), *rest[:count]]
    found = getattr(trace, field)
    assert found == expected if field == "tokens_decoded" else np.array_equal(found, expected, equal_nan=True)
    assert trace.prompt_length == count + 1
    refuse(tmp_path, STATES | {"prompt_length": f"{ITEM}n", field: f"{ITEM}rest"}, f"{field}: ")


@pytest.mark.parametrize("is_list", [True, False])
def test_rule_08_texts_that_prompt_length_may_count(tmp_path, is_list):
    """A line for the tokens is left out because it is refused [a first token that the texts lack]."""
    one(tmp_path, 4, toks=["a", "b", "c"] if is_list else "a b c", n=1)
    layout = STATES | {"prompt_length": f"{ITEM}n"}
    if is_list:
        refuse(tmp_path, layout | {"tokens_decoded": f"{ITEM}toks"}, "found 3 strings, expected 4 as in hidden_states")
        refuse(tmp_path, layout, "toks: no line of the layout names texts that may be the tokens")
        layout["ignore"] = [f"{ITEM}toks"]

    assert convert(tmp_path, layout)["a", 0].prompt_length == 1


def test_the_message_shows_the_line_for_a_first_token(tmp_path):
    one(tmp_path, ids=[5, 6, 7, 8])

    refuse(tmp_path, STATES | {"tokens": f"{ITEM}ids"}, r'found 4 ids, expected 5 .*\["=ID", ADDRESS\]')


def test_a_first_token_behind_padding(tmp_path):
    dump(
        tmp_path / "in/a.pkl", {"hs": states(3, 2, 5, 8), "ids": np.asarray([[0, 5, 6, 7], [5, 6, 7, 8], [6, 7, 8, 9]])}
    )
    dump(tmp_path / "in/m.pkl", np.asarray([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]))
    layout = {
        "hidden_states": "a.pkl : hs -> N L S D",
        "tokens": ["=1", "a.pkl : ids -> N S"],
        "S.mask": "m.pkl -> N S",
    }

    refuse(tmp_path, layout, "padding")


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"question": ["=a", "a.pkl : []/q"]}, "in a list the value of a first token"),
        ({"hidden_states": ["=1", "a.pkl : []/q"]}, "in a list the value"),
        ({"attentions": ["=1", "a.pkl : []/q"]}, "in a list the value"),
        ({"is_correct": ["=1", "a.pkl : []/q"]}, "in a list the value"),
        ({"L.ids": ["=1", "a.pkl : []/q"]}, "in a list the value"),
        ({"tokens": ["=1"]}, "expected FILES"),
        ({"tokens": "=1"}, "= makes texts and numbers"),
        ({"prompt_length": ["=1", "a.pkl : []/n", "a.pkl : []/m"]}, "expected FILES"),
        ({"tokens": ["=1", "a.pkl : []/a", "a.pkl : []/b", "a.pkl : []/c"]}, "expected FILES"),
        ({"tokens": ["a.pkl : []/a", "=1"]}, "expected|=1"),
    ],
)
def test_lists_that_state_no_first_token(entries, words):
    with pytest.raises(UsageError, match=words):
        layout = parse_layout({"hidden_states": "a.pkl : []/hs -> L S D"} | entries)
        raise UsageError("expected" if "=1" in str(layout.addresses["tokens"][1]) else "accepted")


# Tokens from prompt_length on


@pytest.mark.parametrize("prompt", [0, 1, 2, 3, 9])
@pytest.mark.parametrize("answer", [1, 2, 5])
def test_states_of_the_answer_take_its_ids(tmp_path, prompt, answer):
    ids = list(range(10, 10 + prompt + answer))
    one(tmp_path, answer, ids=ids, toks=[str(k) for k in ids], p=[-0.5 * k for k in ids], q=[1.0] * answer, n=prompt)
    layout = {"tokens": f"{ITEM}ids", "tokens_decoded": f"{ITEM}toks", "token_logprob": f"{ITEM}p"}

    trace = convert(tmp_path, ANSWER | layout | {"token_entropy": f"{ITEM}q -> G"})["a", 0]

    assert trace.tokens.tolist() == ids[prompt:]
    assert trace.tokens_decoded == [str(k) for k in ids[prompt:]]
    assert trace.token_logprob.tolist() == [-0.5 * k for k in ids[prompt:]]
    assert trace.prompt_length == 0
    assert trace.num_tokens == answer


def test_states_of_the_answer_beside_its_own_ids(tmp_path):
    one(tmp_path, 3, ids=[7, 8, 9], n=4)

    trace = convert(tmp_path, ANSWER | {"tokens": f"{ITEM}ids -> G"})["a", 0]

    assert (trace.tokens.tolist(), trace.prompt_length) == ([7, 8, 9], 0)


def test_the_last_token_of_an_answer_has_no_states(tmp_path):
    one(tmp_path, 3, ids=[5, 6, 7, 8, 9, 10], n=2)
    refuse(tmp_path, ANSWER | {"tokens": f"{ITEM}ids"}, "found 4 ids, expected 3")

    assert convert(tmp_path, ANSWER | {"tokens": f"{ITEM}ids -> T"})["a", 0].tokens.tolist() == [7, 8, 9, 10]


@pytest.mark.parametrize("prompts", [[3, 2], [2, 3], [3, 2, 3], [4, 3, 4], [1, 2]])
@pytest.mark.parametrize("padding", [{}, {"S.padding": "zeros"}, {"S.padding": 0}, {"S.mask": "a.pkl : m -> N S"}])
@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_that_prompt_length_cuts_at_different_columns(tmp_path, prompts, padding, side):
    """Rows with padding in front that prompt_length leaves out have one id more, others have not."""
    ids, mask = np.zeros((2, len(prompts), max(prompts) + 4), int)
    for k, n in enumerate(prompts):
        at = slice(max(prompts) - n, None) if side == "left" else slice(n + 4)
        ids[k, at], mask[k, at] = np.arange(n + 4) + 10 * (k + 1), 1
    dump(tmp_path / "in/a.pkl", {"hs": states(len(prompts), 2, 4, 8), "ids": ids, "n": np.asarray(prompts), "m": mask})
    layout = {"hidden_states": "a.pkl : hs -> N L G D", "prompt_length": "a.pkl : n -> N"} | padding
    layout |= {} if "S.mask" in padding else {"ignore": "a.pkl : m"}

    for axes in ("N S", "N T"):
        refuse(tmp_path, layout | {"tokens": f"a.pkl : ids -> {axes}"}, "tokens: (found [45] ids|.* the id 0 )")


@pytest.mark.parametrize("field", ["hidden_states", "tokens", "tokens_decoded", "token_logprob"])
@pytest.mark.parametrize("n", range(6))
def test_prompt_length_is_that_of_the_first_part(tmp_path, field, n):
    parts = {"hs": states(2, 5, 8), "ids": [1, 2, 3, 4, 5], "toks": list("abcde"), "p": [-1.0, -2.0, -3.0, -4.0, -5.0]}
    key = {"hidden_states": "hs", "tokens": "ids", "tokens_decoded": "toks", "token_logprob": "p"}[field]
    value = parts[key]
    first, rest = (value[:, :2], value[:, 2:]) if field == "hidden_states" else (value[:2], value[2:])
    dump(tmp_path / "in/a.pkl", [{"id": "a", "n": n, "hs": parts["hs"], "first": first, "rest": rest}])
    layout = STATES | {field: [f"{ITEM}first", f"{ITEM}rest"], "prompt_length": f"{ITEM}n"}
    layout |= {"ignore": f"{ITEM}hs"} if field == "hidden_states" else {}
    if n != 2:
        refuse(tmp_path, layout, f"prompt_length: found {n}, expected 2 as in the first part of {field}")
        return

    assert convert(tmp_path, layout)["a", 0].prompt_length == 2


@pytest.mark.parametrize("n", [1, 3])
def test_prompt_length_is_that_of_the_first_part_of_all_ids(tmp_path, n):
    """One id more or less of the prompt would be one less or more of the answer."""
    one(tmp_path, 3 if n == 1 else 2, prompt=[5, 6], answer=[7, 8, 9] if n == 1 else [7, 8, 9, 10], n=n)

    refuse(
        tmp_path,
        ANSWER | {"tokens": [f"{ITEM}prompt", f"{ITEM}answer -> T"]},
        f"found {n}, expected 2 as in the first part of tokens",
    )


@pytest.mark.parametrize("side", ["left", "none"])
@pytest.mark.parametrize("counted", ["tokens", "columns"])
def test_the_first_part_of_padded_ids_has_the_prompt(tmp_path, side, counted):
    prompt, answer = np.asarray([[0, 5, 6], [7, 8, 9]]), np.asarray([[10, 11], [12, 13]])
    prompt[0, 0] = 0 if side == "left" else 4
    mask = np.concatenate([prompt > 0, answer > 0], axis=1).astype(int)
    n = mask[:, :3].sum(1) if counted == "tokens" else np.asarray([3, 3])
    dump(tmp_path / "in/a.pkl", {"hs": states(2, 2, 5, 8), "p": prompt, "a": answer, "m": mask, "n": n})
    layout = {"hidden_states": "a.pkl : hs -> N L S D", "tokens": ["a.pkl : p -> N S", "a.pkl : a -> N S"]}
    layout |= {"S.mask": "a.pkl : m -> N S", "prompt_length": "a.pkl : n -> N", "S.prompt": counted}

    traces = convert(tmp_path, layout)

    assert [trace.prompt_length for trace in traces.values()] == [3 - (side == "left"), 3]


@pytest.mark.parametrize("added", [1, 2, 3])
@pytest.mark.parametrize("n", [-1, -2, "-1", -1.0])
def test_a_first_token_is_no_part_of_an_unknown_prompt(tmp_path, added, n):
    one(tmp_path, ids=[5, 6, 7, 8], n=n)
    layout = {"tokens": ["=1", f"{ITEM}ids"], "prompt_length": [f"={added}", f"{ITEM}n"]}

    refuse(tmp_path, STATES | layout, "prompt_length: found -")


@pytest.mark.parametrize("n", [0, 1, 3, 4, 6, 7, -2, 2.5])
def test_another_length_of_the_prompt_is_refused(tmp_path, n):
    one(tmp_path, 3, ids=[5, 6, 7, 8, 9], n=n)

    refuse(tmp_path, ANSWER | {"tokens": f"{ITEM}ids"}, "tokens: found|prompt_length: found")


@pytest.mark.parametrize("is_listed", [True, False])
def test_the_message_shows_the_axis_of_the_answer(tmp_path, is_listed):
    one(tmp_path, 3, ids=[5, 6, 7, 8, 9], n=2)
    layout = STATES | {"tokens": f"{ITEM}ids", "prompt_length": f"{ITEM}n"}

    refuse(tmp_path, layout | ({} if is_listed else {"S.padding": "zeros"}), "the axis G instead of S of the states")


def test_states_of_the_answer_need_the_length_of_the_prompt(tmp_path):
    one(tmp_path, 3, ids=[5, 6, 7, 8, 9])
    layout = {"hidden_states": f"{ITEM}hs -> L G D", "tokens": f"{ITEM}ids"}

    refuse(tmp_path, layout, "prompt_length: found None, expected where the axis G begins")


@pytest.mark.parametrize("prompt", [0, 1, 2, 4])
@pytest.mark.parametrize(
    ("field", "values", "unknown"),
    [
        ("token_logprob", [-0.5, -1, -2], np.nan),
        ("token_entropy", np.asarray([1, 2, 3], "f2"), np.nan),
        ("token_label", [0, 1, 1], -1),
        ("generated_mask", [1, 1, 1], 0),
    ],
)
def test_values_of_the_answer_lie_behind_the_prompt(tmp_path, prompt, field, values, unknown):
    one(tmp_path, prompt + 3, values=values, n=prompt)

    trace = convert(tmp_path, STATES | {"prompt_length": f"{ITEM}n", field: f"{ITEM}values -> G"})["a", 0]

    assert np.array_equal(getattr(trace, field), [unknown] * prompt + list(values), equal_nan=True)
    assert trace.prompt_length == prompt


OF_ANSWER = [
    ("token_logprob", -0.5, np.nan),
    ("token_entropy", 0.5, np.nan),
    ("token_label", 1, -1),
    ("generated_mask", 1, 0),
]


@pytest.mark.parametrize(("field", "value", "unknown"), OF_ANSWER)
@pytest.mark.parametrize("has_samples", [True, False])
def test_values_of_the_answer_lie_behind_the_first_of_two_parts(tmp_path, field, value, unknown, has_samples):
    """The two parts give the length of the prompt, also of one that several answers have."""
    name = "{id}_{sample}" if has_samples else "{id}"
    sizes = {("q0", 0): 3, ("q1", 0): 2} | ({("q0", 1): 4} if has_samples else {})
    for (qid, sample), size in sizes.items():
        own = f"{qid}_{sample}" if has_samples else qid
        save(tmp_path / f"in/p/{qid}.npy", states(2, int(qid[1]) * 3, 8))
        save(tmp_path / f"in/a/{own}.npy", states(2, size, 8, seed=size))
        save(tmp_path / f"in/v/{own}.npy", np.full(size, value))
    layout = {"hidden_states": ["p/{id}.npy -> L S D", f"a/{name}.npy -> L S D"], field: f"v/{name}.npy -> G"}

    traces = convert(tmp_path, layout)

    assert traces.keys() == sizes.keys()
    for key, size in sizes.items():
        prompt = int(key[0][1]) * 3
        expected = [unknown] * prompt + [value] * size
        assert np.array_equal(getattr(traces[key], field), expected, equal_nan=True)
        assert traces[key].prompt_length == prompt


@pytest.mark.parametrize("is_padded", [True, False])
@pytest.mark.parametrize("axes", ["G", "S"])
def test_values_of_the_answer_lie_behind_the_first_pass(tmp_path, is_padded, axes):
    mask = np.array([[not is_padded, 1, 1, 1, 1], [1, 1, 1, 1, 1]]).astype(int)
    passes = [states(2, 2, size, 8, seed=k) for k, size in enumerate((3, 1, 1))]
    passes[0][0, :, : is_padded * 1] = 0
    values = np.array([[-1, -2], [-3, -4]], "f4")
    if axes == "S":
        values = np.concatenate([np.full((2, 3), np.nan, "f4"), values], axis=1)
    dump(tmp_path / "in/a.pkl", {"hs": passes, "m": mask, "p": values})
    layout = {"hidden_states": "a.pkl : hs/[P] -> N L S D", "S.mask": "a.pkl : m -> N S"}

    found = list(convert(tmp_path, layout | {"token_logprob": f"a.pkl : p -> N {axes}"}).values())

    assert [trace.prompt_length for trace in found] == [3 - is_padded, 3]
    for trace, own in zip(found, [[-1, -2], [-3, -4]], strict=True):
        assert np.array_equal(trace.token_logprob, [np.nan] * trace.prompt_length + own, equal_nan=True)


def test_values_of_the_answer_behind_passes_that_show_no_prompt(tmp_path):
    passes = [states(1, 2, size, 8, seed=k) for k, size in enumerate((3, 2, 1))]
    dump(tmp_path / "in/a.pkl", {"hs": passes, "p": np.array([[-1.0, -2.0, -3.0]])})
    layout = {"hidden_states": "a.pkl : hs/[P] -> N L S D", "P.new": True, "token_logprob": "a.pkl : p -> N G"}

    refuse(tmp_path, layout, "prompt_length: found None, expected where the axis G begins")


@pytest.mark.parametrize("field", ["tokens", "tokens_decoded", "S.mask"])
def test_a_field_without_a_value_for_unknown(tmp_path, field):
    one(tmp_path, 5, values=["a", "b", "c"] if field == "tokens_decoded" else [1, 1, 1], n=2)

    refuse(tmp_path, STATES | {"prompt_length": f"{ITEM}n", field: f"{ITEM}values -> G"}, "need those of the prompt")


# Entries of `ignore` that leave out nothing, or only a part


@pytest.mark.parametrize("part", ["hs/0", "hs/-1", "hs/{layer}", "hs/[L]", "hs", "ids/0", "ids", "hs/0/1"])
def test_rule_08_ignore_has_no_effect_on_a_line(tmp_path, part):
    layout = STATES | {"tokens": f"{ITEM}ids", "ignore": [f"a.pkl : []/{part}"]}

    with pytest.raises(UsageError, match=r"has no effect on the line for (hidden_states|tokens)"):
        check_effects(plan_of(parse_layout(layout)))


@pytest.mark.parametrize("part", ["more/0", "more/-1", "more/1/2", "more/{layer}"])
def test_rule_08_ignore_leaves_out_no_part_of_an_array(tmp_path, part):
    """[the other parts would be left out without a word]"""
    one(tmp_path, 5, more=states(2, 3))

    refuse(tmp_path, STATES | {"ignore": [f"a.pkl : []/{part}"]}, "ignore leaves out all of it, or nothing")


def test_rule_08_ignore_leaves_out_a_member_beside_one_that_is_read(tmp_path):
    dump(tmp_path / "in/a.pkl", [{"id": "a", "out": (states(2, 3, 8), states(4, 9))}])
    layout = {"hidden_states": f"{ITEM}out/0 -> L S D", "ignore": [f"{ITEM}out/1"]}

    assert convert(tmp_path, layout)["a", 0].num_tokens == 3


@pytest.mark.parametrize("records", ["a.pkl : []", "a.pkl : [id=id]"])
@pytest.mark.parametrize(
    ("field", "value"),
    [("question", "What?"), ("prompt_length", 2), ("tokens", [1, 2, 3, 4]), ("group", "x"), ("temperature", 0.5)],
)
def test_rule_08_ignore_leaves_out_a_key_of_records(tmp_path, records, field, value):
    dump(tmp_path / "in/a.pkl", [{"id": "a", "hidden_states": states(2, 4, 8), field: value}])

    (trace,) = convert(tmp_path, {"records": [records], "ignore": [f"a.pkl : []/{field}"]}).values()

    assert getattr(trace, field) in (None, "")


@pytest.mark.parametrize("states", ["{id}.npy -> L S D", "**/{id}.npy -> L S D"])
def test_an_answer_in_a_file_without_the_names_of_the_prompt(states, tmp_path):
    save(tmp_path / "in/q0.npy", np.ones((2, 3, 8), "f4"))
    table(tmp_path / "in/t.csv", [{"id": "q0", "hs": "x"}])

    refuse(tmp_path, {"hidden_states": [states, "t.csv : [id=id]/hs"]}, "no file t.csv belongs to it")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"tokens": [f"{ITEM}ids", f"{ITEM}hs -> L S D"]}, r"tokens: found parts of the shapes \(3,\) and \(2, 3, 8\)"),
        ({"question": f"{ITEM}n/x"}, r"\[id=id\]/n/x: found int '2', expected keys or items$"),
        ({"question": f"{ITEM}hs/x"}, r"/hs/x: found an array .*, expected keys \(the axes of an array follow ->\)$"),
        ({"question": "a.pkl : */n"}, "expected keys "),
        ({"is_correct": "a.pkl : {sample}/n"}, "a line for sample states what tells the answers"),
        ({"hidden_states": f"{ITEM}n -> N L S D"}, "found no value with the axis N, expected one number of N"),
        ({"question": f"{ITEM}@x", "group": "b.json : *"}, "found two values that no name or \\[\\] tells apart"),
    ],
)
def test_messages_say_what_was_expected(line, words, tmp_path):
    dump(tmp_path / "in/a.pkl", [{"id": "q0", "hs": states(2, 3, 8), "ids": [4, 5, 6], "n": 2}])
    table(tmp_path / "in/b.json", {"x": "one", "y": "two"})
    ignore = [f"{ITEM}ids", f"{ITEM}n", *["b.json"] * ("group" not in line)]
    ignore = [e for e in [*ignore, f"{ITEM}hs"] if e.rpartition("/")[2] not in str(STATES | line)]

    with pytest.raises(TracestoreError, match=words):
        convert(tmp_path, STATES | line | {"ignore": ignore})


# Ids in front without states, and tokens that are marked as the prompt


@pytest.mark.parametrize("num_skipped", [1, 2])
@pytest.mark.parametrize("has_last", [True, False])
def test_ids_in_front_whose_states_were_left_out(tmp_path, num_skipped, has_last):
    """The ids and the texts have tokens that no state has [every id is moved by one]."""
    count = 5 + num_skipped + has_last
    one(tmp_path, ids=list(range(count)), toks=list("abcdefgh"[:count]), n=num_skipped + 2)
    lines = {"tokens": f"{ITEM}ids -> T", "tokens_decoded": f"{ITEM}toks -> T", "prompt_length": f"{ITEM}n"}
    refuse(tmp_path, STATES | {"tokens": f"{ITEM}ids"}, "with T.skip = 1 the first one" if count == 6 else "tokens")
    refuse(tmp_path, STATES | lines | {"T.skip": num_skipped + 3}, "prompt_length: found|tokens: found")

    trace = convert(tmp_path, STATES | lines | {"T.skip": num_skipped})["a", 0]

    assert trace.tokens.tolist() == list(range(num_skipped, count))
    assert trace.tokens_decoded == list("abcdefgh"[num_skipped:count])
    assert trace.prompt_length == 2


def test_skipped_ids_need_a_line_for_more_ids_than_states(tmp_path):
    one(tmp_path, ids=list(range(5)))
    with pytest.raises(
        UsageError, match=r"T\.skip: has no effect without a positive number, and a line with the axis T"
    ):
        convert(tmp_path, STATES | {"tokens": f"{ITEM}ids", "T.skip": 1})
    refuse(tmp_path, STATES | {"tokens": f"{ITEM}ids -> T", "T.skip": 1}, "found 4 ids, expected 5 or 6")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ({"T.skip": -1}, "without a positive number"),
        ({"T.skip": 0}, "without a positive number"),
        ({"T.skip": 1, "answer_span": "a.pkl : []/span"}, "answer_span: found next to T.skip"),
        ({"T.skip": 1}, r"tokens: found \[2\] and \[1\] where T.skip leaves out one text"),
        ({"T.skip": 1, "S.prompt_mask": "a.pkl : []/m"}, "S.prompt_mask: found int64 of the shape"),
    ],
)
def test_skipped_ids_that_are_refused(tmp_path, lines, message):
    used = {"span", "m"} & {str(line).rpartition("/")[2] for line in lines.values()}
    values = {"span": [3, 5], "m": [1, 1, 1, 0, 0, 0]}
    own = {name: values[name] for name in used}
    rows = [{"hs": states(2, 5, 8, seed=k), "ids": [1 if own else k + 1, *range(5)], **own} for k in range(2)]
    dump(tmp_path / "in/a.pkl", rows)
    with pytest.raises(TracestoreError, match=message):
        convert(tmp_path, {"hidden_states": "a.pkl : []/hs -> L S D", "tokens": "a.pkl : []/ids -> T"} | lines)


@pytest.mark.parametrize("side", ["left", "right"])
def test_skipped_ids_of_padded_rows(tmp_path, side):
    """The masks have the skipped column, too; behind padding no id is skipped [a first token that one row keeps]."""
    ids = np.array([[1, 3, 4, 5, 6, 7], [0, 0, 1, 8, 9, 10] if side == "left" else [1, 8, 9, 10, 0, 0]])
    arrays = {"hs": states(2, 2, 5, 8) * (ids != 0)[:, None, 1:, None], "ids": ids, "m": ids != 0}
    arrays["p"] = np.array([[1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0] if side == "left" else [1, 1, 0, 0, 0, 0]])
    dump(tmp_path / "in/a.pkl", arrays)
    layout = {"hidden_states": "a.pkl : hs -> N L S D", "tokens": "a.pkl : ids -> N T", "T.skip": 1}
    layout |= {"S.mask": "a.pkl : m -> N T", "S.prompt_mask": "a.pkl : p -> N T"}
    if side == "left":
        refuse(tmp_path, layout, "T.skip leaves out")
        return
    found = convert(tmp_path, layout).values()
    assert [(trace.tokens.tolist(), trace.prompt_length) for trace in found] == [([3, 4, 5, 6, 7], 2), ([8, 9, 10], 1)]


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ([1, 1, 0, 0, 0], 2),
        ([1, 1, 0, 0, 0, 0], "expected 0 or 1 for each of 5 tokens"),
        ([True, True, True, True, True], 5),
        ([0, 0, 0, 0, 0], 0),
        ([0, 0, 1, 1, 1], "found 1 behind 0"),
        ([1, 0, 1, 0, 0], "found 1 behind 0"),
        ([1, 1, 0, 0], "expected 0 or 1 for each of 5 tokens"),
        ([1, 2, 0, 0, 0], "expected 0 or 1 for each of 5 tokens"),
        (None, "the trace has no value where the layout says"),
    ],
)
def test_tokens_that_are_marked_as_the_prompt(tmp_path, flags, found):
    """A flag for each token marks the prompt [a loss mask, which marks the answer]."""
    one(tmp_path, ids=list(range(5)), m=flags, n=3)
    layout = STATES | {"tokens": f"{ITEM}ids", "S.prompt_mask": f"{ITEM}m"}
    if isinstance(found, str):
        refuse(tmp_path, layout, f"S.prompt_mask: .*{found}")
        return
    assert convert(tmp_path, layout)["a", 0].prompt_length == found
    refuse(tmp_path, layout | {"prompt_length": f"{ITEM}n"}, f"prompt_length: found 3, expected {found} as marked")


def test_marked_tokens_of_padded_rows(tmp_path):
    mask = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    arrays = {
        "hs": states(2, 2, 5, 8) * mask[:, None, :, None],
        "m": mask,
        "p": mask * [[1, 1, 1, 1, 0], [1, 0, 0, 0, 0]],
    }
    dump(tmp_path / "in/a.pkl", arrays)
    lines = {"S.mask": "a.pkl : m -> N S", "S.prompt_mask": "a.pkl : p -> N S"}

    traces = convert(tmp_path, {"hidden_states": "a.pkl : hs -> N L S D"} | lines)

    assert [(trace.num_tokens, trace.prompt_length) for trace in traces.values()] == [(3, 2), (4, 1)]


def test_marked_tokens_in_rows_of_tokens(tmp_path):
    rows = [{"id": q, "pos": k, "m": k < 2 + (q == "b"), "h": [1.0 + k, 2]} for q in "ab" for k in (2, 0, 1, 3)]
    dump(tmp_path / "in/a.pkl", rows)
    row = "a.pkl : [id=id, token=pos]/"

    found = convert(tmp_path, {"hidden_states": f"{row}h -> D", "S.prompt_mask": f"{row}m"})

    assert [trace.prompt_length for trace in found.values()] == [2, 3]


@pytest.mark.parametrize(
    ("flags", "is_refused"), [([0, 0, 1, 1, 1], False), ([1, 1, 0, 0, 0], True), ([1, 1, 1, 1, 1], False)]
)
def test_a_mask_of_the_prompt_is_no_mask_of_generated_tokens(tmp_path, flags, is_refused):
    one(tmp_path, m=flags)
    layout = STATES | {"generated_mask": f"{ITEM}m"}
    if is_refused:
        refuse(tmp_path, layout, "generated_mask: found the first token as generated and the last one as not")
    else:
        assert convert(tmp_path, layout)["a", 0].generated_mask.tolist() == flags


@pytest.mark.parametrize(
    ("flags", "prompt", "is_refused"),
    [
        ([0, 0, 1, 1, 1], 2, False),
        ([0, 1, 0, 1, 1], 3, False),
        ([0, 1, 0, 1, 1], 1, False),
        ([0, 0, 0, 0, 0], 2, False),
        ([0, 0, 1, 1, 1], 1, True),
        ([0, 0, 1, 1, 1], 3, True),
        ([0, 0, 1, 1, 1], 0, True),
        ([1, 1, 1, 1, 1], 2, True),
    ],
)
def test_an_answer_of_the_mask_begins_at_prompt_length(tmp_path, flags, prompt, is_refused):
    """It may be any turn; a mask that is shifted by one, or marks the prompt too, is refused."""
    one(tmp_path, m=flags, n=prompt)
    layout = STATES | {"generated_mask": f"{ITEM}m", "prompt_length": f"{ITEM}n"}
    if is_refused:
        refuse(tmp_path, layout, rf"generated_mask: found the first generated token at \d, expected {prompt}")
    else:
        assert convert(tmp_path, layout)["a", 0].prompt_length == prompt


def test_sparse_attention_is_made_dense_when_it_is_read(tmp_path, monkeypatch):
    """A look at a matrix, for an address or a count, makes no dense one, and neither does a store without attention."""
    sparse = pytest.importorskip("scipy.sparse")
    weights = [sparse.csr_matrix(np.eye(4, k=-1, dtype="f4") / 2 + np.diag([1, 0.5, 0.5, 0.5]).astype("f4"))] * 2
    ids = {f"q{k}": {"hs": states(2, 4, 8, seed=k), "at": weights, "label": k % 2} for k in range(5)}
    dump(tmp_path / "in/a.pkl", ids)
    made, resolve = [], PickledSparse.resolve
    monkeypatch.setattr(PickledSparse, "resolve", lambda self: made.append(self) or resolve(self))
    layout = {"hidden_states": f"{ITEM}hs -> L S D", "attentions": f"{ITEM}at -> L S S", "label": f"{ITEM}label"}
    layout = {name: line.replace("[id=id]", "{id}") for name, line in layout.items()}

    tracestore.convert_files(tmp_path / "in", tmp_path / "none.zarr", layout=layout, attention="none")
    assert not made
    assert len(convert(tmp_path, layout, attention="mean")) == 5
    assert len(made) == 10
