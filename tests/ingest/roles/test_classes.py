"""Classes of answers in the names of folders and groups, and batches with their values in another dict."""

import h5py
import numpy as np
import pytest
import torch

import tracestore
from tests.helpers import convert, write_pickle
from tests.ingest.containers.layouts import base

NONE = ("--attention", "none")
STATES = [base(k, tokens=2 + k, attention=False)["hidden_states"].astype("f4") for k in range(3)]


@pytest.fixture
def stored(tmp_path):
    def convert_folder():
        convert(tmp_path / "in", tmp_path / "s.zarr", *NONE)
        return tracestore.open(tmp_path / "s.zarr")

    (tmp_path / "in").mkdir()
    return convert_folder


FOLDERS = {
    "one name each": (["correct/q0", "hallucinated/q1", "correct/q2"], ["q0", "q1", "q2"]),
    "two splits": (["train/correct/q0", "test/correct/q0", "test/wrong/q1"], ["train/q0", "test/q0", "test/q1"]),
    "one question in both": (["correct/q0", "wrong/q0", "wrong/q1"], ["correct/q0", "wrong/q0", "wrong/q1"]),
}


@pytest.mark.parametrize("suffix", [".npz", ".pkl"])
@pytest.mark.parametrize("case", FOLDERS)
def test_folders_name_the_class(tmp_path, suffix, case):
    names, ids = FOLDERS[case]
    for k, name in enumerate(names):
        path = tmp_path / "in" / f"{name}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        trace = {"hidden_states": STATES[k], "tokens": np.arange(2 + k)}
        if suffix == ".npz":
            np.savez(path, **trace)
        else:
            write_pickle(path, trace)
    done = convert(tmp_path / "in", tmp_path / "s.zarr", *NONE)
    assert "label (1: hallucination): found in the paths of 3 traces and used" in done.stdout
    assert ("keep the folder that names their class" in done.stdout) == (ids == names)
    with tracestore.open(tmp_path / "s.zarr") as store:
        labels = [float("correct" not in name) for name in names]
        assert [(store[i].label, len(store[i].tokens)) for i in ids] == list(zip(labels, (2, 3, 4), strict=True))


def test_names_of_files_name_the_class_if_both_are_there(tmp_path, stored):
    for name, k in (("correct_data", 0), ("hallucinated_data", 1), ("wrong_other", 2)):
        np.savez(tmp_path / "in" / f"{name}.npz", hidden_states=STATES[k], tokens=np.arange(2 + k))
    with stored() as store:
        assert {t.question_id: str(t.label) for t in store} == {
            "correct_data": "0.0",
            "hallucinated_data": "1.0",
            "wrong_other": "nan",
        }


def test_groups_name_the_class(tmp_path, stored):
    with h5py.File(tmp_path / "in/a.h5", "w") as file:
        for name, ids in (("correct", ["q0", "q2"]), ("hallucinated", ["q1", "q3", "q4"])):
            file[f"{name}/hidden_states"] = np.stack([STATES[int(n[1]) % 3][:, -1] for n in ids])
            file[f"{name}/question_ids"] = ids
    with stored() as store:
        assert {t.question_id: t.label for t in store} == {"q0": 0, "q1": 1, "q2": 0, "q3": 1, "q4": 1}


def test_values_in_a_dict_next_to_the_batch(tmp_path, stored):
    batch = {"hidden_states": torch.zeros(3, 4, 8), "input_ids": torch.ones(3, 4, dtype=torch.long)}
    batch["attention_mask"] = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 0], [0, 1, 1, 1]])
    for k, states in enumerate(STATES):
        batch["hidden_states"][k, batch["attention_mask"][k] != 0] = torch.from_numpy(states[0, :1])
    others = {"uid": np.array(["a", "b", "c"], object)}
    torch.save({"batch": batch, "non_tensor_batch": others, "meta_info": {"step": 4}}, tmp_path / "in/a.pt")
    with stored() as store:
        for name, states, length in zip("abc", STATES, (2, 3, 3), strict=True):
            np.testing.assert_allclose(store[name].hidden_states, states[:1, :1].repeat(length, 1), rtol=1e-3)


@pytest.mark.parametrize("lengths", [[2, 5, 3, 4], [5, 5, 5, 5]])
def test_states_with_time_first(tmp_path, stored, lengths):
    """pad_sequence of PyTorch returns (S, N, D)."""
    states = [torch.randn(n, 8).half() for n in lengths]
    value = {"hidden_states": torch.nn.utils.rnn.pad_sequence(states), "lengths": torch.tensor(lengths)}
    torch.save(value | {"question_ids": [f"q{k}" for k in range(4)]}, tmp_path / "in/a.pt")
    with stored() as store:
        for k, expected in enumerate(states):
            np.testing.assert_array_equal(store[f"q{k}"].hidden_states, expected.numpy()[None])
