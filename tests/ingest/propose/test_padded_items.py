"""Test traces that were saved one by one after a program padded them: padding is cut or asked, never stored as tokens."""

import numpy as np
import pytest

import tracestore
from tests.ingest.execute.folders import dump, states
from tests.ingest.propose.folders import accept, proposal_of, refuse

LENGTHS = ("length", "lengths", "seq_len", "num_tokens", "n_tokens", "seq_length", "sequence_length", "valid_length")
COUNTS = ("total_tokens", "token_count")


def padded(k, *, num=5, width=8, left=False, **more):
    """Return a trace of `num` + k tokens, padded to a width."""
    own, rest = list(range(5, 5 + num + k)), [0] * (width - num - k)
    ids = np.array(rest + own if left else own + rest)
    return {"hidden_states": states(4, width, 12, seed=k), "input_ids": ids, "is_correct": k % 2, **more}


def write(tmp_path, items, container):
    """Write traces as a file each or as a list."""
    path = tmp_path / "in"
    path.mkdir()
    if container == "list":
        dump(path / "a.pkl", [{"id": f"q{k}", **item} for k, item in enumerate(items)])
    for k, item in enumerate(items if container == "files" else ()):
        np.savez(path / f"q{k}.npz", **item)


@pytest.mark.parametrize("container", ["files", "list"])
@pytest.mark.parametrize("name", [*LENGTHS, *COUNTS])
def test_lengths_cut_the_padding(tmp_path, name, container):
    write(tmp_path, [padded(k, num=4, **{name: 4 + k}) for k in range(3)], container)
    traces = accept(tmp_path)
    assert [traces[f"q{k}", 0].num_tokens for k in range(3)] == [4, 5, 6]
    assert traces["q1", 0].tokens.tolist() == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("container", ["files", "list"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"left": True},
        {"prompt_len": 2},
        {"left": True, "prompt_len": 2},
        {"seq_len": 8},
        {"max_length": 8},
        {"answer_length": 2},
        {"num_chars": 40},
    ],
    ids=str,
)
def test_ids_that_repeat_at_one_end_are_asked(tmp_path, more, container):
    write(tmp_path, [padded(k, num=3, **more) for k in range(4)], container)
    refuse(tmp_path, "nothing tells tokens from padding")


def test_batches_of_several_widths_that_were_saved_one_by_one(tmp_path):
    write(tmp_path, [padded(k % 2, num=4, width=8 + k // 2) for k in range(4)], "files")
    refuse(tmp_path, "nothing tells tokens from padding")


def test_one_padded_trace_among_traces_of_one_length(tmp_path):
    write(tmp_path, [padded(k, num=6 - 2 * (k == 0)) for k in range(3)], "files")
    refuse(tmp_path, "nothing tells tokens from padding")


def test_texts_of_padding(tmp_path):
    items = [{**padded(k), "tokens": [f"w{j}" for j in range(5 + k)] + ["<pad>"] * (3 - k)} for k in range(2)]
    write(tmp_path, [{name: value for name, value in item.items() if name != "input_ids"} for item in items], "list")
    refuse(tmp_path, "nothing tells tokens from padding")


def test_equal_states_at_one_end(tmp_path):
    items = [{"hidden_states": states(4, 6 + k, 12, seed=k), "is_correct": k % 2} for k in range(3)]
    for item in items[1:]:
        item["hidden_states"][:, -2:] = 1.5
    write(tmp_path, items, "files")
    refuse(tmp_path, "nothing tells tokens from padding")


def test_lengths_that_leave_out_tokens_are_asked(tmp_path):
    items = [{**padded(0, num=8 + k, width=8 + k), "seq_len": 4} for k in range(3)]
    write(tmp_path, items, "files")
    refuse(tmp_path)


@pytest.mark.parametrize(
    "more",
    [{}, {"seq_len": None}, {"num_chars": 40}, {"length": 40}, {"answer_length": 2}, {"prompt_len": 2}],
    ids=str,
)
def test_traces_without_padding_are_proved(tmp_path, more):
    items = []
    for k in range(3):
        own = {name: 6 + k if value is None else value for name, value in more.items()}
        items.append(padded(0, num=6 + k, width=6 + k, **own))
    # One answer may end with an id twice.
    items[1]["input_ids"][-1] = items[1]["input_ids"][-2]
    write(tmp_path, items, "files")
    assert [accept(tmp_path)[f"q{k}", 0].num_tokens for k in range(1)] == [6]


def test_the_line_of_padding_states_that_there_is_none(tmp_path):
    write(tmp_path, [padded(k, num=3) for k in range(4)], "files")
    entries = proposal_of(tmp_path).candidates[0].layout.to_entries()
    tracestore.convert_files(tmp_path / "in", tmp_path / "s.zarr", layout={**entries, "S.padding": "none"})
    assert {trace.num_tokens for trace in tracestore.open(tmp_path / "s.zarr")} == {8}
