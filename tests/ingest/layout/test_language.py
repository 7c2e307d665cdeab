"""Test the layout language: addresses, TOML, lines, and messages."""

import json
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import ROOT
from tests.ingest.execute.folders import convert, save, states, table
from tracestore.errors import UsageError
from tracestore.ingest.layout.addresses import ItemsStep, KeyStep, parse_address
from tracestore.ingest.layout.effects import check_effects
from tracestore.ingest.layout.fields import FIELDS
from tracestore.ingest.layout.language import fields_of_lines, parse_layout, read_layout
from tracestore.ingest.layout.places import plan_of

KINDS = tomllib.loads((ROOT / "tests/ingest/corpus/layouts.toml").read_text())
STATES = {"hidden_states": "*.pkl : []/hs -> L S D"}
# Prompt and answer lie behind each other along S, which these fields lack.
OF_ONE_ADDRESS = [name for name, rule in FIELDS.items() if "S" not in rule.axes and not name.startswith("shape.")]


def test_an_address_has_files_path_and_axes():
    address = parse_address("**/{split}.pkl : [id=qid]/a.b/{layer},x -> N (K S) D")

    assert address.files.names == ("split",)
    assert [type(step) for step in address.path] == [ItemsStep, KeyStep, KeyStep]
    assert address.path[2].names == ("layer",)
    assert address.axes == ("N", "KS", "D")


@pytest.mark.parametrize(
    "text",
    [
        "a.npy",
        "a.npy -> N S D",
        "a.pkl : []",
        "a.pkl : x",
        r"a\ : b.pkl : c\/d/e",
        "a.h5 : {id}/@question",
        "a.pkl : */[chunk]/x -> (N S) D",
        'a.pkl : [request_id="{id}-0"]/x',
        "a.pkl : [n=#, layer=l]/-1/x -> 1 S D",
        "a.pkl : {id},{layer} -> S D",
    ],
)
def test_an_address_is_written_as_it_was_read(text):
    assert str(parse_address(text)) == text


def test_layouts_of_the_corpus_survive_toml():
    for name, entries in KINDS.items():
        layout = parse_layout(entries)

        assert parse_layout(tomllib.loads(layout.to_toml())) == layout, name


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"hidden_state": "a.npy"}, "did you mean hidden_states"),
        ({"response": "a.npy"}, "did you mean generated_answer"),
        (STATES | {"hidden_states": " -> L"}, "expected FILES"),
        (STATES | {"hidden_states": "a.pkl : **/h"}, "any folders of FILES"),
        (STATES | {"tokens": "a.npy -> N X"}, "letters of N K L"),
        (STATES | {"tokens": "a.pkl : [q]/x"}, "expected \\[\\], \\[K\\]"),
        (STATES | {"tokens": "{id}.npz : {id}"}, "id is bound twice"),
        (STATES | {"tokens": ["a", "b", "c"]}, "expected FILES"),
        (STATES | {"S.side": "middle"}, "left or right"),
        (STATES | {"S.pad": "x"}, "expected int"),
        (STATES | {"words.ja": "yes"}, 'expected true, false or "missing"'),
        (STATES | {"L.ids": []}, "expected FILES"),
        ({"tokens": "a.npy"}, "states no hidden_states"),
        (STATES | {"question": "a.pkl : x//y"}, "empty key"),
        (STATES | {"question": "a.pkl : {x"}, "expected a name"),
        (STATES | {"question": 3}, "expected FILES"),
        *((STATES | {"scale.hidden_states": v}, "positive number") for v in (0, -1, True, float("nan"), float("inf"))),
        (STATES | {"is_correct": "a.csv : []/x", "correctness.is_correct": "a.csv : []/y"}, "has the same name"),
        (
            STATES | {"correctness.f1": "a.csv : []/x", "hallucination.f1": "a.csv : []/y"},
            "f1: the score of correctness",
        ),
        (STATES | {"hallucination.f1": "a.csv : []/x", "correctness.f1": "={x}"}, "the score of .* has the same name"),
        (STATES | {"hallucination.is_correct": "a.csv : []/x"}, "1 means the opposite under is_correct"),
        (STATES | {"correctness.is_hallucinated": "={x}"}, "1 means the opposite under is_hallucinated"),
        *(
            (STATES | {"is_correct": line}, f"1 means the opposite under {key}; name the line is_hallucinated")
            for line, key in (
                ("a.csv : [id=q]/isHallucinated", "is_hallucinated"),
                ("a.csv : []/Hallucination Label", "hallucination_label"),
                ("a.h5 : {id}/@incorrect", "incorrect"),
                ("y/hallucinated.npy -> N", "hallucinated"),
            )
        ),
        *(
            (STATES | {field: f"a.csv : []/{key}"}, f"the opposite under {key.lower()}; name the line is_correct")
            for field in ("label", "is_hallucinated")
            for key in ("is_correct", "Correct", "exact_match", "right")
        ),
        *((STATES | {name: ["a.csv : []/x", "a.csv : []/y"]}, "one address") for name in OF_ONE_ADDRESS),
    ],
)
def test_a_wrong_entry_is_refused_with_its_name(entries, words):
    with pytest.raises(UsageError, match=words):
        parse_layout(entries)


@pytest.mark.parametrize(
    ("field", "key"),
    [("is_correct", "label"), ("is_correct", "correct"), ("label", "is_wrong"), ("correctness.hhem", "hallucination")],
)
def test_a_key_of_the_same_or_of_no_direction_is_taken(field, key):
    assert field in parse_layout(STATES | {field: f"a.csv : []/{key}"}).addresses


WORDS = (
    *("hal", "hallu", "halu", "halluc", "halluci", "hallucin", "hallucinate", "hallucinates", "hallucinated"),
    *("hallucinating", "hallucination"),
)
NAMES = [form.format(word) for word in (*WORDS, "hallucinations") for form in ("{}", "is_{}", "{}_label", "{} Flag")]


@pytest.mark.parametrize("key", [*NAMES, "isHalluc", "p_halluc", "contains-hallucination", "halluc_score"])
def test_each_word_for_a_hallucination_says_what_1_means(key):
    for line in (f"a.csv : [id=q]/{key}", f"y/{key}.npy -> N"):
        with pytest.raises(UsageError, match="name the line is_hallucinated, or state both numbers"):
            parse_layout(STATES | {"is_correct": line})
        assert "is_hallucinated" in parse_layout(STATES | {"is_hallucinated": line}).addresses


@pytest.mark.parametrize(
    "key",
    [
        *("no_halluc", "not_halluc", "hallucination_free", "non-hallucinated", "halluc_vs_correct", "half", "halt"),
        *("hallucinationfree", "hallucination_resistance", "is_no_hal", "has_no_hallucinations", "shall", "hallway"),
    ],
)
@pytest.mark.parametrize("field", ["is_correct", "is_hallucinated"])
def test_a_word_that_may_turn_the_meaning_leaves_it_to_the_line(field, key):
    assert field in parse_layout(STATES | {field: f"a.csv : []/{key}"}).addresses


def test_a_key_of_the_opposite_direction_needs_the_meaning_of_its_numbers(tmp_path):
    save(tmp_path / "in/h.npy", states(3, 2, 4, 8))
    table(tmp_path / "in/t.csv", [{"index": k, "is_correct": k % 2} for k in range(3)])
    layout = {"hidden_states": "h.npy -> N L S D", "is_hallucinated": "t.csv : []/is_correct"}

    with pytest.raises(UsageError, match="name the line is_correct, or state both numbers"):
        parse_layout(layout)
    traces = convert(tmp_path, layout | {"words.0": True, "words.1": False}).values()
    assert [trace.score for trace in traces] == [1, 0, 1]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("{id}_layer{token}.npy -> L D", "layer"),
        ("{id}/Layer_{sample}.npy -> S D", "layer"),
        ("a.pkl : {id}/block{head} -> S D", "layer"),
        ("a.pkl : {id}/tok_{layer} -> S D", "token"),
        ("step-{layer}/{id}.npy -> S D", "step"),
    ],
)
def test_a_word_in_front_of_a_name_of_another_axis_is_refused(line, name):
    with pytest.raises(UsageError, match=rf"in front of .* which \{{{name}\}} binds; \* instead of"):
        parse_layout({"hidden_states": line})


@pytest.mark.parametrize(
    "line",
    [
        "{id}_layer{layer}.npy -> S D",
        "last_layer_{id}.npy -> S D",
        "layer_{id}.npy -> S D",
        "{id}/step{token}.npy -> L D",
        "{id}/last_layer_{sample}.npy -> S D",
        "block_{chunk}.npy -> N L S D",
        "answer_{layer}.npy -> N S D",
        "{id}/*_{layer}.npy -> S D",
        "tokens/{layer}/{id}.npy -> S D",
    ],
)
def test_a_word_in_front_of_a_name_that_may_mean_it(line):
    assert parse_layout({"hidden_states": line}).addresses


def test_lines_replace_the_entries_of_a_file(tmp_path):
    (tmp_path / "l.toml").write_text('hidden_states = "a.npy -> N S D"\nS.lengths = "n.npy -> N"\n')

    layout = read_layout(tmp_path / "l.toml", ["hidden_states = b.npy -> N L S D", "S.pad = 2", "ignore = x.npy"])

    assert str(layout.addresses["hidden_states"][0]) == "b.npy -> N L S D"
    assert layout.settings == {"S.pad": 2}
    assert [str(a) for a in layout.ignore] == ["x.npy"]


def test_a_file_of_comments_alone_says_so(tmp_path):
    (tmp_path / "l.toml").write_text("# 1. N 3\n# hidden_states = 'a.npy -> N S D'\n")
    with pytest.raises(UsageError, match="all lines are comments"):
        read_layout(tmp_path / "l.toml", [])


@pytest.mark.parametrize("name", ["yes", "not sure", "a = b", 'say "no"', "1.5"])
def test_a_word_may_have_quotes_as_in_toml(name):
    assert fields_of_lines([f"words.{json.dumps(name)} = true"]) == {f"words.{name}": True}


@pytest.mark.parametrize("line", ["", "x", "= a", "tokens =", "tokens"])
def test_a_line_without_field_or_address_is_refused(line):
    with pytest.raises(UsageError, match="--field"):
        fields_of_lines([line])


def test_a_field_stated_twice_is_refused():
    with pytest.raises(UsageError, match="stated twice"):
        fields_of_lines(["tokens = a.npy", "tokens = b.npy"])


WORDS = st.sampled_from(
    ["a.npz", " : ", " -> ", "{id}", "[]", "[id=q]", "/", "**", "*", "N", "S", "(", ")", "\\", '"', " "]
)


@given(st.lists(WORDS, max_size=9).map("".join))
def test_any_text_is_an_address_or_refused(text):
    try:
        address = parse_address(text)
    except UsageError:
        return
    assert parse_address(str(address)) == address


@given(st.text(max_size=40))
def test_any_line_is_an_entry_or_refused(text):
    try:
        entries = fields_of_lines([text])
        layout = parse_layout({**STATES, **entries})
    except UsageError:
        return
    assert parse_layout(tomllib.loads(layout.to_toml())) == layout


@pytest.mark.parametrize("char", ["\x7f", "\x00", "\x1f", "\n", '"', "\\\\", "é", "\u2028"])
def test_names_of_any_character_survive_toml(char):
    layout = parse_layout({"hidden_states": f"a{char}.npz : {char}b -> L S D", f"words.a{char}": True})

    assert parse_layout(tomllib.loads(layout.to_toml())) == layout


@pytest.mark.parametrize(
    ("entry", "is_refused"), [("h/@_FillValue", False), ("h/x", True), ("h", True), ("other/@_FillValue", False)]
)
def test_attributes_of_an_array_that_a_line_reads_can_be_ignored(entry, is_refused):
    lines = {"hidden_states": "a.h5 : h -> N S D", "question_id": "a.h5 : ids -> N", "ignore": [f"a.h5 : {entry}"]}
    plan = plan_of(parse_layout(lines))
    if not is_refused:
        check_effects(plan)
        return
    with pytest.raises(UsageError, match="has no effect"):
        check_effects(plan)


def test_a_file_that_is_too_large_is_refused(tmp_path):
    """[the lines behind its first MiB]."""
    path = tmp_path / "layout.toml"
    path.write_text('hidden_states = "a.npy -> S D"\n' + "# comment\n" * 200_000)
    with pytest.raises(UsageError, match="larger than"):
        read_layout(path)
