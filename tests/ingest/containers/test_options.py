"""Options of conversion that pickles and other containers share."""

import json

import numpy as np
import pytest

import tracestore
from tests.helpers import command, convert, error_of


def write_renamed(folder, name="a.npz", **changes):
    """Write a file with one trace whose keys have other names."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    values = {
        "signal": rng.random((2, 3, 8), np.float32),
        "attn": np.full((2, 2, 3, 3), 1 / 3, "f4"),
        "who": np.array("q7"),
    }
    np.savez(folder / name, **{**values, **changes})
    return values


def test_map_names_arrays_and_ids(tmp_path):
    values = write_renamed(tmp_path / "in")
    store = tmp_path / "s.zarr"
    convert(tmp_path / "in", store, "--map", "hidden_states=signal,question_id=who", "--dtype", "keep")
    with tracestore.open(store) as opened:
        assert opened.question_ids == ["q7"]
        np.testing.assert_array_equal(opened[0].hidden_states, values["signal"])


def test_a_refusal_tells_how_to_name_an_array(tmp_path):
    write_renamed(tmp_path / "in")
    error = convert(tmp_path / "in", tmp_path / "s.zarr", check=3).stderr
    assert "a.npz, trace 0, hidden_states: missing key" in error and error.endswith("try --map hidden_states=signal\n")


def test_skip_bad_skips_traces_of_a_table(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for k in range(3):
        hidden = rng.random((2, 3, 8), np.float32)
        np.save(folder / f"q{k}.npy", hidden if k != 1 else hidden.astype("i4"))
    store = tmp_path / "s.zarr"
    convert(folder, store, "--attention", "none", "--skip-bad")
    with tracestore.open(store) as opened:
        assert opened.question_ids == ["q0", "q2"]
    lines = [json.loads(line) for line in (tmp_path / "s.zarr.refused.jsonl").read_text().splitlines()]
    assert [line["source"] for line in lines] == ["q1.npy"]


def test_a_dry_run_lists_the_arrays_and_stores_nothing(tmp_path):
    write_renamed(tmp_path / "in")
    out = command("convert", tmp_path / "in", tmp_path / "s.zarr", "--dry-run").stdout
    assert "signal" in out and "who" in out and not (tmp_path / "s.zarr").exists()


@pytest.mark.parametrize(
    ("axes", "shape", "count", "expected"),
    [
        ("NLSD", (2, 3, 4, 8), 2, (3, 4, 8)),
        ("LNSD", (3, 2, 4, 8), 2, (3, 4, 8)),
        ("SLD", (4, 3, 8), 1, (3, 4, 8)),
        ("SD", (4, 8), 1, (1, 4, 8)),
        ("LND", (3, 2, 8), 2, (3, 8)),
        ("ND", (2, 8), 2, (1, 8)),
    ],
)
@pytest.mark.parametrize("form", ["npy", "h5"])
def test_axes_that_the_flag_names(tmp_path, form, axes, shape, count, expected):
    values = np.arange(np.prod(shape)).reshape(shape).astype("f4")
    if form == "npy":
        np.save(tmp_path / "a.npy", values)
    else:
        with pytest.importorskip("h5py").File(tmp_path / "a.h5", "w") as file:
            file["hidden_states"] = values

    convert(tmp_path / f"a.{form}", tmp_path / "s.zarr", "--attention", "none", "--axes", axes)

    store = tracestore.open(tmp_path / "s.zarr")
    got = [t.hidden_states if "S" in axes else t.last_token for t in store]
    assert len(store) == count and {np.shape(g) for g in got} == {expected}
    stacked = np.moveaxis(values, axes.find("N"), 0) if "N" in axes else values[None]
    order = [axes.replace("N", "").find(letter) for letter in ("LSD" if "S" in axes else "LD") if letter in axes]
    for k in range(count):
        np.testing.assert_array_equal(
            np.asarray(got[k]).reshape(expected), stacked[k].transpose(order).reshape(expected)
        )


def test_axes_of_another_number_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.ones((2, 8), "f4"))

    message = error_of("convert", tmp_path / "a.npy", tmp_path / "s.zarr", "--axes", "NLSD", code=3)

    assert "found shape (2, 8), which --axes NLSD does not name" in message
