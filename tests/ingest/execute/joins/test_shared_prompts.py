"""Test a prompt that the answers of a question share: two addresses, of which only the second one tells them apart."""

import h5py
import numpy as np
import pytest

from tests.ingest.execute.folders import convert, dump, refuse, save, states
from tracestore.errors import UsageError

NAMES = ("q0", "q1")
LAYOUT = {
    "hidden_states": ["a.h5 : {id}/prompt -> L S D", "a.h5 : {id}/samples/{sample}/hs -> L S D"],
    "tokens": ["a.h5 : {id}/prompt_ids", "a.h5 : {id}/samples/{sample}/ids"],
    "is_correct": "a.h5 : {id}/samples/{sample}/@ok",
}


def write(tmp_path, samples=(0, 1, 2)):
    """Write groups of questions; return the expected states, ids and labels."""
    (tmp_path / "in").mkdir(exist_ok=True)
    expected = {}
    with h5py.File(tmp_path / "in/a.h5", "w") as file:
        for q, name in enumerate(NAMES):
            prompt, ids = states(2, 3 + q, 8, seed=q), np.arange(3 + q) + 100 * q
            file[f"{name}/prompt"], file[f"{name}/prompt_ids"] = prompt, ids
            for k in samples:
                answer, own = states(2, 2 + k, 8, seed=10 * q + k + 5), np.arange(2 + k) + 1000 * k
                file[f"{name}/samples/{k}/hs"], file[f"{name}/samples/{k}/ids"] = answer, own
                file[f"{name}/samples/{k}"].attrs["ok"] = (q + k) % 2
                whole = np.concatenate([prompt, answer], axis=1)
                expected[name, k] = whole, np.concatenate([ids, own]), (q + k) % 2, 3 + q
    return expected


def check(traces, expected):
    """Assert that each answer is behind the prompt of its question."""
    assert traces.keys() == expected.keys()
    for key, (whole, ids, label, length) in expected.items():
        np.testing.assert_allclose(traces[key].hidden_states, whole, rtol=2e-3, atol=1e-3)
        assert traces[key].tokens.tolist() == ids.tolist() and traces[key].prompt_length == length
        assert traces[key].scores["is_correct"] == label


def test_answers_in_groups(tmp_path):
    expected = write(tmp_path)

    check(convert(tmp_path, LAYOUT), expected)


def test_answers_in_lists_and_in_files(tmp_path):
    expected = write(tmp_path)
    rows = []
    for q, name in enumerate(NAMES):
        of_name = [found for (question, _), found in expected.items() if question == name]
        cut = 3 + q
        rows.append({"id": name, "prompt": of_name[0][0][:, :cut], "prompt_ids": of_name[0][1][:cut].tolist()})
        answers = [{"hs": w[:, cut:], "ids": ids[cut:].tolist(), "ok": ok} for w, ids, ok, _ in of_name]
        rows[-1]["samples"] = answers
        save(tmp_path / f"in/f/{name}.npy", rows[-1]["prompt"])
        for k, answer in enumerate(answers):
            save(tmp_path / f"in/f/{name}_{k}.npy", answer["hs"])
    dump(tmp_path / "in/a.pkl", rows)
    (tmp_path / "in/a.h5").unlink()
    (tmp_path / "in/f").rename(tmp_path / "f")
    layout = {
        name: [one.replace("a.h5 : {id}", "a.pkl : [id=id]").replace("{sample}", "[K]") for one in found]
        for name, found in LAYOUT.items()
        if isinstance(found, list)
    }

    check(convert(tmp_path, layout | {"is_correct": "a.pkl : [id=id]/samples/[K]/ok"}), expected)

    (tmp_path / "in/a.pkl").unlink()
    (tmp_path / "f").rename(tmp_path / "in/f")
    layout = {"hidden_states": ["f/{id}.npy -> L S D", "f/{id}_{sample}.npy -> L S D"]}
    traces = convert(tmp_path, layout, overwrite=True)
    for key, (whole, *_) in expected.items():
        np.testing.assert_allclose(traces[key].hidden_states, whole, rtol=2e-3, atol=1e-3)


def test_a_prompt_or_an_answer_that_is_missing(tmp_path):
    write(tmp_path)
    with h5py.File(tmp_path / "in/a.h5", "a") as file:
        file["q2/prompt"], file["q2/prompt_ids"] = states(2, 3, 8), np.arange(3)
    refuse(tmp_path, LAYOUT, "id q2 has a prompt and no answer")

    with h5py.File(tmp_path / "in/a.h5", "a") as file:
        del file["q2"], file["q1/prompt"], file["q1/prompt_ids"]
    refuse(tmp_path, LAYOUT, "q1.* has no part 0")


def test_ids_of_the_prompt_alone_are_not_those_of_answers(tmp_path):
    write(tmp_path)
    refuse(
        tmp_path,
        LAYOUT | {"tokens": "a.h5 : {id}/prompt_ids", "ignore": ["a.h5 : {id}/samples/{sample}/ids"]},
        "tokens",
    )
    write(tmp_path, samples=(0,))
    refuse(
        tmp_path,
        {
            "hidden_states": LAYOUT["hidden_states"],
            "tokens": LAYOUT["tokens"][::-1],
            "is_correct": LAYOUT["is_correct"],
        },
        "tokens|prompt_length",
    )


@pytest.mark.parametrize("name", ["split", "n"])
def test_other_names_of_one_address(tmp_path, name):
    save(tmp_path / "in/q0.npy", states(2, 3, 8))
    save(tmp_path / "in/q0_x.npy", states(2, 3, 8, seed=1))
    with pytest.raises(UsageError, match=f"only one of its addresses binds {name}"):
        convert(tmp_path, {"hidden_states": ["{id}.npy", f"{{id}}_{{{name}}}.npy"]})
