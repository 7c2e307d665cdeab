"""Test entries of layouts that had no effect, and what layouts could not state: each is stored as meant, or refused."""

import gzip
import json
import pickle
import zipfile

import numpy as np
import pytest

import tracestore
from tests.helpers import command
from tests.ingest.execute.folders import convert, dump, refuse, save, states, table
from tracestore.errors import InvalidInputError, UsageError
from tracestore.ingest.layout.effects import check_effects
from tracestore.ingest.layout.fields import FIELDS
from tracestore.ingest.layout.language import parse_layout
from tracestore.ingest.layout.places import plan_of

ROWS = {"hidden_states": "a.pkl : []/hs -> L S D", "question_id": "a.pkl : []/id"}
MADE = ("question_id", "sample", "question", "is_correct", "prompt_length", "correctness.f1")
OF_RANGES = ("S.offsets", "S.starts", "S.ends", "S.owner")


def rows(count=4, ids="aabb"):
    """Return records with the states (L 2, S 3, D 8) of answers."""
    return [{"id": ids[k], "hs": states(2, 3, 8, seed=k), "text": f"answer {k}"} for k in range(count)]


def numbered(tmp_path, ids=("a", "b", "a", "a"), names="0123"):
    """Write states under arr_N, and a table of answers whose rows have no number of their own."""
    dump(tmp_path / "in/h.pkl", {f"arr_{n}": states(2, 3, 8, seed=int(n)) for n in names})
    table(tmp_path / "in/t.csv", [{"qid": qid, "text": f"answer {k}", "y": k % 2} for k, qid in enumerate(ids)])


# Entries without effect


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"S.side": "left"}, "S.side: has no effect without S.lengths"),
        ({"S.side": "left", "S.lengths": "a.pkl : []/n", "hidden_states": "a.pkl : hs -> (N S) L D"}, "S.side: has no"),
        ({"S.pad": 2}, "S.pad: has no effect without tokens"),
        ({"S.padding": "nan", "hidden_states": "a.pkl : hs -> (N S) L D"}, "S.padding: has no effect"),
        ({"P.repeats": True}, "P.repeats: has no effect without passes"),
        ({"P.new": True}, "P.new: has no effect"),
        ({"words.pass": True}, "words.pass: has no effect without a label"),
        ({"share.is_correct": ["sample"]}, "share.is_correct: has no effect"),
        ({"dtype.last_token": "bfloat16"}, "dtype.last_token: has no effect"),
        ({"scale.last_token": 0.5}, "scale.last_token: has no effect"),
        *(
            (
                {"hidden_states": None, "last_token": "a.pkl : h -> N L D", name: f"a.pkl : m -> {axes}"},
                f"{name}: has no",
            )
            for name, axes in (("S.mask", "N S"), ("S.padding_mask", "N S"), ("S.lengths", "N"))
        ),
        ({"S.prompt": "columns"}, "S.prompt: has no effect without a line for prompt_length"),
        (
            {"sample": "#", "hidden_states": "*.pkl : {id} -> L S D"},
            "sample: has no effect without a line for question_id",
        ),
        *(({name: "a.pkl : []/n"}, f"{name}: has no effect without states behind each other") for name in OF_RANGES),
        *(
            ({"hidden_states": [], "last_token": "a.pkl : []/h -> L D", name: "a.pkl : []/n"}, f"{name}: has no effect")
            for name, rule in FIELDS.items()
            if name[:2] in ("S.", "P.") or ("S" in rule.axes and "K" not in rule.axes and name != "hidden_states")
        ),
        ({"P.rows": "a.pkl : []/n"}, "P.rows: has no effect without passes"),
        *(({name: "={n}"}, f"{name}: ={{n}}: nothing binds n: hidden_states binds N") for name in MADE),
        ({"tokens": ["={n}", "a.pkl : []/ids"]}, "tokens: ={n}: nothing binds n"),
        ({"question": "t.csv : [N=#, K=#]/q"}, "K joins nothing"),
        ({"question": "t.csv : [N=#, split=split]/q"}, "split joins nothing"),
        ({"question": "{split}.csv : [N=#]/q"}, r"split joins nothing.* write \* in a name"),
    ],
)
def test_rule_08_a_setting_or_a_name_without_effect(entries, words):
    lines = {"hidden_states": "a.pkl : []/hs -> L S D"} | entries
    plan = plan_of(parse_layout({name: line for name, line in lines.items() if line not in ([], None)}))

    with pytest.raises(UsageError, match=words):
        check_effects(plan)


def test_rule_08_an_id_that_joins_nothing_shows_the_line_that_takes_it(tmp_path):
    """[ids made of file and position]"""
    numbered(tmp_path)
    layout = {"hidden_states": "h.pkl : arr_{n} -> L S D", "generated_answer": "t.csv : [id=qid, n=#]/text"}

    with pytest.raises(UsageError, match=r'question_id = "t.csv : \[n=#\]/qid" gives the id'):
        tracestore.convert_files(tmp_path / "in", tmp_path / "s.zarr", layout=layout)


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("question", "a.pkl : []/missing"),
        ("ignore", "a.pkl : []/missing"),
        ("ignore", "missing*.pkl"),
        ("sample", "a.pkl : []/#"),
    ],
)
def test_rule_08_a_line_at_whose_path_nothing_is(tmp_path, name, address):
    dump(tmp_path / "in/a.pkl", rows(ids="abcd"))

    refuse(tmp_path, ROWS | {name: address}, "hold no such value|no file is left out")


def test_rule_08_entries_with_effect_stay(tmp_path):
    dump(tmp_path / "in/a.pkl", rows(ids="abcd"))
    dump(tmp_path / "in/b.pkl", [1.5])

    assert len(convert(tmp_path, ROWS | {"ignore": ["b.pkl", "a.pkl : []/text"]})) == 4


# Layers and embeddings


@pytest.mark.parametrize("entries", [{"L.size": 3}, {"L.ids": [0, 1, 2]}])
def test_rule_01_stated_layers_with_the_embeddings_and_attention_without(tmp_path, entries):
    attention = np.tril(np.full((2, 1, 3, 3), 1, "f4"))
    dump(tmp_path / "in/a.pkl", [{"hs": states(3, 3, 8), "at": attention / attention.sum(-1, keepdims=True)}])
    layout = {"hidden_states": "a.pkl : []/hs -> L S D", "attentions": "a.pkl : []/at -> L H S S"}
    refuse(tmp_path, layout | entries, "the embeddings, would be left out")

    traces = convert(tmp_path, {"hidden_states": layout["hidden_states"], "ignore": "a.pkl : []/at"} | entries)

    assert len(next(iter(traces.values())).hidden_states) == 3


@pytest.mark.parametrize("size", [1, 3, 4])
def test_rule_01_another_number_of_layers_than_stated(tmp_path, size):
    dump(tmp_path / "in/a.pkl", rows(ids="abcd"))

    refuse(tmp_path, ROWS | {"L.size": size}, f"found 2 layers, expected {size}")


def test_rule_01_a_layer_beyond_the_stated_number(tmp_path):
    for k in (0, 4):
        save(tmp_path / f"in/a_{k}.npy", states(4, 8, seed=k))

    refuse(tmp_path, {"hidden_states": "{id}_{layer}.npy -> S D", "L.size": 4}, "found the layer 4, expected fewer")


# Prompts of padded stacks


def padded(tmp_path, lengths=(4, 2, 3), prompts=(3, 3, 3)):
    """Write a stack (N, L, S, D) that is padded on the left."""
    size = max(lengths)
    mask = np.array([[k >= size - n for k in range(size)] for n in lengths])
    hidden = states(len(lengths), 2, size, 8) * mask[:, None, :, None]
    dump(tmp_path / "in/a.pkl", {"hs": hidden, "m": mask, "p": list(prompts), "id": list("abc")[: len(lengths)]})
    return {
        "hidden_states": "a.pkl : hs -> N L S D",
        "S.mask": "a.pkl : m -> N S",
        "prompt_length": "a.pkl : p -> N",
        "question_id": "a.pkl : id -> N",
    }


def lengths_of(traces):
    """Return the lengths of the prompts, by the ids."""
    return [traces[key].prompt_length for key in sorted(traces)]


WAYS = {
    "a column": ("a.pkl : p -> N", {}),
    "a table": ("t.csv : [id=id]/n", {"ignore": "a.pkl : p"}),
    "a number": ("={n}", {"ignore": "a.pkl : p"}),
    "a first token and a column": (["=1", "a.pkl : less -> N"], {"ignore": "a.pkl : p"}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("counted", [None, "tokens", "columns"])
@pytest.mark.parametrize(("length", "columns"), [(2, [0, 2, 1]), (3, [1, 3, 2])])
def test_rule_17_a_prompt_length_is_stated_in_several_ways(tmp_path, way, counted, length, columns):
    """[a number of the layout as the columns of each row]"""
    lengths = (6, 8, 7)
    line, entries = WAYS[way]
    layout = padded(tmp_path, lengths, (length,) * 3) | entries
    file = pickle.loads((tmp_path / "in/a.pkl").read_bytes())
    if way == "a first token and a column":
        dump(tmp_path / "in/a.pkl", file | {"less": [length - 1] * 3})
    if way == "a table":
        table(tmp_path / "in/t.csv", [{"id": name, "n": length} for name in "abc"])
    layout["prompt_length"] = line.format(n=length) if type(line) is str else line
    layout |= {} if counted is None else {"S.prompt": counted}
    if counted is None and length > 2:
        refuse(tmp_path, layout, "prompt_length: found 3 also where 2 tokens of padding are before the prompt")
        return

    assert lengths_of(convert(tmp_path, layout)) == (columns if counted == "columns" else [length] * 3)


@pytest.mark.parametrize("counted", [None, "tokens", "columns"])
@pytest.mark.parametrize(("length", "columns"), [(2, [0, 2, 1]), (3, [1, 3, 2])])
def test_rule_17_names_give_the_length_of_a_prompt(tmp_path, counted, length, columns):
    for k, begin in enumerate((2, 0, 1)):
        mask = (np.arange(8) >= begin).astype(int)
        value = {"hs": states(2, 8, 8, seed=k) * mask[:, None], "m": mask}
        dump(tmp_path / f"in/q{k}_p{length}.pkl", value)
    layout = {"hidden_states": "{id}_p{n:d}.pkl : hs -> L S D", "S.mask": "{id}_p{n:d}.pkl : m -> S"}
    layout |= {"prompt_length": "={n}"} | ({} if counted is None else {"S.prompt": counted})
    if counted is None:
        refuse(tmp_path, layout, f"prompt_length: found {length} also where 1 tokens|found 3 also where 2 tokens")
        return

    assert lengths_of(convert(tmp_path, layout)) == (columns if counted == "columns" else [length] * 3)


@pytest.mark.parametrize("prompts", [(3, 3, 3), (3, 3, None), (None, 3, 3)])
def test_rule_17_one_prompt_length_of_rows_padded_in_front(tmp_path, prompts):
    """[the width of the padded prompts as the length of each; a row without a length]"""
    refuse(tmp_path, padded(tmp_path, (4, 3, 3), prompts), "found 3 also where 1 tokens of padding")


def test_rule_17_columns_of_the_prompt_count_the_padding(tmp_path):
    assert lengths_of(convert(tmp_path, padded(tmp_path) | {"S.prompt": "columns"})) == [3, 1, 2]


def test_rule_17_tokens_of_the_prompt_do_not(tmp_path):
    layout = padded(tmp_path, lengths=(4, 3, 3), prompts=(2, 2, 2))

    assert lengths_of(convert(tmp_path, layout | {"S.prompt": "tokens"})) == [2, 2, 2]


def test_rule_17_lengths_that_differ_are_those_of_tokens(tmp_path):
    assert lengths_of(convert(tmp_path, padded(tmp_path, prompts=(3, 1, 2)))) == [3, 1, 2]


@pytest.mark.parametrize("prompts", [(1, 1, 1), (6, 6, 6)])
def test_rule_17_columns_outside_the_tokens(tmp_path, prompts):
    layout = padded(tmp_path, lengths=(4, 2, 2), prompts=prompts)

    refuse(tmp_path, layout | {"S.prompt": "columns"}, "prompt_length: found")


@pytest.mark.parametrize("stated", [None, [None, None], [None, 3], [2, 3]])
def test_rule_05b_the_columns_of_a_first_pass_are_no_stated_length(tmp_path, stated):
    """[padding in the prompt of a row without a length]"""
    mask = np.array([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    passes = [states(2, 2, size, 8, seed=k) for k, size in enumerate((3, 1, 1))]
    passes[0][0, :, :1] = 0
    dump(tmp_path / "in/a.pkl", {"hs": passes, "m": mask} | ({} if stated is None else {"n": stated}))
    layout = {"hidden_states": "a.pkl : hs/[P] -> N L S D", "S.mask": "a.pkl : m -> N S"}
    layout |= {} if stated is None else {"prompt_length": "a.pkl : n -> N"}

    assert lengths_of(convert(tmp_path, layout)) == [2, 3]


@pytest.mark.parametrize("span", [(3, 6), (4, 8), (0, 2), (2, 6)])
@pytest.mark.parametrize("counted", [None, "tokens", "columns"])
@pytest.mark.parametrize("begin", [0, 2])
def test_rule_17_positions_of_an_answer_behind_padding(tmp_path, span, counted, begin):
    """[the columns of an answer as its tokens]"""
    mask = (np.arange(8) >= begin).astype(int)
    row = {"id": "a", "hs": states(2, 8, 8) * mask[:, None], "m": mask, "answer": span}
    dump(tmp_path / "in/a.pkl", [row])
    layout = ROWS | {"S.mask": "a.pkl : []/m -> S", "answer_span": "a.pkl : []/answer"}
    layout |= {} if counted is None else {"S.prompt": counted}
    if begin and (counted != "tokens" or span[1] > 6):
        refuse(tmp_path, layout, "answer_span: found")
        return

    assert convert(tmp_path, layout)["a", 0].answer_span == span


# Each batch: the tokens of its rows, their width, and the length of its prompts; the lengths of the tokens of prompts.
BATCHES = {
    "two widths": ([((5, 7), 7, 4), ((6, 8), 8, 5)], [2, 4, 3, 5]),
    "one width": ([((6, 8), 8, 4), ((6, 8), 8, 5)], [2, 4, 3, 5]),
    "a batch without padding": ([((7, 7), 7, 4), ((6, 8), 8, 5)], [4, 4, 3, 5]),
    "all rows are padded": ([((5, 6), 7, 4), ((6, 7), 8, 5)], [2, 3, 3, 4]),
    "one row each": ([((5,), 7, 4), ((8,), 8, 5)], [2, 5]),
}


@pytest.mark.parametrize("case", BATCHES)
@pytest.mark.parametrize("counted", [None, "tokens", "columns"])
def test_rule_17_prompt_lengths_of_several_batches(tmp_path, case, counted):
    """[the columns of the prompts of each batch as tokens]"""
    batches, columns = BATCHES[case]
    rows = []
    for counts, size, length in batches:
        for n in counts:
            mask = (np.arange(size) >= size - n).astype(int)
            hidden = states(2, size, 8, seed=len(rows)) * mask[:, None]
            rows.append({"id": f"q{len(rows)}", "hs": hidden, "m": mask, "n": length})
    dump(tmp_path / "in/a.pkl", rows)
    layout = ROWS | {"S.mask": "a.pkl : []/m -> S", "prompt_length": "a.pkl : []/n"}
    layout |= {} if counted is None else {"S.prompt": counted}
    if counted is None:
        refuse(tmp_path, layout, "prompt_length: found [45] also where [12] tokens of padding are before the prompt")
        return

    stated = [length for counts, _, length in batches for _ in counts]
    assert lengths_of(convert(tmp_path, layout)) == (columns if counted == "columns" else stated)


# Chunks


def chunked(tmp_path, sizes, firsts, count=None):
    """Write last tokens of two layers in chunks, and a table of labels in order."""
    for first, size in zip(firsts, sizes, strict=True):
        for layer in range(2):
            save(tmp_path / f"in/layer_{layer}_{first}.npy", states(size, 8, seed=10 * first + layer))
    count = sum(sizes) if count is None else count
    table(tmp_path / "in/t.csv", [{"q": f"statement {k}", "y": k % 2} for k in range(count)])
    return {"last_token": "layer_{layer}_{chunk}.npy -> N D", "question": "t.csv : []/q", "is_correct": "t.csv : []/y"}


@pytest.mark.parametrize("firsts", [(0, 4, 8), (0, 1, 2)])
def test_rule_13_chunks_are_numbered_or_by_their_first_row(tmp_path, firsts):
    layout = chunked(tmp_path, (4, 4, 2), firsts)

    traces = convert(tmp_path, layout)

    expected = states(2, 8, seed=10 * firsts[2])[1]
    last = next(trace for trace in traces.values() if trace.question == "statement 9")
    assert np.array_equal(np.asarray(last.last_token)[0], expected.astype("f2"))
    assert last.scores["is_correct"] == 1


@pytest.mark.parametrize(
    ("sizes", "firsts", "count"),
    [((4, 2), (0, 8), 6), ((4, 4), (4, 8), 8), ((4, 4), (0, 5), 8), ((4, 4), (0, 4), 9), ((4, 4), (0, 2), 8)],
)
def test_rule_13_chunks_that_do_not_adjoin(tmp_path, sizes, firsts, count):
    """[a lost chunk]"""
    refuse(tmp_path, chunked(tmp_path, sizes, firsts, count), "found chunk|rows belong to")


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((0, 1, 3), "b3.npy: found chunk 3, expected 2: .*, here 4"),
        ((0, 2, 3), "b3.npy: found chunk 3, expected 2: .*, here 4"),
        ((0, 2, 5), "b5.npy: found chunk 5, expected 2: .*, here 4"),
        ((1, 2, 3), "b1.npy: found chunk 1, expected 0: .*, here 0"),
    ],
)
def test_rule_13_the_first_chunk_that_no_numbering_explains(tmp_path, numbers, words):
    for number in numbers:
        save(tmp_path / f"in/b{number}.npy", states(2, 3, 8, seed=number))
    refuse(tmp_path, {"last_token": "b{chunk}.npy -> N L D"}, words)


# Words


@pytest.mark.parametrize(("value", "word"), [("REFUSED", "REFUSED"), ("-1", "-1"), (-1, "-1"), (2.0, "2"), ("C", "C")])
def test_rule_22a_words_and_numbers_that_are_no_label(tmp_path, value, word):
    records = [record | {"y": y} for record, y in zip(rows(ids="abcd"), ("correct", 0, value, "yes"), strict=True)]
    dump(tmp_path / "in/a.pkl", records)
    layout = ROWS | {"is_correct": "a.pkl : []/y"}
    lines = " or ".join(f'words."{word}" = {meaning}' for meaning in ("true", "false", '"missing"'))
    refuse(tmp_path, layout, lines)

    traces = convert(tmp_path, layout | {f"words.{word}": "missing"})

    assert [traces[name, 0].scores.get("is_correct") for name in ("a", "b", "d")] == [1, 0, 1]
    assert np.isnan(traces["c", 0].scores.get("is_correct", np.nan))


@pytest.mark.parametrize("value", [1, 1.0, "1", "1.0", "1.00"])
@pytest.mark.parametrize("word", ["1", "1.0", "1.000"])
def test_rule_22a_a_number_is_a_word_however_it_is_written(tmp_path, value, word):
    """[a percentage of 1.0 counts as correct]"""
    dump(
        tmp_path / "in/a.pkl", [record | {"y": y} for record, y in zip(rows(ids="abcd"), (value, 0, 0, 0), strict=True)]
    )

    traces = convert(tmp_path, ROWS | {"is_correct": "a.pkl : []/y", f"words.{word}": False})

    assert [traces[name, 0].scores["is_correct"] for name in "abcd"] == [0, 0, 0, 0]


@pytest.mark.parametrize("form", [int, float, str])
@pytest.mark.parametrize(
    ("values", "words", "expected"),
    [
        ((0, 1, 2, 1), {"2": True}, None),
        ((0, 1, 2, 1), {"2": True, "0": False}, None),
        ((0, 1, 2, 1), {"2": True, "1": False, "0": False}, [0, 0, 1, 0]),
        ((1, 2, 1, 2), {"2": False}, None),
        ((1, -1, 1, -1), {"-1": False}, None),
        ((1, -1, 1, -1), {"-1": False, "1": True}, [1, 0, 1, 0]),
        ((0, 1, 9, 1), {"9": "missing"}, [0, 1, None, 1]),
        ((0, 1, 0, 1), {"0.5": False, "pass": True}, [0, 1, 0, 1]),
    ],
)
def test_rule_22a_numbers_next_to_one_that_a_line_states(tmp_path, form, values, words, expected):
    """0 is wrong, 1 in part and 2 correct [answers that are correct in part]."""
    records = [record | {"y": form(y)} for record, y in zip(rows(ids="abcd"), values, strict=True)]
    dump(tmp_path / "in/a.pkl", records)
    layout = ROWS | {"is_correct": "a.pkl : []/y"} | {f"words.{word}": truth for word, truth in words.items()}
    if expected is None:
        refuse(tmp_path, layout, "expected a line for each number")
        return

    traces = convert(tmp_path, layout)

    assert [traces[name, 0].scores.get("is_correct") for name in "abcd"] == expected


@pytest.mark.parametrize("words", [("true", "false"), ("True", "False"), ("TRUE", "FALSE"), ("1", "0")])
@pytest.mark.parametrize("values", [(True, False), (np.True_, np.False_), ("True", "False"), ("true", "false")])
def test_rule_22a_a_truth_value_is_a_word_however_it_is_written(tmp_path, words, values):
    """True is a wrong answer in the column [labels that are exchanged]."""
    if words == ("1", "0") and isinstance(values[0], str):
        pytest.skip("texts are no numbers")
    dump(tmp_path / "in/a.pkl", [record | {"y": y} for record, y in zip(rows(ids="abcd"), values * 2, strict=True)])
    words = {f"words.{words[0]}": False, f"words.{words[1]}": True}

    traces = convert(tmp_path, ROWS | {"is_correct": "a.pkl : []/y"} | words)

    assert [traces[name, 0].scores["is_correct"] for name in "abcd"] == [0, 1, 0, 1]


@pytest.mark.parametrize("value", ["none", "MISSING", 1, ["missing"]])
def test_rule_22a_other_meanings_of_words(value):
    with pytest.raises(UsageError, match=r"words\.x: found"):
        parse_layout(ROWS | {"is_correct": "a.pkl : []/y", "words.x": value})


# Joins over what other lines bind


def answers(tmp_path, texts):
    """Write two questions of three answers, and their texts by question."""
    dump(tmp_path / "in/a.pkl", {"h": states(2, 3, 2, 8), "ids": ["a", "b"]})
    table(tmp_path / "in/t.json", [{"qid": qid, "answers": found} for qid, found in texts.items()])
    return {
        "last_token": "a.pkl : h -> N K L D",
        "question_id": "a.pkl : ids -> N",
        "generated_answer": "t.json : [id=qid]/answers/[K]",
    }


def test_rule_12_lists_of_answers_join_by_id_and_number(tmp_path):
    texts = {"b": ["b0", "b1", "b2"], "a": ["a0", "a1", "a2"]}

    traces = convert(tmp_path, answers(tmp_path, texts))

    assert {key: trace.answer for key, trace in traces.items()} == {
        (qid, k): f"{qid}{k}" for qid in "ab" for k in range(3)
    }


def test_rule_12_answers_of_another_number(tmp_path):
    refuse(tmp_path, answers(tmp_path, {"b": ["b0", "b1", "b2", "b3"], "a": ["a0", "a1", "a2"]}), "generated_answer")


# Numbers of answers


def test_rule_10_answers_are_counted_in_the_order_of_rows(tmp_path):
    dump(tmp_path / "in/a.pkl", rows(ids="abab"))
    layout = ROWS | {"generated_answer": "a.pkl : []/text"}
    refuse(tmp_path, layout, 'sample = "#" numbers the answers')

    traces = convert(tmp_path, layout | {"sample": "#"})

    found = {key: trace.answer for key, trace in traces.items()}
    assert found == {("a", 0): "answer 0", ("b", 0): "answer 1", ("a", 1): "answer 2", ("b", 1): "answer 3"}


def test_rule_10_answers_are_counted_in_the_rows_of_the_ids(tmp_path):
    """The keys of the states are in another order."""
    numbered(tmp_path, names="3201")
    layout = {
        "hidden_states": "h.pkl : arr_{n} -> L S D",
        "question_id": "t.csv : [n=#]/qid",
        "generated_answer": "t.csv : [n=#]/text",
        "is_correct": "t.csv : [n=#]/y",
        "sample": "#",
    }

    traces = convert(tmp_path, layout)

    found = {key: trace.answer for key, trace in traces.items()}
    assert found == {("a", 0): "answer 0", ("b", 0): "answer 1", ("a", 1): "answer 2", ("a", 2): "answer 3"}
    assert np.array_equal(np.asarray(traces["a", 2].hidden_states)[0], states(2, 3, 8, seed=3)[0].astype("f2"))


def test_rule_10_rows_count_within_equal_ids(tmp_path):
    dump(tmp_path / "in/a.pkl", rows(ids="abab"))
    layout = {
        "hidden_states": "a.pkl : [id=id, sample=#]/hs -> L S D",
        "generated_answer": "a.pkl : [id=id, sample=#]/text",
    }

    traces = convert(tmp_path, layout)

    found = {key: trace.answer for key, trace in traces.items()}
    assert found == {("a", 0): "answer 0", ("b", 0): "answer 1", ("a", 1): "answer 2", ("b", 1): "answer 3"}


def test_rule_10_answers_to_the_question_of_a_name(tmp_path):
    dump(tmp_path / "in/q.pkl", np.stack([states(2, 3, 8, seed=k) for k in range(2)]))
    refuse(tmp_path, {"hidden_states": "{id}.pkl -> N L S D"}, "occurs twice: K instead of N")

    traces = convert(tmp_path, {"hidden_states": "{id}.pkl -> K L S D"})

    assert traces.keys() == {("q", 0), ("q", 1)}


def test_rule_10_answers_of_keys_without_order_are_not_counted(tmp_path):
    dump(tmp_path / "in/a.pkl", {f"k{k}": {"hs": states(2, 3, 8, seed=k), "id": "a"} for k in range(3)})
    layout = {"hidden_states": "a.pkl : {n}/hs -> L S D", "question_id": "a.pkl : {n}/id", "sample": "#"}

    refuse(tmp_path, layout, "has no rows in order")


@pytest.mark.parametrize("value", ["=#x", "3", 3])
def test_rule_10_another_number_of_answers(tmp_path, value):
    dump(tmp_path / "in/a.pkl", rows(ids="abab"))

    with pytest.raises((UsageError, tracestore.errors.InvalidInputError)):
        convert(tmp_path, ROWS | {"sample": value})


# Copies


def ranked(tmp_path, change=0.0):
    """Write two ranks of a sampler that repeats the first question, and a table of labels."""
    last = [states(2, 8, seed=k) for k in range(5)]
    for rank, found in enumerate(([0, 2, 4], [1, 3, 0])):
        hidden = np.stack([last[k] + change * (rank == 1 and k == 0) for k in found])
        dump(tmp_path / f"in/rank{rank}.pkl", {"idx": np.array(found), "h": hidden.astype("f4")})
    table(tmp_path / "in/t.csv", [{"idx": k, "text": f"answer {k}", "y": k % 2} for k in range(5)])
    return {
        "last_token": "rank*.pkl : h -> N L D",
        "question_id": "rank*.pkl : idx -> N",
        "generated_answer": "t.csv : [id=idx]/text",
        "is_correct": "t.csv : [id=idx]/y",
    }


def test_rule_10b_copies_of_a_sampler_are_dropped_where_it_is_stated(tmp_path):
    layout = ranked(tmp_path)
    refuse(tmp_path, layout, 'duplicates = "drop"')

    traces = convert(tmp_path, layout | {"duplicates": "drop"})

    assert {key: trace.answer for key, trace in traces.items()} == {(str(k), 0): f"answer {k}" for k in range(5)}


@pytest.mark.parametrize("copies", ["a", "ab", "aab", "abc"])
def test_the_summary_counts_the_label_of_a_copy_once(tmp_path, copies):
    records = [{"id": n, "hs": states(2, 4, 8, seed=ord(n)), "text": n, "ok": int(n == "a")} for n in "abc" + copies]
    dump(tmp_path / "in/a.pkl", records)
    lines = ROWS | {"generated_answer": "a.pkl : []/text", "is_correct": "a.pkl : []/ok", "duplicates": "drop"}
    flags = [part for name, line in lines.items() for part in ("--field", f"{name} = {line}")]

    done = command("convert", tmp_path / "in", tmp_path / "s.zarr", *flags, check=0)

    assert "is_correct (high: correct): 1 times 1, 2 times 0, 0 missing" in done.stdout


def test_rule_10b_copies_that_differ_are_not_dropped(tmp_path):
    layout = ranked(tmp_path, change=0.5)

    with pytest.raises(tracestore.errors.TracestoreError):
        convert(tmp_path, layout | {"duplicates": "drop"})


def test_rule_10b_copies_in_one_file(tmp_path):
    records = rows(ids="abca")
    records[3] = records[0]
    dump(tmp_path / "in/a.pkl", records)
    layout = ROWS | {"generated_answer": "a.pkl : []/text", "duplicates": "drop"}

    assert len(convert(tmp_path, layout)) == 3


def test_rule_10b_other_answers_in_one_file_are_no_copies(tmp_path):
    dump(tmp_path / "in/a.pkl", rows(ids="abca"))

    with pytest.raises(tracestore.errors.TracestoreError):
        convert(tmp_path, ROWS | {"generated_answer": "a.pkl : []/text", "duplicates": "drop"})


# Numbers of tokens that continue


def parted(tmp_path, numbers, prefill=3):
    """Write a prompt of `prefill` tokens, and a key for each later token."""
    decode = {f"pos_{n}": states(2, 1, 8, seed=n) for n in numbers}
    dump(tmp_path / "in/a.pkl", {"q": {"prefill": states(2, prefill, 8), "decode": decode}})


@pytest.mark.parametrize("name", ["token", "step"])
@pytest.mark.parametrize("first", [0, 1, 3])
def test_rule_04_an_answer_continues_where_the_prompt_ends(tmp_path, name, first):
    parted(tmp_path, range(first, first + 9))
    axes = "L 1 D" if name == "token" else "L S D"
    layout = {"hidden_states": ["a.pkl : {id}/prefill -> L S D", f"a.pkl : {{id}}/decode/pos_{{{name}}} -> {axes}"]}

    trace = convert(tmp_path, layout)["q", 0]

    assert (trace.num_tokens, trace.prompt_length) == (12, 3)
    assert np.array_equal(np.asarray(trace.hidden_states)[:, -1], states(2, 1, 8, seed=first + 8)[:, 0].astype("f2"))


@pytest.mark.parametrize("name", ["token", "step"])
@pytest.mark.parametrize("numbers", [(2, 3), (4, 5), (3, 5), (5,)])
def test_rule_04_an_answer_with_a_gap_behind_the_prompt(tmp_path, name, numbers):
    """[a lost token]"""
    parted(tmp_path, numbers)
    axes = "L 1 D" if name == "token" else "L S D"
    layout = {"hidden_states": ["a.pkl : {id}/prefill -> L S D", f"a.pkl : {{id}}/decode/pos_{{{name}}} -> {axes}"]}

    refuse(tmp_path, layout, "first token is|first step is|is missing|have gaps")


# Lists in the order of keys


@pytest.mark.parametrize("names", [("q9", "q10", "q1"), ("q1", "q9", "q10"), ("q1", "q10", "q9"), ("a", "b", "c")])
def test_rule_13_a_list_in_the_order_of_keys(tmp_path, names):
    """[keys that a program or a container has sorted: q10 before q9]"""
    dump(tmp_path / "in/v.pkl", {qid: {"h": states(2, 8, seed=k)} for k, qid in enumerate(names)})
    dump(tmp_path / "in/u.pkl", {"entropy": [0.5, 1.5, 2.5]})
    layout = {"last_token": "v.pkl : {id}/h -> L D", "hallucination.entropy": "u.pkl : entropy/[]"}

    with pytest.raises(UsageError, match=r"nothing joins it: .*rows in order need states in order"):
        convert(tmp_path, layout)


# Mappings of lists


def listed(tmp_path, **changes):
    """Write a mapping of parallel lists."""
    found = {
        "idx": ["a", "b", "c"],
        "h": [states(2, n, 8, seed=n) for n in (3, 4, 5)],
        "y": np.array([0, 1, 1]),
        "rank": 0,
    }
    dump(tmp_path / "in/a.pkl", found | changes)
    return {"hidden_states": "a.pkl : [id=idx]/h -> L S D", "is_correct": "a.pkl : [id=idx]/y"}


def test_rule_09_lists_of_a_mapping_are_columns(tmp_path):
    traces = convert(tmp_path, listed(tmp_path))

    assert {qid: (t.num_tokens, t.scores["is_correct"]) for (qid, _), t in traces.items()} == {
        "a": (3, 0),
        "b": (4, 1),
        "c": (5, 1),
    }


@pytest.mark.parametrize("changes", [{"y": np.array([0, 1])}, {"idx": ["a", "b"]}, {"h": 1.5}, {"idx": "abc"}])
def test_rule_09_lists_of_different_lengths_are_no_columns(tmp_path, changes):
    refuse(tmp_path, listed(tmp_path, **changes), "found a mapping|missing key|has no idx")


def test_rule_08_a_column_of_a_mapping_without_a_line(tmp_path):
    refuse(tmp_path, listed(tmp_path, attn=[np.zeros((1, 2, 2))] * 3), "no line of the layout names")
    refuse(tmp_path, listed(tmp_path, attn=np.zeros((4, 2, 2))), "no line of the layout names")


# Messages


def test_a_run_by_a_layout_names_lines(tmp_path, capsys):
    from tests.helpers import command

    dump(tmp_path / "in/a.pkl", [{"hs": states(2, 3, 8)}])

    done = command("convert", tmp_path / "in", tmp_path / "s.zarr", "--field", "hidden_states = a.pkl : []/hs -> L S D")

    assert done.returncode == 0
    assert "--map" not in done.stdout + done.stderr
    assert "a line for question_id" in done.stdout + done.stderr


def test_gzipped_rows_count_answers(tmp_path):
    save(tmp_path / "in/h.npy", states(3, 2, 8))
    with gzip.open(tmp_path / "in/t.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"qid": qid, "text": qid}) + "\n" for qid in "aba")
    layout = {"last_token": "h.npy -> N L D", "question_id": "t.jsonl.gz : []/qid", "sample": "#"}

    assert set(convert(tmp_path, layout)) == {("a", 0), ("b", 0), ("a", 1)}


# Layers in several files


def test_rule_04_stages_that_number_their_own_layers(tmp_path):
    """Two files of a pipeline, each with layers from 0 [layers of one rank instead of another's]."""
    for stage in range(2):
        dump(tmp_path / f"in/stage{stage}.pkl", {"q1": {f"layers.{k}": states(3, 8, seed=stage) for k in range(2)}})

    refuse(tmp_path, {"hidden_states": "stage*.pkl : {id}/layers.{layer} -> S D"}, "found layer 0 twice")


def test_rule_04_layers_of_a_trace_may_lie_in_several_shards(tmp_path):
    for shard, keys in enumerate((("a.layer_4", "a.layer_8", "b.layer_8"), ("b.layer_4",))):
        dump(tmp_path / f"in/s-{shard}.pkl", {key: states(3, 8, seed=ord(key[0]) + int(key[-1])) for key in keys})

    traces = convert(tmp_path, {"hidden_states": "s-*.pkl : {id}.layer_{layer} -> S D"})

    assert np.array_equal(np.asarray(traces["b", 0].hidden_states)[1], states(3, 8, seed=ord("b") + 8).astype("f2"))


# Bytes with a shape


def blobs(tmp_path, shapes, kind="f2"):
    """Write states as bytes, and the shape of each."""
    records = [
        {"id": f"q{k}", "h": np.arange(np.prod(shape), dtype=kind).tobytes(), "shape": list(shape)}
        for k, shape in enumerate(shapes)
    ]
    for record in records:
        record["h"] = np.frombuffer(record["h"], "u1")
    dump(tmp_path / "in/a.pkl", records)
    return {"hidden_states": "a.pkl : [id=id]/h -> L S D", "shape.hidden_states": "a.pkl : [id=id]/shape"}


@pytest.mark.parametrize(("kind", "name"), [("f2", "float16"), ("f4", "float32"), ("f8", "float64")])
def test_rule_07_bytes_with_a_shape(tmp_path, kind, name):
    layout = blobs(tmp_path, [(2, 3, 8), (2, 5, 8)], kind)

    traces = convert(tmp_path, layout | {"dtype.hidden_states": name, "S.padding": "none"})

    assert np.asarray(traces["q1", 0].hidden_states).tolist() == np.arange(80).reshape(2, 5, 8).tolist()


@pytest.mark.parametrize("changed", [(2, 3), (2, 3, 9), (2, 3, 8, 1), (3, 2, 8)])
def test_rule_07_bytes_of_another_shape(tmp_path, changed):
    layout = blobs(tmp_path, [(2, 3, 8), (2, 5, 8)])
    records = [
        {"id": f"q{k}", "h": np.zeros(2 * 48, "u1") + 1, "shape": list(changed if k else (2, 3, 8))} for k in range(2)
    ]
    dump(tmp_path / "in/a.pkl", records)

    refuse(tmp_path, layout | {"dtype.hidden_states": "float16"}, "the shape|layer_ids|layers|expected")


def test_rule_07_bytes_with_a_shape_and_no_dtype(tmp_path):
    refuse(tmp_path, blobs(tmp_path, [(2, 3, 8)]), "dtype.hidden_states states")


def test_flat_numbers_need_a_shape():
    with pytest.raises(UsageError, match=r"shape\.hidden_states gives"):
        plan_of(parse_layout({"hidden_states": "a.pkl : h -> (L S D)"}))


def test_rule_08_a_shape_of_no_states():
    layout = {"hidden_states": "a.pkl : []/h -> L S D", "shape.last_token": "a.pkl : []/shape"}

    with pytest.raises(UsageError, match=r"shape\.last_token: has no effect"):
        check_effects(plan_of(parse_layout(layout)))


@pytest.mark.parametrize("known", [{"S.mask": "a.pkl : m -> N S"}, {"S.lengths": "a.pkl : n -> N", "S.side": "right"}])
@pytest.mark.parametrize("end", [2, 3, 4])
def test_rule_17_padding_that_contradicts_a_mask_or_lengths(tmp_path, known, end):
    hidden = states(2, 2, 4, 8)
    hidden[1, :, end:] = np.nan
    mask = np.array([[1, 1, 1, 1], [1, 1, 1, 0]])
    dump(tmp_path / "in/a.pkl", {"hs": hidden, "m": mask, "n": mask.sum(1)} | {"t": np.tile([5, 6, 7, 0], (2, 1))})
    layout = {"hidden_states": "a.pkl : hs -> N L S D", "S.padding": "nan", "tokens": "a.pkl : t -> N S"} | known
    layout["ignore"] = "a.pkl : n" if "S.mask" in known else "a.pkl : m"
    if end != 3:
        refuse(tmp_path, layout, "S.padding: found the tokens")
        return

    assert sorted(trace.num_tokens for trace in convert(tmp_path, layout).values()) == [3, 4]


@pytest.mark.parametrize("options", [{}, {"duplicates": "drop"}])
def test_rule_14_copies_whose_labels_differ(tmp_path, options):
    """[the label of the copy that was read last]"""
    last = [states(2, 8, seed=k) for k in range(5)]
    for rank, (found, labels) in enumerate((([0, 2, 4], [0, 1, 0]), ([1, 3, 0], [1, 1, 1]))):
        arrays = {"idx": np.array(found), "h": np.stack([last[k] for k in found]), "y": np.array(labels)}
        dump(tmp_path / f"in/rank{rank}.pkl", arrays)
    layout = {
        "last_token": "rank*.pkl : h -> N L D",
        "question_id": "rank*.pkl : idx -> N",
        "is_correct": "rank*.pkl : y -> N",
    }

    refuse(tmp_path, layout | options, "is_correct: found 0 and 1 for 0, sample 0: copies of a trace have one label")


@pytest.mark.parametrize("size", [4, 16])
def test_rule_01_another_hidden_size_than_stated(tmp_path, size):
    dump(tmp_path / "in/a.pkl", rows(ids="abcd"))

    refuse(tmp_path, ROWS | {"D.size": size}, f"found D 8, expected {size}")


@pytest.mark.parametrize(("firsts", "is_right"), [((3, 6), True), ((0, 0), True), ((0, 1), False), ((3, 1), False)])
def test_rule_04_answers_of_every_trace_begin_alike(tmp_path, firsts, is_right):
    """[a lost first token]"""
    found = {}
    for k, (first, prefill) in enumerate(zip(firsts, (3, 6), strict=True)):
        decode = {f"pos_{n}": states(2, 8, seed=n) for n in range(first, first + 4)}
        found[f"q{k}"] = {"decode": decode, "prefill": states(2, prefill, 8, seed=k)}
    dump(tmp_path / "in/a.pkl", found)
    layout = {"hidden_states": ["a.pkl : {id}/prefill -> L S D", "a.pkl : {id}/decode/pos_{token} -> L D"]}
    if is_right:
        assert {qid: trace.prompt_length for (qid, _), trace in convert(tmp_path, layout).items()} == {"q0": 3, "q1": 6}
    else:
        refuse(tmp_path, layout, "as in an earlier trace")


def test_files_of_ranks_are_no_prompt_and_answer(tmp_path):
    for rank in range(2):
        dump(tmp_path / f"in/rank{rank}.pkl", {"a": states(2, 3, 8, seed=rank)})
    layout = {"hidden_states": [f"rank{rank}.pkl : {{id}} -> L S D" for rank in range(2)]}
    with pytest.raises(UsageError, match="files of ranks are no prompt and answer"):
        convert(tmp_path, layout)


def test_a_file_without_a_line_is_named_in_the_line_that_leaves_it_out(tmp_path):
    dump(tmp_path / "in/a.pkl", rows())
    (tmp_path / "in/notes.txt").write_text("states of a model")
    refuse(tmp_path, ROWS, r'or ignore = \["notes.txt"\]')


# Entries of `ignore`


@pytest.mark.parametrize("line", ["[id=qid]", "[id=#]", "[]"])
@pytest.mark.parametrize("entry", ["[]", "[id=qid]", "[id=#]", "[n=#]"])
@pytest.mark.parametrize("files", ["a.pkl", "*.pkl"])
def test_rule_08_an_ignored_place_may_have_other_brackets_and_files(tmp_path, line, entry, files):
    items = [{"hs": states(2, 3, 8, seed=k), "gate": states(2), "inner": {"w": states(3)}} for k in range(3)]
    dump(
        tmp_path / "in/a.pkl",
        [item | ({"qid": f"q{k}"} if "qid" in line + entry else {}) for k, item in enumerate(items)],
    )
    layout = {"hidden_states": f"a.pkl : {line}/hs -> L S D"}
    layout |= {"question_id": "a.pkl : []/qid"} if "qid" in entry and line == "[]" else {}
    layout |= {"ignore": [f"{files} : {entry}/gate"]}
    layout |= {"ignore": ["a.pkl : []/qid", *layout["ignore"]]} if "qid" in entry and line == "[id=#]" else {}
    refuse(tmp_path, layout, "a.pkl : .*inner: no line of the layout names")

    layout["ignore"] += [f"{files} : {entry}/inner"]

    assert len(convert(tmp_path, layout)) == 3


@pytest.mark.parametrize(
    ("line", "entry"),
    [
        ("{id}/states.pkl : hs", "*/states.pkl : gate"),
        ("{id}/*.pkl : hs", "*/*.pkl : gate"),
        ("**/*.pkl : hs", "**/*.pkl : gate"),
        ("{id}/states.pkl : hs", "{id}/*.pkl : gate"),
        ("all.pkl : {id}/hs", "all.pkl : */gate"),
        ("all.pkl : {id}/hs", "*.pkl : */gate"),
        ("all.pkl : q{id}/hs", "all.pkl : */gate"),
        ("all.pkl : q{id}/hs", "all.pkl : q*/gate"),
    ],
)
def test_rule_08_a_wildcard_of_ignore_matches_names_of_the_lines(tmp_path, line, entry):
    items = {f"q{k}": {"hs": states(2, 3, 8, seed=k), "gate": states(2)} for k in range(3)}
    for name, item in items.items() if "all" not in line else ():
        dump(tmp_path / "in" / name / "states.pkl", item)
    if "all" in line:
        dump(tmp_path / "in/all.pkl", items)

    assert len(convert(tmp_path, {"hidden_states": f"{line} -> L S D", "ignore": entry})) == 3


@pytest.mark.parametrize("key", ["a/b", "a, b", "w*", "[0]", "{w}", "w\\x", "a b"])
def test_rule_08_the_printed_entry_of_ignore_leaves_the_key_out(tmp_path, key):
    """[an entry that is a pattern or a path]"""
    for k in range(2):
        dump(tmp_path / f"in/q{k}.pkl", {"hs": states(2, 3, 8, seed=k), key: states(4)})
    layout = {"hidden_states": "{id}.pkl : hs -> L S D"}
    with pytest.raises(InvalidInputError, match="no line of the layout names numbers") as raised:
        convert(tmp_path, layout)
    entry = json.loads(str(raised.value).partition("ignore = ")[2])

    assert len(convert(tmp_path, layout | {"ignore": entry})) == 2


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("q0.pkl : gate", r"no line reads q0.pkl; the line of q0.pkl has \{id\}.pkl"),
        ("q*.pkl : gate", r"no line reads q\*.pkl; the line of q0.pkl has \{id\}.pkl"),
        ("{layer}.pkl : gate", "no file is left out by it"),
        ("*.pkl : gates", r"hold no such value; \{id\}.pkl : gate is near"),
        ("*.pkl", r"q0.pkl is a file of \{id\}.pkl"),
        ("t.csv : []/y", r'no line reads t.csv; ignore = \["t.csv"\] leaves it out'),
    ],
)
def test_rule_08_a_wrong_entry_of_ignore_names_what_was_meant(tmp_path, entry, words):
    """[a file whose states an entry of one of its values would leave out]"""
    for k in range(3):
        dump(tmp_path / f"in/q{k}.pkl", {"hs": states(2, 3, 8, seed=k), "gate": "open"})
    more = [] if "csv" in entry else ["t.csv"]
    table(tmp_path / "in/t.csv", [{"y": 1}])

    refuse(tmp_path, {"hidden_states": "{id}.pkl : hs -> L S D", "ignore": [entry, *more]}, words)


def test_rule_08_a_line_whose_files_another_line_has(tmp_path):
    for name in ("a", "b"):
        dump(tmp_path / f"in/{name}/h.pkl", {"q0": states(2, 3, 8)})
        table(tmp_path / f"in/{name}/t.csv", [{"id": "q0", "text": "x", "y": 1}])
    layout = {"hidden_states": "{set}/h.pkl : {id} -> L S D", "question": "{set}/t.csv : [id=id]/text"}
    layout |= {"is_correct": "a/t.csv : [id=id]/y", "is_hallucinated": "b/t.csv : [id=id]/y"}

    refuse(tmp_path, layout, r"matches \{set\}/t.csv; a/t.csv is a file of a/t.csv, whose line has more literal")


@pytest.mark.parametrize("label", ["[N=slot]", "[id=uid]"])
@pytest.mark.parametrize("text", ["[N=slot]", "[id=uid]"])
def test_rule_08_lines_of_one_table_may_have_several_brackets(tmp_path, label, text):
    save(tmp_path / "in/h.npy", states(3, 2, 4, 8))
    table(tmp_path / "in/t.csv", [{"uid": f"q{k}", "slot": k, "text": f"text {k}", "y": k % 2} for k in (2, 0, 1)])
    layout = {"hidden_states": "h.npy -> N L S D", "question_id": "t.csv : [N=slot]/uid"}
    layout |= {"is_correct": f"t.csv : {label}/y", "question": f"t.csv : {text}/text"}

    traces = convert(tmp_path, layout)

    assert {key: (trace.question, *trace.scores.values()) for (key, _), trace in traces.items()} == {
        f"q{k}": (f"text {k}", float(k % 2)) for k in range(3)
    }


def test_rule_13_labels_in_order_beside_a_column_of_ids(tmp_path):
    """[a column of ids that joins the texts alone]"""
    save(tmp_path / "in/h.npy", states(3, 2, 4, 8))
    save(tmp_path / "in/ids.npy", np.array(["q0", "q1", "q2"]))
    table(tmp_path / "in/t.csv", [{"uid": f"q{k}", "text": f"text {k}", "y": k % 2} for k in (2, 0, 1)])
    layout = {"hidden_states": "h.npy -> N L S D", "question_id": "ids.npy -> N", "is_correct": "t.csv : []/y"}

    refuse(tmp_path, layout | {"question": "t.csv : [id=uid]/text"}, r"\[id=uid\] in each line of the table")


# Advice of messages


@pytest.mark.parametrize("width", [1, 2, 4])
def test_names_with_zeros_join_the_numbers_of_rows(tmp_path, width):
    for k in range(4):
        save(tmp_path / f"in/h/{k:0{width}}.npy", states(2, 3, 8, seed=k))
    table(tmp_path / "in/t.csv", [{"row": k, "qid": f"q{k}", "ok": k % 2} for k in range(4)])
    layout = {"question_id": "t.csv : [row=row]/qid", "is_correct": "t.csv : [row=row]/ok"}
    if width > 1:
        refuse(tmp_path, layout | {"hidden_states": "h/{row}.npy -> L S D"}, r"row is 0+, and \{row:d\} a number")
        refuse(
            tmp_path,
            {"hidden_states": "h/{id}.npy -> L S D", "is_correct": "t.csv : [id=row]/ok", "ignore": "t.csv : []/qid"},
            r"differ in spelling only.*\{NAME:d\} instead of",
        )

    traces = convert(tmp_path, layout | {"hidden_states": "h/{row:d}.npy -> L S D"})

    assert [traces[f"q{k}", 0].score for k in range(4)] == [0, 1, 0, 1]


def test_two_names_of_one_number_are_refused(tmp_path):
    for name in ("7", "07", "8"):
        save(tmp_path / f"in/{name}.npy", states(2, 3, 8, seed=len(name)))

    refuse(tmp_path, {"hidden_states": "{id:d}.npy -> L S D"}, "found its value twice")


@pytest.mark.parametrize("name", ["d.zip", "d.tar", "d.tar.gz", "d.TGZ", "d.tar.xz", "d.tar.zst", "d.7z", "x/d.rar"])
def test_an_archive_is_unpacked_by_the_user(tmp_path, name):
    dump(tmp_path / "in/a.pkl", rows(ids="abcd"))
    dump(tmp_path / "in" / name, b"")

    refuse(tmp_path, ROWS, "no line of the layout names .*; unpack it")


def test_the_member_of_an_archive(tmp_path):
    (tmp_path / "in").mkdir()
    with zipfile.ZipFile(tmp_path / "in/d.zip", "w") as archive:
        with archive.open("q0/hs.npy", "w") as file:
            np.save(file, states(2, 3, 8))
        archive.writestr("q0/meta.json", "{}")

    refuse(tmp_path, {"hidden_states": "d.zip : {id}/hs -> L S D"}, "is not an array of NumPy: unpack the archive")


@pytest.mark.parametrize("name", ["h.dat", "h.bin", "h.raw", "h.mmap", "h.MEMMAP"])
@pytest.mark.parametrize("first", [b"P", b"\0", b"(", b"\xff"])
def test_raw_numbers(tmp_path, name, first):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(first + bytes(95))
    layout = {"hidden_states": f"{name} -> L S D", "dtype.hidden_states": "float16"}

    refuse(tmp_path, layout, "no format that is read; raw numbers: numpy.fromfile reads them, numpy.save")


def test_a_pickle_under_the_name_of_raw_numbers(tmp_path):
    dump(tmp_path / "in/a.bin", rows(ids="abcd"))

    assert len(convert(tmp_path, {"hidden_states": "a.bin : []/hs -> L S D", "question_id": "a.bin : []/id"})) == 4


@pytest.mark.parametrize(
    ("key", "value", "is_left_out"),
    [
        ("ground_truth", "Paris", True),
        ("ground_truth", "the 1966 World Cup", True),
        ("groundTruth", "Alexander Fleming", True),
        ("truth", "97", True),
        ("gold", "Paris", True),
        ("reference", "Paris", True),
        ("ground_truth", "correct", False),
        ("ground_truth", "hallucinated", False),
        ("ground_truth", 1, False),
        ("truth", True, False),
        ("truth", 0.5, False),
        ("truth_label", "Paris", False),
        ("target", "Paris", False),
        ("verdict", "Paris", False),
    ],
)
def test_rule_08a_the_text_of_a_reference_answer_is_no_label(tmp_path, key, value, is_left_out):
    dump(tmp_path / "in/a.pkl", [row | {key: value} for row in rows(ids="abcd")])
    if is_left_out:
        assert len(convert(tmp_path, ROWS)) == 4
    else:
        refuse(tmp_path, ROWS, "no line of the layout names what may be a label")


@pytest.mark.parametrize("value", [[1, 2, 3], (4, 5), [[1], [2]], np.arange(3)])
def test_the_message_says_that_a_list_holds_numbers(tmp_path, value):
    dump(tmp_path / "in/a.pkl", [row | {"more": value} for row in rows(ids="abcd")])

    refuse(tmp_path, ROWS, r"no line of the layout names numbers \(")


@pytest.mark.parametrize("has_texts", [True, False])
def test_texts_of_tokens_are_enough(tmp_path, has_texts):
    dump(tmp_path / "in/a.pkl", [{"id": "a", "hs": states(2, 3, 8), "toks": ["a", "b", "c"]}])
    layout = ["hidden_states = a.pkl : [id=id]/hs -> L S D", "tokens_decoded = a.pkl : [id=id]/toks"]
    lines = [part for line in layout[: 1 + has_texts] for part in ("--field", line)]

    done = command("convert", tmp_path / "in", tmp_path / "s.zarr", *lines)

    assert ("no token ids in" in done.stdout) != has_texts
