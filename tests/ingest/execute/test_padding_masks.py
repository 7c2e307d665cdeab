"""S.mask and S.padding_mask, of which one is the complement of the other."""

import numpy as np
import pytest

from tests.ingest.execute.folders import convert, dump, refuse, save, states
from tracestore.errors import UsageError

LINES = {"S.mask": "S.padding_mask", "S.padding_mask": "S.mask"}
COUNTS = (3, 5, 4)


def batch(tmp_path, side, *, with_ids=True, is_padding=True):
    """Write padded rows with a mask, whose ones are padding; return the states and a layout without the mask."""
    hidden, ids, is_padded = states(3, 2, 5, 8), np.full((3, 5), 9), np.ones((3, 5), bool)
    for row, count in enumerate(COUNTS):
        of_trace = slice(0, count) if side == "right" else slice(5 - count, 5)
        is_padded[row, of_trace], ids[row, of_trace] = False, 10 * row + np.arange(count)
    hidden *= ~is_padded[:, None, :, None]
    values = {"h": hidden, "m": is_padded if is_padding else ~is_padded, **({"ids": ids} if with_ids else {})}
    dump(tmp_path / "in/a.pkl", values)
    layout = {"hidden_states": "a.pkl : h -> N L S D"}
    return hidden, ~is_padded, layout | ({"tokens": "a.pkl : ids -> N S"} if with_ids else {})


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("line", LINES)
def test_ones_of_a_mask(line, side, with_ids, tmp_path):
    hidden, is_token, layout = batch(tmp_path, side, with_ids=with_ids, is_padding=line == "S.padding_mask")

    traces = convert(tmp_path, layout | {line: "a.pkl : m -> N S"})

    assert len(traces) == 3
    for trace, array, tokens in zip(traces.values(), hidden, is_token, strict=True):
        np.testing.assert_allclose(trace.hidden_states, array[:, tokens], atol=2e-3)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("line", LINES)
def test_an_inverted_mask_is_refused(line, side, tmp_path):
    _, _, layout = batch(tmp_path, side, is_padding=line == "S.mask")

    refuse(tmp_path, layout | {line: "a.pkl : m -> N S"}, f"{line}: .*several ids: .* Inverted. {LINES[line]}$")


def test_a_mask_of_the_answer_is_not_called_inverted(tmp_path):
    hidden, ids = states(2, 2, 5, 8), np.array([[1, 2, 3, 4, 5], [1, 2, 6, 7, 8]])
    dump(tmp_path / "in/a.pkl", {"h": hidden, "ids": ids, "m": np.array([[0, 0, 1, 1, 1]] * 2)})
    layout = {"hidden_states": "a.pkl : h -> N L S D", "tokens": "a.pkl : ids -> N S", "S.mask": "a.pkl : m -> N S"}

    refuse(tmp_path, layout, r"several ids: \[1, 2\]$")


def test_a_mask_and_its_complement_are_not_both_stated(tmp_path):
    _, _, layout = batch(tmp_path, "left")
    with pytest.raises(UsageError, match=r"S\.padding_mask: stated in addition to S\.mask"):
        convert(tmp_path, layout | dict.fromkeys(LINES, "a.pkl : m -> N S"))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("change", [0, -1, 1])
def test_rule_02_lengths_next_to_a_mask(line, side, change, tmp_path):
    """[lengths of the answer]"""
    hidden, is_token, layout = batch(tmp_path, side, is_padding=line == "S.padding_mask")
    save(tmp_path / "in/n.npy", np.add(COUNTS, [0, 0, change]))
    layout |= {line: "a.pkl : m -> N S", "S.lengths": "n.npy -> N"}

    if change:
        refuse(tmp_path, layout, f"trace 2, S.lengths: found {4 + change}, expected 4 as the mask says")
        return
    for more in ({}, {"S.side": side}):
        for trace, array, tokens in zip(convert(tmp_path, layout | more).values(), hidden, is_token, strict=True):
            np.testing.assert_allclose(trace.hidden_states, array[:, tokens], atol=2e-3)
