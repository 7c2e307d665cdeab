"""Test patterns of names: what they bind, two parses, and linear time."""

import contextlib
from functools import partial

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.machine import assert_within
from tracestore.errors import InvalidInputError, UsageError
from tracestore.ingest.layout.patterns import Pattern, split_escaped

TABLE = [
    ("{id}.npz", "q0.npz", {"id": "q0"}),
    ("{id}.npz", "a/q0.npz", None),
    ("**/{id}.npz", "q0.npz", {"id": "q0"}),
    ("**/{id}.npz", "a/b/q0.npz", {"id": "q0"}),
    ("a/**", "a/b/c.npy", {}),
    ("*.pkl", "x.pkl", {}),
    ("*.pkl", "a/x.pkl", None),
    ("layer_{layer}.npy", "layer_012.npy", {"layer": 12}),
    ("layer_{layer}.npy", "layer_-1.npy", {"layer": -1}),
    ("layer_{layer}.npy", "layer_x.npy", None),
    ("hidden_{n:d}.npy", "hidden_7.npy", {"n": "7"}),
    ("hidden_{n:d}.npy", "hidden_07.npy", {"n": "7"}),
    ("hidden_{n:d}.npy", "hidden_000.npy", {"n": "0"}),
    ("hidden_{n:d}.npy", "hidden_-7.npy", None),
    ("hidden_{n:d}.npy", "hidden_7a.npy", None),
    ("h_{n:04d}.npy", "h_0007.npy", {"n": "7"}),
    ("h_{n:04d}.npy", "h_12345.npy", {"n": "12345"}),
    ("h_{n:04d}.npy", "h_7.npy", None),
    ("{id}_layer{layer}.npy", "q_1_layer2.npy", {"id": "q_1", "layer": 2}),
    ("acts_{chunk}_{chunk.end}.npy", "acts_4_8.npy", {"chunk": 4, "chunk.end": 8}),
    (r"a\*\{b\}", "a*{b}", {}),
    ("{split}/{id}/h.npy", "train/q1/h.npy", {"split": "train", "id": "q1"}),
    ("{a}-{b}-{c}-{d}", "1-2-3-4", {"a": "1", "b": "2", "c": "3", "d": "4"}),
]


@pytest.mark.parametrize(("pattern", "name", "bound"), TABLE)
def test_a_pattern_binds(pattern, name, bound):
    match = Pattern(pattern, is_path=True).match(name)

    assert (None if match is None else match.bound) == bound


@pytest.mark.parametrize(
    "text", ["-{layer}", "layer_-{layer}", "a/-{token}", "l.-{layer}.npy", "x -{step}", "(-{layer})"]
)
def test_a_sign_in_front_of_a_number_is_an_error(text):
    with pytest.raises(UsageError, match="leave it out"):
        Pattern(text).match("x")


@pytest.mark.parametrize(
    ("text", "name", "bound"),
    [
        ("layer-{layer}", "layer-3", {"layer": 3}),
        ("-{layer:-d}", "-3", {"layer": -3}),
        ("-{id}", "-3", {"id": "3"}),
        ("a_-{n:d}", "a_-3", {"n": "3"}),
    ],
)
def test_a_hyphen_that_is_no_sign(text, name, bound):
    assert Pattern(text).match(name).bound == bound


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("{a}_{b}", "x_y_z"),
        ("*{n:d}", "x12"),
        ("{a}.{b}.{c}.{d}", "1.2.3.4.5"),
        ("*_{id}", "a_b_c"),
        ("*{n:d}*", "00a7"),
        ("**{layer}", "/077"),  # 7 is a third parse, behind two that bind 77
        ("**{layer:-d}***", "0aaa07a"),
    ],
)
def test_a_name_with_two_parses_is_an_error(pattern, name):
    with pytest.raises(InvalidInputError, match="in two ways"):
        Pattern(pattern).match(name)


@pytest.mark.parametrize("text", ["{", "{}", "{a b}", "{n:x}", "{id}{layer}", "{id}_{id}", "x\\"])
def test_a_wrong_pattern_is_refused(text):
    with pytest.raises(UsageError):
        Pattern(text)


PIECES = st.lists(st.sampled_from(["{id}", "{layer}", "{n:d}", "*", "a", "b", "_", "0", "7"]), min_size=1, max_size=7)


def parses(parts, name):
    """Return what every way to match a name binds, by trying all of them."""
    if not parts:
        return [{}] if not name else []
    part, rest = parts[0], parts[1:]
    found = []
    for k in range(len(name) + 1):
        text = name[:k]
        digits = text if part.is_plain else text.removeprefix("-")
        fits = {
            "literal": text == part.text,
            "star": True,
            "name": bool(text) and (not part.is_number or digits.isdecimal()),
        }[part.kind]
        if fits:
            own = {part.text: str(int(text)) if part.is_plain else text} if part.kind == "name" else {}
            found += [own | inner for inner in parses(rest, name[k:])]
    return found


@example(["*", "{layer}", "*"], "0_0")
@given(PIECES, st.text("ab_07", max_size=7))
def test_a_match_is_one_of_all_ways_and_the_only_one(pieces, name):
    try:
        pattern = Pattern("".join(pieces))
    except UsageError:
        return
    parts = pattern.parts
    ways = {tuple(sorted((k, int(v) if k == "layer" else v) for k, v in way.items())) for way in parses(parts, name)}
    try:
        match = pattern.match(name)
    except InvalidInputError:
        assert len(list(parses(parts, name))) > 1  # of the same name at two places, too: one between may differ
        return
    assert len(ways) <= 1
    assert (match is None) == (not ways)
    if match is not None:
        assert tuple(sorted(match.bound.items())) in ways


@pytest.mark.parametrize("pattern", ["*a*a*a*a*a*b{id}", "{a}_{b}_{c}_{d}", "*{n:d}*{layer}*", "{id}*0*0*0*x"])
def test_matching_takes_linear_time(pattern):
    def match(name):
        with contextlib.suppress(InvalidInputError):
            Pattern(pattern).match(name)

    # Linear time takes 4 times as long, quadratic time 16 times.
    assert_within(8, partial(match, ("a_0" * 700)[:2_000]), partial(match, ("a_0" * 700)[:500]))


@given(st.text('a/\\[]"', max_size=12))
def test_splitting_loses_nothing(text):
    assert "/".join(split_escaped(text, "/")) == text
