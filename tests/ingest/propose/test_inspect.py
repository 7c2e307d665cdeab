"""Test `tracestore inspect`: what it prints and writes, and a folder that is too large to be read whole."""

import base64
import contextlib
import gzip
import json
import shlex
import sqlite3
import tarfile

import numpy as np
import pytest

import tracestore
from tests.helpers import command, make_traces
from tests.ingest.execute.folders import dump, states, table
from tests.ingest.propose.folders import proposal_of
from tests.ingest.propose.test_traps import rows


def test_a_proved_layout_is_written_and_converts(tmp_path):
    dump(tmp_path / "in/a.pkl", rows(is_correct=[0, 1, 1]))

    done = command("inspect", tmp_path / "in", "--write", tmp_path / "l.toml", check=0)
    command("convert", tmp_path / "in", tmp_path / "s.zarr", "--layout", tmp_path / "l.toml", check=0)

    assert "The files prove this layout:" in done.stdout
    assert "is_correct: 1 (correct) 2 times, 0 1 times" in done.stdout
    assert len(tracestore.open(tmp_path / "s.zarr")) == 3


def test_lines_of_a_candidate_are_pasted(tmp_path):
    dump(tmp_path / "in/a.pkl", rows(label=[0, 1, 1]))

    text = command("inspect", tmp_path / "in", check=0).stdout
    first = text.partition("\n1. ")[2].partition("\n2. ")[0]
    flags = [word for line in first.splitlines() if line.strip().startswith("--field") for word in shlex.split(line)]
    command("convert", tmp_path / "in", tmp_path / "s.zarr", *flags, check=0)

    assert "is_correct: 1 (correct) 2 times, 0 1 times" in first
    with tracestore.open(tmp_path / "s.zarr") as store:
        assert store.named_scores("is_correct").tolist() == [0, 1, 1]


@pytest.mark.parametrize("way", ["field", "layout"])
def test_lines_of_a_candidate_leave_out_what_was_left_out(tmp_path, way):
    dump(tmp_path / "in/a.pkl", rows(label=[0, 1, 1]))
    (tmp_path / "in/config.json").write_text('{"labels": ["a", "b"]}')
    (tmp_path / "l.toml").write_text('ignore = ["config.json"]')
    given = ["--field", "ignore = config.json"] if way == "field" else ["--layout", tmp_path / "l.toml"]

    text = command("convert", tmp_path / "in", tmp_path / "s.zarr", *given, check=3).stdout
    first = text.partition("\n1. ")[2].partition("\n2. ")[0]
    flags = [word for line in first.splitlines() if line.strip().startswith("--field") for word in shlex.split(line)]

    for number, also in enumerate(([], given)):
        command("convert", tmp_path / "in", tmp_path / f"{number}.zarr", *flags, *also, check=0)
        assert len(tracestore.open(tmp_path / f"{number}.zarr")) == 3


def test_candidates_are_written_as_comments(tmp_path):
    dump(tmp_path / "in/a.pkl", rows(label=[0, 1, 1]))

    command("inspect", tmp_path / "in", "--write", tmp_path / "l.toml", check=0)

    assert all(line.startswith("#") for line in (tmp_path / "l.toml").read_text().splitlines())
    done = command("convert", tmp_path / "in", tmp_path / "s.zarr", "--layout", tmp_path / "l.toml", check=2)
    assert "all lines are comments" in done.stderr


def test_json_holds_tree_and_candidates(tmp_path):
    dump(tmp_path / "in/a.pkl", rows(label=[0, 1, 1]))

    found = json.loads(command("inspect", tmp_path / "in", "--json", check=0).stdout)

    assert found["layout"] is None
    assert len(found["candidates"]) == 2
    assert "a.pkl : []/label: integers" in found["tree"]


def test_files_without_states_are_described(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.json").write_text('[{"question": "a", "score": 1}]')

    text = command("inspect", tmp_path / "in", check=0).stdout

    assert text.count("a.json : []/question: text") == 1
    assert "No array of floating-point numbers is named as hidden states" in text


@pytest.mark.long
def test_a_large_file_and_many_files_are_not_read_whole(tmp_path):
    lines = [json.dumps({"id": f"q{k}", "layer_3": [[1.5, 2.5], [0.5, k]][: 1 + k % 2]}) for k in range(10_000)]
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text("\n".join(lines))
    outcome = proposal_of(tmp_path).candidates[0].outcome
    assert outcome.is_partial
    assert outcome.num_traces == 2000
    (tmp_path / "in/a.jsonl").unlink()

    for k in range(1000):
        np.save(tmp_path / f"in/q{k}_layer3.npy", states(1 + k % 3, 4, seed=k))
    outcome = proposal_of(tmp_path).candidates[0].outcome
    assert outcome.is_partial
    assert outcome.num_traces == 400


def test_files_of_built_in_layouts_are_named_and_not_proposed(tmp_path):
    traces = make_traces(3)
    dump(tmp_path / "in/a.pkl", traces)
    dump(tmp_path / "in/b.pkl", traces)
    (tmp_path / "in/scores.csv").write_text("question_id,score\n")
    line = "a.pkl and 1 more: built-in layout traces, read without a flag"

    done = command("inspect", tmp_path / "in", "--write", tmp_path / "l.toml", check=0)

    assert done.stdout.splitlines()[-1] == line
    assert (tmp_path / "l.toml").read_text() == f"# {line}\n"


def test_a_table_next_to_files_of_a_built_in_layout_is_named(tmp_path):
    dump(tmp_path / "in/a.pkl", make_traces(3))
    (tmp_path / "in/labels.csv").write_text("question_id,is_correct\nq0,1\nq1,0\nq2,1\n")

    done = command("inspect", tmp_path / "in", check=0)

    line = "a.pkl: built-in layout traces, read without a flag; labels.csv may need --scores, a layout, or ignore"
    assert line in done.stdout.splitlines()


def test_what_was_found_is_written_where_no_layout_fits(tmp_path):
    (tmp_path / "in").mkdir()
    np.savez(tmp_path / "in/q1.npz", abc=np.zeros((3, 4)))

    command("inspect", tmp_path / "in", "--write", tmp_path / "l.toml", check=0)

    assert "q1.npz : abc: floats 3×4\n" in (tmp_path / "l.toml").read_text()


def test_places_are_printed_whole(tmp_path):
    name = "results_of_a_model_with_a_long_name_2025-03-02T10-11-12.345678"
    table(tmp_path / f"in/{name}.json", {"results": {"triviaqa": {"exact_match_stderr,remove_whitespace": 0.5}}})

    done = command("inspect", tmp_path / "in")

    assert f"{name}.json : results/triviaqa/exact_match_stderr\\,remove_whitespace: floats" in done.stdout


@pytest.mark.parametrize(("shape", "name"), [((2, 4, 8), "id"), ((4, 8), "layer"), ((1, 4, 8), "layer")])
def test_numbers_of_arrays_of_a_trace_are_layers_only_where_an_array_may_be_one(tmp_path, shape, name):
    for k in range(3):
        (tmp_path / f"in/q{k}").mkdir(parents=True)
        np.savez(tmp_path / f"in/q{k}/hs.npz", **{str(n): states(*shape, seed=k) for n in range(12, 17)})

    done = command("inspect", tmp_path / "in")

    assert f"{{id}}/hs.npz : {{{name}}}: floats" in done.stdout


def test_fractions_are_a_score_not_a_label(tmp_path):
    dump(tmp_path / "in/a.pkl", rows(rouge_to_target=[0.25, 0.5, 0.125]))

    done = command("inspect", tmp_path / "in")

    assert "correctness.rouge_to_target =" in done.stdout
    assert "is_correct" not in done.stdout


@pytest.mark.parametrize("name", ["states.dat", "states.bin", "h.raw", "l_out-0.f32", "0.0.0"])
def test_a_refusal_says_what_to_do_with_raw_numbers(tmp_path, name):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(states(4, 8).astype("f2").tobytes())
    (tmp_path / "in/index.json").write_text('{"shape": [4, 8], "dtype": "float16"}')
    wanted = f"{name}: no format that is read; raw numbers: numpy.fromfile reads them, numpy.save"
    assert wanted in proposal_of(tmp_path).refusal()


def _tar(path):
    with tarfile.open(path, "w") as archive:
        archive.add(__file__, "q0.npy")


def _sqlite(path):
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("create table t (id text)")
        database.commit()


def _matlab(path):
    path.write_bytes(b"MATLAB 5.0 MAT-file Platform: posix".ljust(124) + b"\0\1IM" + bytes(64))


@pytest.mark.parametrize("suffix", ["", ".dat"])
@pytest.mark.parametrize(
    ("write", "way"),
    [(_tar, "an archive: unpack it"), (_sqlite, "a SQLite database: export"), (_matlab, "a MATLAB file: load it with")],
)
def test_a_container_that_is_not_read_is_named(tmp_path, write, way, suffix):
    (tmp_path / "in").mkdir()
    write(tmp_path / f"in/data.x{suffix}")

    refusal = proposal_of(tmp_path).refusal()

    assert refusal.startswith(f"no layout fits: data.x{suffix}: {way}")
    assert "tracestore inspect" not in refusal
    if write is _tar and not suffix:
        packed = tmp_path / "in/data.tgz"
        packed.write_bytes(gzip.compress((tmp_path / "in/data.x").read_bytes()))
        assert f"data.tgz: not read: {way}" in proposal_of(tmp_path).message()


def test_an_array_with_the_mark_of_an_archive_is_an_array(tmp_path):
    (tmp_path / "in").mkdir()
    array = np.zeros((4, 200), "u1")
    array.reshape(-1)[257 - 128 :][:5] = list(b"ustar")
    np.save(tmp_path / "in/a.npy", array)

    assert (tmp_path / "in/a.npy").read_bytes()[257:262] == b"ustar"
    assert "a.npy: integers 4×200" in "\n".join(proposal_of(tmp_path).tree())


def test_raw_numbers_next_to_a_table_are_named(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/h.bin").write_bytes(states(4, 8).tobytes())
    (tmp_path / "in/index.json").write_text('{"items": [{"id": "a"}, {"id": "b"}], "dtype": "float32"}')

    done = command("convert", tmp_path / "in", tmp_path / "s.zarr", check=3)

    assert "h.bin: no format that is read; raw numbers: numpy.fromfile reads them" in done.stderr


@pytest.mark.parametrize("key", ["hidden_b64", "h_base64", "data"])
def test_base64_is_recognized(tmp_path, key):
    (tmp_path / "in").mkdir()
    rows = [{key: base64.b64encode(states(4, 8, seed=k).tobytes()).decode(), "sha": "0f" * 64} for k in range(3)]
    (tmp_path / "in/a.jsonl").write_text("\n".join(map(json.dumps, rows)))

    assert proposal_of(tmp_path).tree() == [
        f"a.jsonl : []/{key}: text (base64: dtype and shape entries read it)",
        "a.jsonl : []/sha: text",
    ]
