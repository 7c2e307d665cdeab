"""The pages about input files: every command of docs/new_tool.md with its output, and every example of docs/inputs.md."""

import doctest
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

import tracestore
from tests.helpers import ROOT, write_pickle
from tests.ingest.builtin.checks import check_builtin
from tracestore.ingest.builtin.library import parse_builtin
from tracestore.ingest.layout.fields import FIELDS
from tracestore.store import vocabulary
from tracestore.store.format import schema

INPUTS, NEW_TOOL, ENTRIES = ((ROOT / f"docs/{name}.md").read_text() for name in ("inputs", "new_tool", "fields"))
BUILTIN_LAYOUT = (ROOT / "tracestore/ingest/builtin/tools/README.md").read_text()
rng = np.random.default_rng(0)
torch = pytest.importorskip("torch")


def blocks(page):
    """Return (language, text) of each fenced block of a page, in order."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


@pytest.mark.long
def test_the_commands_of_the_page_about_a_new_tool_print_what_it_says(tmp_path):
    scripts = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    num_commands = 0
    for language, text in blocks(NEW_TOOL):
        if language == "python":
            subprocess.run([sys.executable, "-c", text], cwd=tmp_path, env=environment, check=True)
        elif (name := re.match(r"# (\w+\.toml)\n", text)) is not None:
            (tmp_path / name[1]).write_text(text)
        for command, expected in re.findall(
            r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text if language == "console" else "", re.M
        ):
            words = [sys.executable, "-m", *shlex.split(command)]
            done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
            # A shell shows both streams; here the refusal is the last line.
            found = done.stdout + done.stderr
            matches = doctest.OutputChecker().check_output(expected, found, doctest.ELLIPSIS)
            assert matches, f"{command}\n{found}\nexpected:\n{expected}"
            num_commands += 1
    assert num_commands == 5


def test_the_built_in_layout_of_the_page_is_one():
    (text,) = [text for language, text in blocks(BUILTIN_LAYOUT) if language == "toml" and "[signature" in text]
    (builtin,) = parse_builtin("example", text)

    check_builtin(builtin)
    assert builtin.layout.addresses.keys() == {"hidden_states", "tokens"}


def states(*shape):
    """Return random states."""
    return rng.standard_normal(shape).astype("f2")


def write_list_of_dicts(folder):
    write_pickle(folder / "a.pkl", [{"qid": f"q{k}", "hs": states(2, 4 + k, 8)} for k in range(3)])


def write_files_by_class(folder):
    for k in range(4):
        path = folder / ("hallucinated" if k % 2 else "correct") / f"q{k}.npz"
        path.parent.mkdir(exist_ok=True)
        np.savez(path, hs=states(2, 4 + k, 8))


def write_files_by_layer(folder):
    for layer in (8, 16):
        np.save(folder / f"layer_{layer}.npy", states(3, 8))
    (folder / "statements.csv").write_text("id,ok\na,1\nb,0\nc,1\n")


def write_padded_stack(folder):
    mask = np.arange(6) < np.array([[6], [4], [5]])
    np.savez(
        folder / "a.npz",
        hidden=states(3, 2, 6, 8) * mask[:, None, :, None],
        input_ids=np.where(mask, rng.integers(5, 99, (3, 6)), 0),
        attention_mask=mask.astype("i8"),
    )


def write_rows_behind_each_other(folder):
    np.save(folder / "a.npy", states(12, 2, 8))
    (folder / "index.csv").write_text("question_id,start,end\na,0,5\nb,5,8\nc,8,12\n")


PASSES = ((0, 5), (5, 6), (6, 7))  # the tokens of each pass of generate()


def write_generated_batches(folder):
    for batch in range(2):
        passes = tuple(tuple(torch.tensor(states(3, n, 8)) for _ in range(2)) for n in (5, 1, 1))
        sequences, mask = torch.randint(5, 99, (3, 8)), torch.ones(3, 5, dtype=torch.long)
        mask[1, :2] = 0
        sequences[1, :2], sequences[2, 6], sequences[2, 7] = 0, 2, 0
        ids = [f"q{batch}{row}" for row in range(3)]
        weights = torch.tril(torch.rand(7, 7) + 0.1)
        attention = [
            (weights / weights.sum(-1, keepdim=True)).expand(3, 2, 7, 7)[:, :, a:b, :b].clone() for a, b in PASSES
        ]
        found = {"hidden_states": passes, "sequences": sequences, "attention_mask": mask, "ids": ids}
        found["attentions"] = tuple((of_pass, of_pass) for of_pass in attention)
        torch.save(found, folder / f"b_{batch}.pt")


def write_rows_by_token(folder):
    rows = [(f"q{k}", token) for k in range(3) for token in range(4 + k)]
    layers = [{"3": states(8).astype("f4"), "7": states(8).astype("f4")} for _ in rows]
    columns = {"example": [i for i, _ in rows], "pos": [p for _, p in rows], "tok_id": [7 * p for _, p in rows]}
    parquet.write_table(pa.table({**columns, "layers": layers}), folder / "t.parquet")


def write_answers(folder):
    answers = {f"q{k}": [{"hs": states(2, 4 + j, 8), "text": f"{k}{j}"} for j in range(2)] for k in range(3)}
    write_pickle(folder / "s.pkl", {i: {"samples": samples} for i, samples in answers.items()})


def write_batches(folder):
    for chunk in range(2):
        lengths = np.array([5, 3])
        mask = np.arange(5) < lengths[:, None]
        np.savez(folder / f"batch_{chunk}.npz", hidden=states(2, 2, 5, 8) * mask[:, None, :, None], lengths=lengths)
    np.save(folder / "labels.npy", np.array([0, 1, 1, 0]))


def write_groups(folder):
    with h5py.File(folder / "a.h5", "w") as file:
        for k in range(3):
            group = file.create_group(f"q{k}")
            group.attrs["question"] = f"Question {k}?"
            for layer in (3, 7):
                group[f"layer_{layer}"] = states(4 + k, 8)


# What an example's files hold, the keys of the first traces, their lengths, and their labels or texts.
EXAMPLES = {
    1: (write_list_of_dicts, ["q0", "q1", "q2"], [4, 5, 6], []),
    2: (write_files_by_class, ["q0", "q2", "q1"], [4, 6, 5], [1, 1, 0, 0]),
    3: (write_files_by_layer, ["a", "b", "c"], None, [1, 0, 1]),
    4: (write_padded_stack, ["a.npz:0", "a.npz:1", "a.npz:2"], [6, 4, 5], []),
    5: (write_rows_behind_each_other, ["a", "b", "c"], [5, 3, 4], []),
    6: (write_generated_batches, ["q00", "q01", "q02", "q10"], [7, 5, 6, 7], []),
    7: (write_rows_by_token, ["q0", "q1", "q2"], [4, 5, 6], []),
    8: (write_answers, ["q0", "q0", "q1"], [4, 5, 4], []),
    9: (write_batches, None, [5, 3, 5, 3], [0, 1, 1, 0]),
    10: (write_groups, ["q0", "q1", "q2"], [4, 5, 6], []),
}


def examples():
    """Return the lines of each example of the page by its number."""
    text = INPUTS.split("## Ten examples\n")[1].split("\n## ")[0]
    found = re.findall(r"^    # (\d+)\. .*\n((?:    .*\n)+)", text, re.MULTILINE)
    return {int(number): lines.replace("    ", "") for number, lines in found}


def test_the_page_has_ten_examples():
    assert examples().keys() == EXAMPLES.keys()


@pytest.mark.parametrize("number", EXAMPLES)
def test_an_example_of_the_page_converts(tmp_path, number):
    write, ids, lengths, labels = EXAMPLES[number]
    folder = tmp_path / "dump"
    folder.mkdir()
    write(folder)
    (tmp_path / "layout.toml").write_text(examples()[number])

    tracestore.convert_files(folder, tmp_path / "s.zarr", layout=tmp_path / "layout.toml")

    with tracestore.open(tmp_path / "s.zarr") as store:
        assert store.num_layers == 2
        assert ids is None or store.question_ids[: len(ids)] == ids
        assert lengths is None or [trace.num_tokens for trace in store][: len(lengths)] == lengths
        assert [trace.score for trace in store][: len(labels)] == labels
        if number == 8:
            assert [trace.answer for trace in store] == ["00", "01", "10", "11", "20", "21"]
        if number == 10:
            assert store[1].question == "Question 1?"


def test_the_page_names_every_word_of_labels():
    (line,) = [line for line in INPUTS.splitlines() if line.startswith("- Values are ")]
    named = set(re.findall(r"`(\w+)`", line))
    for word in vocabulary.WORDS:
        bare = re.sub(r"^(in|un|not[ _])", "", word)
        assert {word, bare} & named, word


def test_the_plain_pages_name_every_field_with_its_axes():
    for name, rule in FIELDS.items():
        page = ENTRIES if rule.kind == "known" else INPUTS + ENTRIES
        assert f"`{name}`" in page or f"`{name} = " in page, f"{name}: add it to docs/fields.md or docs/inputs.md"
    for name in schema.TOKEN_FIELDS.keys() - {"token_logprob", "token_entropy"}:  # in a row of docs/inputs.md
        (axes,) = [
            found[1] for found in re.finditer(r"; (S(?: K)?): ((?:`\w+`(?:, )?)+)", ENTRIES) if f"`{name}`" in found[2]
        ]
        assert axes.split() == list(FIELDS[name].axes)


def test_the_page_is_short():
    assert len(INPUTS.encode()) <= 14 * 1024
