"""Test converting again: kept layouts; labels, scores and groups that have changed; interruptions between commits."""

import itertools
import json
import shlex
import shutil

import numpy as np
import pytest

import tracestore
from tests.helpers import command, convert, error_of, field_flags, make_traces, write_pickle, write_store
from tests.ingest.execute.folders import dump, states, table
from tests.malicious_inputs.stores import Store
from tracestore.convert import cutting
from tracestore.errors import CorruptStoreError
from tracestore.store.format.entries import Fingerprint
from tracestore.store.maintain.lint import lint_store, lint_traces
from tracestore.store.write.writer import StoreWriter

LINES = ["hidden_states = *.pkl : [id=id]/hs -> L S D", "is_correct = labels.csv : [id=id]/ok"]
FLAGS = field_flags(*LINES)
SCORE_CELLS = ["0", "-0.0", "1", "0.25", "nan", ""]
LABEL_CELLS = ["0", "1", "0.0", "true", "nan", ""]
GROUP_CELLS = ["0", "1", "a", "0.0", "nan", ""]
PAIRS = list(itertools.product(range(6), repeat=2))  # of an old and a new value
COUNT = len(PAIRS)


def rows(*numbers):
    return [{"id": f"q{k}", "hs": states(2, 4, 8, seed=k)} for k in numbers]


def write_labels(folder, values):
    table(folder / "labels.csv", [{"id": f"q{k}", "ok": value} for k, value in enumerate(values)])


def labels(store):
    """Return the stored scores of is_correct by id."""
    opened = tracestore.open(store)
    return dict(zip(opened.question_ids, opened.scores.tolist(), strict=True))


def stored_traces(store):
    """Return question, states and scores by key."""
    return {
        (t.question_id, t.sample): (t.question, t.hidden_states.tobytes(), tuple(t.scores.items()))
        for t in tracestore.open(store)
    }


@pytest.fixture
def folder(tmp_path):
    dump(tmp_path / "in/a.pkl", rows(0, 1))
    write_labels(tmp_path / "in", [1, 0])
    return tmp_path / "in"


def test_new_files_are_read_by_the_layout_of_the_store(tmp_path, folder):
    convert(folder, tmp_path / "s.zarr", *FLAGS)
    dump(folder / "b.pkl", rows(2, 3))
    write_labels(folder, [1, 0, 0, 1])

    convert(folder, tmp_path / "s.zarr")

    assert labels(tmp_path / "s.zarr") == {"q0": 1, "q1": 0, "q2": 0, "q3": 1}
    store = tracestore.open(tmp_path / "s.zarr")
    np.testing.assert_allclose(store[store.index_of("q3")].hidden_states, rows(3)[0]["hs"], rtol=1e-3)
    (text,) = store.internals.attributes.layouts
    assert '[id=id]/hs -> L S D"' in text


def test_a_file_that_no_kept_line_names_is_refused(tmp_path, folder):
    convert(folder, tmp_path / "s.zarr", *FLAGS)
    np.save(folder / "more.npy", states(3, 4))

    assert "more.npy" in error_of("convert", folder, tmp_path / "s.zarr", code=3)


@pytest.mark.long
def test_a_damaged_store_is_replaced_by_its_own_layout(tmp_path, folder):
    convert(folder, tmp_path / "first.zarr", *FLAGS)
    names = [p.relative_to(tmp_path / "first.zarr") for p in (tmp_path / "first.zarr").rglob("*") if p.is_file()]
    for k, name in enumerate(name for name in names if str(name) not in ("lock", "zarr.json")):
        store = shutil.copytree(tmp_path / "first.zarr", tmp_path / f"{k}.zarr")
        data = bytearray((store / name).read_bytes())
        data[len(data) // 2] ^= 1
        (store / name).write_bytes(data)
        assert "damaged: " in command("verify", store, check=3).stderr

        convert(folder, store, "--overwrite")

        command("verify", store, check=0)
        assert labels(store) == {"q0": 1, "q1": 0}, name


def test_another_layout_is_added(tmp_path, folder):
    convert(folder, tmp_path / "s.zarr", *FLAGS)
    dump(tmp_path / "more/b.joblib", [{"name": "x", "acts": states(2, 4, 8, seed=9)}])
    convert(tmp_path / "more", tmp_path / "s.zarr", "--field", "hidden_states = *.joblib : [id=name]/acts -> L S D")

    assert len(tracestore.open(tmp_path / "s.zarr").internals.attributes.layouts) == 2
    convert(folder, tmp_path / "s.zarr")
    assert sorted(tracestore.open(tmp_path / "s.zarr").question_ids) == ["q0", "q1", "x"]


@pytest.mark.parametrize("columns", [["ok", "other", "ok"], ["ok", "ok", "other"], ["other", "ok", "ok"]])
def test_the_last_stated_layout_reads_new_files(tmp_path, folder, columns):
    table(folder / "labels.csv", [{"id": f"q{k}", "ok": k % 2, "other": 1 - k % 2} for k in range(3)])
    for column, left_out in ((name, {"ok": "other", "other": "ok"}[name]) for name in columns):
        label = LINES[1].replace("/ok", f"/{column}")
        convert(folder, tmp_path / "s.zarr", *field_flags(LINES[0], label, f"ignore = labels.csv : []/{left_out}"))
    dump(folder / "b.pkl", rows(2))

    convert(folder, tmp_path / "s.zarr")

    assert labels(tmp_path / "s.zarr") == {f"q{k}": (k % 2) ^ (columns[-1] == "other") for k in range(3)}


def test_the_last_stated_layout_is_kept_if_it_changes_no_trace(tmp_path, folder):
    without = field_flags(LINES[0], "ignore = labels.csv")
    for flags in (without, FLAGS, without):
        convert(folder, tmp_path / "s.zarr", *flags)
    dump(folder / "b.pkl", rows(2))
    write_labels(folder, [1, 0, 0])

    convert(folder, tmp_path / "s.zarr")

    assert str(labels(tmp_path / "s.zarr")) == "{'q0': 1.0, 'q1': 0.0, 'q2': nan}"


def test_a_layout_that_was_refused_reads_no_later_files(tmp_path, folder):
    convert(folder, tmp_path / "s.zarr", *FLAGS)
    inverted = field_flags(LINES[0], LINES[1].replace("is_correct", "is_hallucinated"))
    assert "expected that they agree" in error_of("convert", folder, tmp_path / "s.zarr", *inverted, code=3)
    dump(folder / "b.pkl", rows(2))
    write_labels(folder, [1, 0, 0])

    convert(folder, tmp_path / "s.zarr")

    assert labels(tmp_path / "s.zarr") == {"q0": 1, "q1": 0, "q2": 0}


# Two layouts of files of one name, of which the second one gives the opposite labels, or other axes.
STATED = {
    "column": [
        [
            "hidden_states = {id}.npz : hs -> L S D",
            f"is_correct = labels.csv : [id=id]/{own}",
            f"ignore = labels.csv : []/{x}",
        ]
        for own, x in ("vz", "zv")
    ],
    "words": [
        [
            "hidden_states = {id}.npz : hs -> L S D",
            "is_correct = labels.csv : [id=id]/w",
            f"words.T = {own}",
            f"words.F = {other}",
        ]
        for own, other in (("true", "false"), ("false", "true"))
    ],
    "axes": [
        [f"hidden_states = {{id}}.npz : hs -> {axes}", "is_correct = labels.csv : [id=id]/v"]
        for axes in ("L S D", "S L D")
    ],
}


def write_folder(folder, ids, kind):
    """Write files of traces whose labels are all 1 by the layout of the folder, with their table."""
    folder.mkdir(exist_ok=True)
    is_second = folder.name == "b"
    for k, name in enumerate(ids):
        array = states(3, 3, 8, seed=k + 10 * is_second)
        np.savez(folder / f"{name}.npz", hs=array.transpose(1, 0, 2) if kind == "axes" and is_second else array)
    row = {"words": {"w": "F" if is_second else "T"}, "axes": {"v": 1}}.get(
        kind, {"v": 1 - is_second, "z": int(is_second)}
    )
    table(folder / "labels.csv", [{"id": name} | row for name in ids])


def convert_two(tmp_path, kind, *flags):
    """Convert two folders, each by its own layout; return the flags of both."""
    lines = [[*field_flags(*stated), *flags] for stated in STATED[kind]]
    for name, own in zip("ab", lines, strict=True):
        write_folder(tmp_path / name, [f"{name}{k}" for k in range(3)], kind)
        convert(tmp_path / name, tmp_path / "s.zarr", *own)
    return lines


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("kind", STATED)
def test_each_source_keeps_its_layout(tmp_path, kind, workers):
    """A conversion without lines read all files by the newest layout, and inverted their labels."""
    flags = "--workers", workers
    convert_two(tmp_path, kind, *flags)
    before = stored_traces(tmp_path / "s.zarr")

    for name in "aba":
        assert "(3 files already in the store" in convert(tmp_path / name, tmp_path / "s.zarr", *flags).stdout
    assert stored_traces(tmp_path / "s.zarr") == before

    path = tmp_path / "a/labels.csv"
    path.write_text(path.read_text() + "other" + path.read_text().splitlines()[-1][2:] + "\n")
    assert "3 files skipped" not in convert(tmp_path / "a", tmp_path / "s.zarr", *flags).stdout
    assert stored_traces(tmp_path / "s.zarr") == before
    assert set(labels(tmp_path / "s.zarr").values()) == {1}
    convert(tmp_path / "a", tmp_path / "s.zarr", *flags, "--overwrite")
    assert labels(tmp_path / "s.zarr") == {f"a{k}": 1 for k in range(3)}


@pytest.mark.parametrize("kind", STATED)
def test_a_new_file_that_layouts_of_several_sources_fit_is_refused(tmp_path, kind):
    lines = convert_two(tmp_path, kind)
    for name in "ab":
        write_folder(tmp_path / name, [f"{name}{k}" for k in range(4)], kind)

    for name, own in zip("ab", lines, strict=True):
        refused = error_of("convert", tmp_path / name, tmp_path / "s.zarr", code=3)
        assert f"{name}3.npz: layouts of this store that differ fit it" in refused
        pasted = [part.split(" as for ")[0] for part in refused.split("state its own layout: ")[1].split(", or ")]
        stated = {tuple(shlex.split(part)) for part in pasted}
        assert len(stated) == 2 and tuple(own) in stated
        assert len(tracestore.open(tmp_path / "s.zarr")) == 6 + (name == "b")
        convert(tmp_path / name, tmp_path / "s.zarr", *own)
    before = stored_traces(tmp_path / "s.zarr")
    assert set(labels(tmp_path / "s.zarr").values()) == {1}

    for name in "ab":
        convert(tmp_path / name, tmp_path / "s.zarr")
    assert stored_traces(tmp_path / "s.zarr") == before


def test_files_of_one_name_in_two_folders_keep_their_layouts(tmp_path):
    for name, value in (("a", 1), ("b", 0)):
        dump(tmp_path / name / "all.pkl", [row | {"v": value, "z": 1 - value} for row in rows(value)])
    lines = [
        [LINES[0], f"is_correct = *.pkl : [id=id]/{own}", f"ignore = *.pkl : [id=id]/{other}"]
        for own, other in ("vz", "zv")
    ]
    for name, own in zip("ab", lines, strict=True):
        convert(tmp_path / name, tmp_path / "s.zarr", *field_flags(*own))

    for name in "ab":
        convert(tmp_path / name, tmp_path / "s.zarr")
        assert labels(tmp_path / "s.zarr") == {"q0": 1, "q1": 1}

    dump(tmp_path / "a/all.pkl", [row | {"v": 1, "z": 0} for row in rows(1, 5)])
    refused = error_of("convert", tmp_path / "a", tmp_path / "s.zarr", code=3)
    assert "all.pkl: several layouts, or one that the store does not keep, have read files of this name" in refused


def of_tool(number):
    """Return a trace that a built-in layout reads."""
    own = {"hidden_states": states(2, 4, 8, seed=number), "tokens": [1, 2, 3, 4], "label": 1}
    return {"question_id": f"q{number}", **own}


def lines_of_tool(label):
    """Return the flags of a layout that reads the same files."""
    keys = {"hidden_states": "hidden_states -> L S D", "tokens": "tokens", label: "label"}
    return field_flags(*(f"{name} = *.pkl : [id=question_id]/{key}" for name, key in keys.items()))


@pytest.mark.parametrize("is_there", [True, False])
def test_files_that_a_built_in_layout_has_read_are_not_read_by_a_kept_one(tmp_path, is_there):
    for k, (name, flags) in enumerate({"a": [], "b": lines_of_tool("is_correct")}.items()):
        dump(tmp_path / name / f"{name}.pkl", [of_tool(k)])
        convert(tmp_path / name, tmp_path / "s.zarr", *flags)

    for name in "abab":
        convert(tmp_path / name, tmp_path / "s.zarr")
        found = [(t.label, dict(t.scores)) for t in tracestore.open(tmp_path / "s.zarr")]
        assert str(found) == "[(1.0, {}), (nan, {'is_correct': 1.0})]"

    dump(tmp_path / "a/new.pkl", [of_tool(2)])
    if not is_there:
        (tmp_path / "a/a.pkl").unlink()
    refused = error_of("convert", tmp_path / "a", tmp_path / "s.zarr", code=3)
    assert "new.pkl: a layout that is built in fits it, too: convert it to another store for that" in refused


def test_a_layout_that_is_stated_for_files_of_a_built_in_one_takes_its_place(tmp_path):
    dump(tmp_path / "in/a.pkl", [of_tool(0)])
    for flags in ([], lines_of_tool("label")):
        convert(tmp_path / "in", tmp_path / "s.zarr", *flags)
    dump(tmp_path / "in/b.pkl", [of_tool(1)])

    convert(tmp_path / "in", tmp_path / "s.zarr")

    with tracestore.open(tmp_path / "s.zarr") as store:
        kept = {path: Fingerprint.parse(text).layout for path, text in store.internals.index.fingerprints()}
    assert kept["a.pkl"] == kept["b.pkl"] != ""


def test_layouts_that_differ_in_what_they_ignore_are_one(tmp_path):
    """A new file is read by that of the other files of its folder."""
    lines = [STATED["axes"][0], [*STATED["axes"][0], "ignore = notes.csv"]]
    for name, own in zip("ab", lines, strict=True):
        write_folder(tmp_path / name, [f"{name}0"], "column")
        (tmp_path / name / "labels.csv").write_text(f"id,v\n{name}0,1\n")
        if name == "b":
            (tmp_path / "b/notes.csv").write_text("id,text\nb0,x\n")
        convert(tmp_path / name, tmp_path / "s.zarr", *field_flags(*own))

    for name in "ab":
        write_folder(tmp_path / name, [f"{name}0", f"{name}1"], "column")
        (tmp_path / name / "labels.csv").write_text(f"id,v\n{name}0,1\n{name}1,1\n")
        convert(tmp_path / name, tmp_path / "s.zarr")

    assert labels(tmp_path / "s.zarr") == dict.fromkeys(["a0", "b0", "a1", "b1"], 1)


def test_a_table_whose_name_another_layout_gives_to_states_stays_one(tmp_path):
    lines = ["hidden_states = {id}.npy -> L S D", "is_correct = meta.json : [id=id]/ok"]
    table(tmp_path / "a/a0.json", [{"hs": states(2, 4, 8).tolist(), "id": "a0"}])
    for count, flags in ((2, field_flags(*lines)), (3, [])):
        table(tmp_path / "b/meta.json", [{"id": f"b{k}", "ok": k % 2} for k in range(count)])
        for k in range(count):
            np.save(tmp_path / f"b/b{k}.npy", states(2, 4, 8, seed=k))
        convert(tmp_path / "b", tmp_path / "s.zarr", *flags)
        convert(tmp_path / "a", tmp_path / "s.zarr", "--field", "hidden_states = *.json : [id=id]/hs -> L S D")

    assert str(labels(tmp_path / "s.zarr")) == "{'b0': 0.0, 'b1': 1.0, 'a0': nan, 'b2': 0.0}"


def test_a_file_whose_layout_the_store_does_not_keep_is_refused(tmp_path):
    """Stores that are merged have sources of layouts that only one of them keeps."""
    for name, own in zip("ab", STATED["column"], strict=True):
        write_folder(tmp_path / name, [f"{name}0", f"{name}1"], "column")
        convert(tmp_path / name, tmp_path / f"{name}.zarr", *field_flags(*own))
    command("merge", tmp_path / "b.zarr", tmp_path / "a.zarr", check=0)

    assert "b0.npz: several layouts, or one" in error_of("convert", tmp_path / "b", tmp_path / "a.zarr", code=3)
    convert(tmp_path / "a", tmp_path / "a.zarr")
    assert set(labels(tmp_path / "a.zarr").values()) == {1}


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("change", ["new id", "answer", "sample", "labels"])
def test_layouts_that_ignore_the_files_of_each_other_are_both_used(tmp_path, change, workers):
    """Each reads its own files again and the new ones, with the table that both have."""
    folder, flags = tmp_path / "in", ("--workers", workers, "--on-conflict", "keep-last")
    label = ["is_correct = labels.csv : [id=id]/ok", "question = q_{id}.json"]
    greedy = ["hidden_states = greedy_{id}.npy -> L S D", "sample = =9", "ignore = sampled_*", *label]
    sampled = ["hidden_states = sampled_{id}_{sample}.npy -> L S D", "ignore = greedy_*", *label]
    both = [field_flags(*sampled, 'share.is_correct = ["sample"]', 'share.question = ["sample"]'), field_flags(*greedy)]

    def save(name, seed):
        np.save(folder / f"{name}.npy", states(2, 4, 8, seed=seed))

    folder.mkdir()
    for k in range(2):
        (folder / f"q_q{k}.json").write_text(f'"why {k}"')
        for number, name in enumerate(("greedy_q{}", "sampled_q{}_0", "sampled_q{}_1")):
            save(name.format(k), 3 * k + number)
    write_labels(folder, [1, 0])
    for lines in both:
        convert(folder, tmp_path / "s.zarr", *lines, *flags)
    convert(folder, tmp_path / "s.zarr", *flags)
    if change == "new id":
        (folder / "q_q2.json").write_text('"why 2"')
        save("greedy_q2", 10)
        save("sampled_q2_0", 11)
    elif change == "labels":
        write_labels(folder, [0, 1])
    else:
        save({"answer": "greedy_q1", "sample": "sampled_q1_1"}[change], 20)

    convert(folder, tmp_path / "s.zarr", *flags)

    for lines in both:
        convert(folder, tmp_path / "one.zarr", *lines, *flags)
    assert stored_traces(tmp_path / "s.zarr") == stored_traces(tmp_path / "one.zarr")
    convert(folder, tmp_path / "s.zarr", "--overwrite")
    assert stored_traces(tmp_path / "s.zarr") == stored_traces(tmp_path / "one.zarr")


def test_traces_that_a_layout_added_before_a_refused_file_are_read_by_it(tmp_path, folder):
    convert(folder, tmp_path / "s.zarr", *FLAGS)
    for name in "bc":
        dump(folder / f"{name}.pkl", rows(2 + (name == "c")))
    whole = (folder / "c.pkl").read_bytes()
    (folder / "c.pkl").write_bytes(whole[:-9])
    write_labels(folder, [1, 0, 1, 1])
    inverted = field_flags(LINES[0], LINES[1].replace("is_correct", "hallucination.h"))
    files = [folder / "b.pkl", folder / "c.pkl", folder / "labels.csv"]
    error_of("convert", *files, tmp_path / "s.zarr", *inverted, code=3)
    (folder / "c.pkl").write_bytes(whole)

    assert "c.pkl: layouts of this store" in error_of("convert", folder, tmp_path / "s.zarr", code=3)
    convert(*files, tmp_path / "s.zarr", *inverted)
    convert(folder, tmp_path / "s.zarr")

    scores = {trace.question_id: dict(trace.scores) for trace in tracestore.open(tmp_path / "s.zarr")}
    assert {name for name, own in scores.items() if own.get("h") == 1} >= {"q2", "q3"}
    assert not {"q2", "q3"} & {name for name, own in scores.items() if "is_correct" in own}


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("on_conflict", ["error", "keep-first", "keep-last"])
@pytest.mark.parametrize("field", ["is_correct", "label", "group"])
def test_a_changed_row_of_a_trace_whose_file_is_gone(tmp_path, field, on_conflict, workers):
    """Its value stayed, and the row was not counted."""
    store, flags = tmp_path / "s.zarr", ["--workers", workers]
    lines = ["hidden_states = {id}_{sample}.pkl -> L S D", f"{field} = labels.csv : [id=id, sample=k]/x"]

    def write(*values):
        given = ["ab"[value] if field == "group" else value for value in values]
        table(tmp_path / "in/labels.csv", [{"id": f"q{k // 2}", "k": k % 2, "x": x} for k, x in enumerate(given)])

    def found():
        values = [{"label": t.label, "group": t.group}.get(field, t.scores.get(field)) for t in tracestore.open(store)]
        return [int(value in (1, "b")) for value in values]

    for k in range(4):
        dump(tmp_path / f"in/q{k // 2}_{k % 2}.pkl", states(2, 4, 8, seed=k))
    write(1, 0, 1, 0)
    convert(tmp_path / "in", store, *field_flags(*lines), *flags)
    for k in range(2):
        (tmp_path / f"in/q1_{k}.pkl").unlink()
    write(1, 1, 0, 0)

    done = convert(tmp_path / "in", store, "--on-conflict", on_conflict, *flags, check=3 * (on_conflict == "error"))

    if on_conflict == "error":
        values = ("'a'", "'b'") if field == "group" else ("0", "1")
        text = "the row of q1 has {}, and the store has {} for its trace, which the files lack".format(*values)
        assert f"labels.csv, {field}: {text}; --on-conflict keep-last replaces it, keep-first keeps it" in done.stderr
        assert found() == [1, 0, 1, 0]
    else:
        rows_joined = f"{field}: 2 rows of labels.csv joined by id, sample, 2 of stored traces that the files lack"
        assert rows_joined in done.stdout
        assert found() == [1, 1, on_conflict == "keep-first", 0]


def test_a_changed_row_of_all_answers_whose_files_are_gone(tmp_path):
    for k in range(4):
        dump(tmp_path / f"in/q{k // 2}_{k % 2}.pkl", states(2, 4, 8, seed=k))
    lines = ["hidden_states = {id}_{sample}.pkl -> L S D", LINES[1], 'share.is_correct = ["sample"]']
    write_labels(tmp_path / "in", [1, 1])
    convert(tmp_path / "in", tmp_path / "s.zarr", *field_flags(*lines))
    for k in range(2):
        (tmp_path / f"in/q1_{k}.pkl").unlink()
    write_labels(tmp_path / "in", [1, 0])

    convert(tmp_path / "in", tmp_path / "s.zarr", "--on-conflict", "keep-last")

    assert [trace.score for trace in tracestore.open(tmp_path / "s.zarr")] == [1, 1, 0, 0]


@pytest.mark.parametrize("kind", ["column", "words"])
def test_rows_of_traces_of_other_layouts_or_unread_files_change_nothing(tmp_path, kind):
    convert_two(tmp_path, kind)
    lines = (tmp_path / "b/labels.csv").read_text().splitlines()[1:]
    path = tmp_path / "a/labels.csv"
    path.write_text("\n".join([path.read_text().strip(), *lines, lines[-1].replace("b2", "a3"), ""]))

    for is_first in (True, False):
        if not is_first:
            np.savez(tmp_path / "a/a3.npz", hs=states(3, 3, 8, seed=3))
        flags = () if is_first else field_flags(*STATED[kind][0])
        assert "that the files lack" not in convert(tmp_path / "a", tmp_path / "s.zarr", *flags).stdout

    expected = {f"{name}{k}": 1 for name in "ab" for k in range(3)} | {"a3": 0}
    assert labels(tmp_path / "s.zarr") == expected


@pytest.mark.parametrize(
    ("field", "is_in_layout"),
    [*itertools.product(["question", "generated_answer", "prompt_length"], [False, True]), ("tokens", True)],
)
def test_what_a_table_or_a_layout_adds_to_stored_traces_is_not_lost(tmp_path, field, is_in_layout):
    """A value of a trace is stored with its arrays: it is refused where they are stored, or replaces them."""
    values = {"question": "why", "generated_answer": "so", "prompt_length": 2, "tokens": [4, 5, 6, 7]}
    dump(tmp_path / "in/a.pkl", rows(0, 1))
    path = tmp_path / "in/t.json"
    table(path, [{"id": f"q{k}", "x": values[field] if k or is_in_layout else None} for k in range(2)])
    line = field_flags(f"{field} = t.json : [id=id]/x")
    without = ["--field", "ignore = t.json"] if is_in_layout else line
    convert(tmp_path / "in", tmp_path / "s.zarr", "--field", LINES[0], *without)
    table(path, [{"id": f"q{k}", "x": values[field]} for k in range(2)])
    again = ("convert", tmp_path / "in", tmp_path / "s.zarr", "--field", LINES[0], *line)

    assert f"different content ({field})" in error_of(*again, code=3)
    command(*again, "--on-conflict", "keep-last", check=0)

    with tracestore.open(tmp_path / "s.zarr") as store:
        name = {"generated_answer": "answer"}.get(field, field)
        found = [getattr(trace, name) for trace in store]
    assert np.array_equal(found, [values[field]] * 2)


def test_a_store_of_families_keeps_no_layout(tmp_path):
    write_pickle(tmp_path / "a.pkl", make_traces(3))
    convert(tmp_path / "a.pkl", tmp_path / "s.zarr")

    assert tracestore.open(tmp_path / "s.zarr").internals.attributes.layouts == ()


@pytest.mark.parametrize(
    "flags", [[], ["--on-conflict", "keep-last"], ["--scores"]], ids=["found", "keep-last", "named"]
)
def test_changed_scores_replace_those_of_the_store(tmp_path, flags):
    write_pickle(tmp_path / "in/a.pkl", make_traces(4))
    path = tmp_path / "in/scores.csv"
    flags = [*flags, path] if flags == ["--scores"] else flags
    header = "question_id,score,group\n"
    path.write_text(f"{header}q0,0.1,a\nq1,0.2,a\nq2,0.3,b\n")
    convert(tmp_path / "in", tmp_path / "s.zarr", *flags)
    path.write_text(f"{header}q0,0.1,a\nq1,0.0,a\nq2,0.3,c\nq3,0.0,d\n")

    done = convert(tmp_path / "in", tmp_path / "s.zarr", *flags)

    store = tracestore.open(tmp_path / "s.zarr")
    assert store.scores.tolist() == [0.1, 0.0, 0.3, 0.0]
    assert "scores, labels or groups of 2 stored traces have changed and were replaced" in done.stdout
    again = convert(tmp_path / "in", tmp_path / "s.zarr", *flags)
    assert "have changed" not in again.stdout


def write_values(path, which):
    """Write a table with the old (0) or new (1) values; each pair of each column is that of another trace."""
    rows = []
    for k in range(COUNT):
        score, label, group = (PAIRS[(k * step) % COUNT][which] for step in (1, 5, 7))
        rows.append({"question_id": f"q{k}", "score": SCORE_CELLS[score], "group": GROUP_CELLS[group]})
        rows[-1]["label"] = LABEL_CELLS[label]
    # Labels and scores that agree outweigh the pairs that do not.
    rows += [{"question_id": f"other{k}", "score": 100 * (k % 2), "label": 1 - k % 2, "group": ""} for k in range(10)]
    table(path, rows)


def stored(path):
    """Return score, label and group of each trace by id."""
    with tracestore.open(path) as store:
        columns = store.internals.columns
        numbers = (store.scores + 0.0).tolist(), (columns.labels + 0.0).tolist()  # -0.0 is 0.0
        values = zip(*numbers, map(columns.group, range(len(store))), strict=True)
        return dict(zip(store.question_ids, values, strict=True))


def write_traces(folder):
    traces = make_traces(COUNT)
    for k in range(4):
        write_pickle(folder / f"{k}.pkl", traces[k::4])


VALUE_LINES = [
    LINES[0],
    "correctness.score = scores.csv : [id=question_id]/score",
    "label = scores.csv : [id=question_id]/label",
    "group = scores.csv : [id=question_id]/group",
]


@pytest.mark.parametrize("on_conflict", ["error", "keep-first", "keep-last"])
@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("kind", ["scores file", "table"])
def test_changed_values_are_those_of_a_new_store(tmp_path, kind, workers, on_conflict):
    folder, flags = tmp_path / "in", ["--workers", workers]
    if kind == "table":
        flags += field_flags(*VALUE_LINES)
        dump(folder / "a.pkl", rows(*range(COUNT)))
    else:
        write_traces(folder)
    write_values(folder / "scores.csv", 0)
    convert(folder, tmp_path / "s.zarr", *flags)
    old = stored(tmp_path / "s.zarr")
    write_values(folder / "scores.csv", 1)
    convert(folder, tmp_path / "new.zarr", *flags)
    new = stored(tmp_path / "new.zarr")

    done = convert(
        folder, tmp_path / "s.zarr", *flags, "--on-conflict", on_conflict, check=3 * (on_conflict == "error")
    )

    expected = {
        key: tuple(o if n == "" or n != n else n for o, n in zip(old[key], new[key], strict=True)) for key in new
    }
    np.testing.assert_equal(
        stored(tmp_path / "s.zarr"), {"error": old, "keep-first": expected, "keep-last": new}[on_conflict]
    )
    if on_conflict == "error":
        assert "that the sources no longer have; --on-conflict keep-last removes it, keep-first keeps it" in done.stderr
        convert(folder, tmp_path / "s.zarr", *flags, "--on-conflict", "keep-last")
        np.testing.assert_equal(stored(tmp_path / "s.zarr"), new)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_labels_of_a_scores_file_change_with_a_file_that_grows(tmp_path, workers):
    folder, traces = tmp_path / "in", make_traces(8)
    folder.mkdir()
    for count, given in ((6, [1, 0, 1, 0, 1, 0]), (8, [0, 0, 1, 1, 1, 0, 1, 0])):
        for k in range(2):
            write_pickle(folder / f"{k}.pkl", traces[:count][k::2])
        table(folder / "scores.csv", [{"question_id": f"q{k}", "score": 0.5, "label": v} for k, v in enumerate(given)])
        done = convert(folder, tmp_path / "s.zarr", "--workers", workers)

    with tracestore.open(tmp_path / "s.zarr") as store:
        assert {trace.question_id: trace.label for trace in store} == {f"q{k}": v for k, v in enumerate(given)}
    assert "scores, labels or groups of 2 stored traces have changed and were replaced" in done.stdout


@pytest.mark.parametrize("on_conflict", ["error", "keep-first", "keep-last"])
def test_scores_of_a_command_are_those_of_a_new_store(tmp_path, on_conflict):
    write_traces(tmp_path / "in")
    for which in (0, 1):
        write_values(tmp_path / f"{which}.csv", which)
        convert(tmp_path / "in", tmp_path / f"{which}.zarr", "--scores", tmp_path / f"{which}.csv")
    convert(tmp_path / "in", tmp_path / "s.zarr")

    for which, flags in ((0, []), (1, ["--on-conflict", on_conflict])):
        done = command(
            *("score", tmp_path / "s.zarr", "--scores", tmp_path / f"{which}.csv", "--score-column", "score", *flags),
            check=3 * (which == 1 and on_conflict == "error"),
        )

    old, new = (stored(tmp_path / f"{which}.zarr") for which in (0, 1))
    for key, (score, _, group) in stored(tmp_path / "s.zarr").items():
        kept = [o if n == "" or n != n else n for o, n in zip(old[key], new[key], strict=True)]
        expected = {"error": old[key], "keep-first": kept, "keep-last": new[key]}[on_conflict]
        np.testing.assert_equal((score, group), (expected[0], expected[2]))
    assert "that the sources no longer have" in done.stdout + done.stderr or "was removed" in done.stdout


def test_the_first_score_of_the_layout_is_the_default(tmp_path):
    names = [f"s{k}" for k in (3, 1, 7, 0, 5, 2, 6, 4)]
    dump(tmp_path / "in/a.pkl", rows(0, 1))
    table(tmp_path / "in/scores.csv", [{"id": f"q{k}"} | dict.fromkeys(names, k / 2) for k in range(2)])
    lines = {f"correctness.{name}": f"scores.csv : [id=id]/{name}" for name in names}

    layout = {"hidden_states": "*.pkl : [id=id]/hs -> L S D", **lines}
    tracestore.convert_files(tmp_path / "in", tmp_path / "s.zarr", layout=layout)

    with tracestore.open(tmp_path / "s.zarr") as store:
        assert store.internals.attributes.default_score == names[0]


@pytest.mark.parametrize("place", ["file", "table"])
@pytest.mark.parametrize("judgment", ["is_correct", "is_hallucinated"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_judgment_counts_before_a_score_that_disagrees(tmp_path, place, judgment, is_first):
    wrong, judge = [1, 0, 1, 0], [0.9, 0.2, 0.3, 0.8]
    given = [{"id": f"q{k}", "y": w if judgment == "is_hallucinated" else 1 - w} for k, w in enumerate(wrong)]
    items = [{"id": f"q{k}", "hs": states(2, 4, 8, seed=k), "p": p} for k, p in enumerate(judge)]
    lines = {"hallucination.judge": "a.pkl : [id=id]/p"}
    if place == "table":
        table(tmp_path / "in/labels.csv", given)
        lines[judgment] = "labels.csv : [id=id]/y"
    else:
        items = [item | row for item, row in zip(items, given, strict=True)]
        lines[judgment] = "a.pkl : [id=id]/y"
    dump(tmp_path / "in/a.pkl", items)
    lines = dict(sorted(lines.items(), key=lambda line: (line[0] == judgment) != is_first))

    tracestore.convert_files(
        [tmp_path / "in"], tmp_path / "s.zarr", layout={"hidden_states": "a.pkl : [id=id]/hs -> L S D"} | lines
    )

    store = tracestore.open(tmp_path / "s.zarr")
    assert store.targets().tolist() == wrong


# The line of the layout, and where it finds the value of a trace: in a table, or in the file of the trace.
FIELDS = {
    "label of a table": ("label", "table", "labels.csv : [id=id]/value"),
    "is_correct of a table": ("is_correct", "table", "labels.csv : [id=id]/value"),
    "is_hallucinated of a table": ("is_hallucinated", "table", "labels.csv : [id=id]/value"),
    "is_correct of a file": ("is_correct", "file", "*.pkl : [id=id]/value"),
    "score of a file": ("correctness.judge", "file", "*.pkl : [id=id]/value"),
}


class Killed(BaseException):
    """End a conversion as a kill does."""


def write(folder, where, values):
    for k, value in enumerate(values):
        own = {"value": value} if where == "file" else {}
        dump(folder / f"{k}.pkl", [{"id": f"q{k}", "hs": states(2, 4, 8, seed=k)} | own])
    if where == "table":
        table(folder / "labels.csv", [{"id": f"q{k}", "value": value} for k, value in enumerate(values)])


def convert_field(folder, store, field, line, *, commits=None, monkeypatch=None):
    """Convert; with `commits`, end behind the commit of this number."""
    layout = {"hidden_states": "*.pkl : [id=id]/hs -> L S D", field: line}
    if commits is None:
        return tracestore.convert_files([folder], store, layout=layout)
    count, commit = 0, StoreWriter.commit

    def counted(writer, **keywords):
        nonlocal count
        commit(writer, **keywords)
        count += 1
        if count == commits:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(StoreWriter, "commit", counted)
        with pytest.raises(Killed):
            tracestore.convert_files([folder], store, layout=layout)
    return None


def values(store):
    opened = tracestore.open(store)
    assert "open_sources" not in json.dumps(opened.internals.attributes.to_json())
    return {trace.question_id: (None if np.isnan(trace.label) else trace.label, dict(trace.scores)) for trace in opened}


@pytest.mark.parametrize("commits", [1, 2])
@pytest.mark.parametrize("kind", FIELDS)
def test_labels_of_an_interrupted_conversion_are_stored_by_the_next_one(tmp_path, monkeypatch, kind, commits):
    monkeypatch.setattr(cutting, "MIN_BYTES", 1)
    field, where, line = FIELDS[kind]
    first, second = [1, 0, 1, 0], [0, 0, 1, 1]
    write(tmp_path / "in", where, first)
    if where == "table":  # its labels are committed after the traces, those of files with them
        convert_field(tmp_path / "in", tmp_path / "new.zarr", field, line, commits=1, monkeypatch=monkeypatch)
        assert lint_store(tmp_path / "new.zarr").counts["open_source"] >= 1
        convert_field(tmp_path / "in", tmp_path / "new.zarr", field, line)
    convert_field(tmp_path / "in", tmp_path / "old.zarr", field, line)
    if where == "table":
        assert values(tmp_path / "new.zarr") == values(tmp_path / "old.zarr")
    write(tmp_path / "in", where, second)
    convert_field(tmp_path / "in", tmp_path / "old.zarr", field, line, commits=commits, monkeypatch=monkeypatch)

    convert_field(tmp_path / "in", tmp_path / "old.zarr", field, line)

    convert_field(tmp_path / "in", tmp_path / "whole.zarr", field, line)
    assert values(tmp_path / "old.zarr") == values(tmp_path / "whole.zarr")
    assert convert_field(tmp_path / "in", tmp_path / "old.zarr", field, line).num_sources_skipped_existing == 4


def test_another_file_of_the_same_name_stays_open(tmp_path, monkeypatch):
    """The conversion of one folder is interrupted; that of another one stores none of its labels."""
    for k, name in enumerate(("one", "two")):
        dump(tmp_path / name / "0.pkl", [{"id": f"q{k}", "hs": states(2, 4, 8, seed=k)}])
        table(tmp_path / name / "labels.csv", [{"id": f"q{k}", "value": k}])
    store, line = tmp_path / "s.zarr", "labels.csv : [id=id]/value"
    convert_field(tmp_path / "one", store, "label", line, commits=1, monkeypatch=monkeypatch)
    convert_field(tmp_path / "two", store, "label", line)
    assert lint_store(store).counts["open_source"] == 1
    merged = [store, shutil.copytree(store, tmp_path / "other.zarr")]
    with tracestore.open(merged) as both:
        assert lint_traces(both).counts["open_source"] == 2

    convert_field(tmp_path / "one", store, "label", line)
    assert values(store) == {"q0": (0, {}), "q1": (1, {})}


@pytest.mark.parametrize(
    "bad", [None, {}, 3, [1, 2], [[0]], [[1, 1]], [[1, 0]], [[0, 2], [1, 2]], [[-1, 1]], [[0, 3]], [[0, True]]]
)
def test_malformed_open_sources_are_corruption(tmp_path, bad):
    path = write_store(tmp_path / "s.zarr", make_traces(2))
    store = Store(path)
    store.manifest["attributes"]["open_sources"] = bad
    store.seal()

    with pytest.raises(CorruptStoreError, match="open_sources"):
        tracestore.open(path)


@pytest.mark.parametrize(
    ("header", "flags", "refused"),
    [
        ("question_id,score,label", [], True),
        ("question_id,is_correct", [], True),
        ("question_id,score,label", ["--score-column", "score"], False),
        ("question_id,score", [], False),
    ],
)
@pytest.mark.parametrize("place", ["file", "table"])
def test_a_judgment_of_a_layout_and_a_scores_file(tmp_path, header, flags, refused, place):
    correct = [0, 1, 0, 1]
    items = [{"id": f"q{k}", "hs": states(2, 4, 8, seed=k)} for k in range(4)]
    layout = ["--field", LINES[0].replace("*.pkl", "a.pkl"), "--field", "is_correct = a.pkl : [id=id]/ok"]
    if place == "table":
        write_labels(tmp_path / "in", correct)
        layout[-1] = LINES[1]
    else:
        items = [item | {"ok": value} for item, value in zip(items, correct, strict=True)]
    dump(tmp_path / "in/a.pkl", items)
    width = header.count(",")
    (tmp_path / "judge.csv").write_text(f"{header}\n" + "".join(f"q{k},1{',0' * (width - 1)}\n" for k in range(4)))
    arguments = tmp_path / "in", tmp_path / "s.zarr", *layout, "--scores", tmp_path / "judge.csv", *flags

    if refused:
        assert "both judge the answers" in error_of("convert", *arguments, code=2)
        return
    convert(*arguments)

    store = tracestore.open(tmp_path / "s.zarr")
    assert store.targets().tolist() == [1, 0, 1, 0]
    assert store.named_scores("score").tolist() == [1, 1, 1, 1]
    convert(*arguments)
    assert tracestore.open(tmp_path / "s.zarr").named_scores("score").tolist() == [1, 1, 1, 1]
    assert tracestore.open(tmp_path / "s.zarr").targets().tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("place", ["file", "table"])
@pytest.mark.parametrize(
    ("field", "header", "message"),
    [
        ("label", "score,label", "both judge the answers"),
        ("correctness.score", "score,other", "both give score"),
        ("hallucination.p", "p,other", "both give p"),
    ],
)
def test_a_label_or_score_of_a_layout_and_of_a_scores_file(tmp_path, field, header, message, place):
    """One replaced the other, and traces without a row lost theirs."""
    items = [{"id": f"q{k}", "hs": states(2, 4, 8, seed=k), "ok": k % 2} for k in range(4)]
    lines = [LINES[0].replace("*.pkl", "a.pkl"), f"{field} = a.pkl : [id=id]/ok"]
    if place == "table":
        items = [{key: item[key] for key in ("id", "hs")} for item in items]
        write_labels(tmp_path / "in", [0, 1, 0, 1])
        lines[1] = LINES[1].replace("is_correct", field)
    dump(tmp_path / "in/a.pkl", items)
    (tmp_path / "judge.csv").write_text(f"question_id,{header}\n" + "".join(f"q{k},1,1\n" for k in range(3)))
    arguments = tmp_path / "in", tmp_path / "s.zarr", *field_flags(*lines), "--scores", tmp_path / "judge.csv"
    column = ["--score-column", "p", "--score-direction", "hallucination"] if field == "hallucination.p" else []

    assert message in error_of("convert", *arguments, *column, code=2)
    convert(*arguments, "--score-column", header.split(",")[field != "label"], "--score-direction", "correct")

    assert len(tracestore.open(tmp_path / "s.zarr").score_fields) == 1 + (field != "label")


@pytest.mark.parametrize("has_scores_first", [True, False])
def test_labels_of_a_kept_layout_stay_next_to_a_scores_file(tmp_path, has_scores_first):
    """The same command again, and one that adds the file, found labels that the sources seemed to have lost."""
    dump(tmp_path / "in/a.pkl", [{"id": f"q{k}", "hs": states(2, 4, 8, seed=k), "ok": k % 2} for k in range(4)])
    (tmp_path / "judge.csv").write_text("question_id,judge\n" + "".join(f"q{k},1\n" for k in range(6)))
    lines = field_flags(LINES[0], "label = *.pkl : [id=id]/ok")
    scores = ["--scores", tmp_path / "judge.csv", "--score-direction", "correct"]
    convert(tmp_path / "in", tmp_path / "s.zarr", *lines, *(scores if has_scores_first else []))
    dump(tmp_path / "in/b.pkl", [{"id": f"q{k}", "hs": states(2, 4, 8, seed=k), "ok": 1} for k in (4, 5)])

    for _ in range(2):
        convert(tmp_path / "in", tmp_path / "s.zarr", *scores)

        store = tracestore.open(tmp_path / "s.zarr")
        assert store.labels.tolist() == [0, 1, 0, 1, 1, 1] and store.named_scores("judge").tolist() == [1] * 6


def test_files_that_are_read_again_are_one_line(tmp_path):
    for k in range(5):
        dump(tmp_path / f"in/{k}.pkl", rows(k))
    write_labels(tmp_path / "in", [1, 0, 1, 0, 1])
    convert(tmp_path / "in", tmp_path / "s.zarr", *FLAGS)
    write_labels(tmp_path / "in", [1, 0, 1, 0, 0])

    done = convert(tmp_path / "in", tmp_path / "s.zarr")

    (line,) = [line for line in done.stdout.splitlines() if "since it was committed" in line]
    assert line.startswith("0.pkl, 1.pkl, 2.pkl and 2 more: labels.csv or the layout has changed")
    assert "is_correct (high: correct): 2 times 1, 3 times 0, 0 missing" in done.stdout
    dump(tmp_path / "in/1.pkl", [{"id": "q1", "hs": states(2, 4, 8, seed=9)}])
    done = convert(tmp_path / "in", tmp_path / "s.zarr", "--on-conflict", "keep-last")
    (line,) = [line for line in done.stdout.splitlines() if "since it was committed" in line]
    assert line.startswith("1.pkl: the file or its time has changed")


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_value_that_the_files_of_one_of_two_layouts_lose_is_a_conflict(tmp_path, workers):
    """Only traces of the layout with a line for it have it."""
    folder, store = tmp_path / "in", tmp_path / "s.zarr"
    both = [
        ["hidden_states = a_{id}.npz : hs -> L S D", "group = a_{id}.npz : group", "ignore = b_*"],
        ["hidden_states = b_{id}.npz : hs -> L S D", "ignore = ['a_*', 'b_* : group']"],
    ]

    def save(name, group, seed=0):
        folder.mkdir(exist_ok=True)
        np.savez(folder / f"{name}.npz", hs=states(2, 4, 8, seed=seed), group=group)

    for k, name in enumerate(("a_q0", "a_q1", "b_q2")):
        save(name, "g", k)
    for lines in both:
        convert(folder, store, *field_flags(*lines))
    save("a_q0", "", 0)

    assert "no longer have" in error_of("convert", folder, store, "--workers", workers, code=3)

    convert(folder, store, "--workers", workers, "--on-conflict", "keep-last")
    assert [t.group for t in tracestore.open(store)] == ["", "g", ""]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_label_that_a_stored_trace_has_serves_no_new_one(tmp_path, workers):
    flags = ["--workers", workers]
    for name in ("q0_s0", "q1_s0"):
        dump(tmp_path / f"in/{name}.pkl", states(2, 4, 8, seed=len(name)))
    table(tmp_path / "in/labels.csv", [{"id": "q0", "ok": 1}, {"id": "q1", "ok": 0}])
    lines = ["hidden_states = {id}_s{sample}.pkl -> L S D", "is_correct = labels.csv : [id=id]/ok"]
    convert(tmp_path / "in", tmp_path / "s.zarr", *field_flags(*lines), *flags)
    dump(tmp_path / "in/q0_s1.pkl", states(2, 4, 8, seed=9))

    assert "serves several traces" in error_of("convert", tmp_path / "in", tmp_path / "s.zarr", *flags, code=3)
    assert len(tracestore.open(tmp_path / "s.zarr")) == 2
    share = ['share.is_correct = ["sample"]']
    convert(tmp_path / "in", tmp_path / "s.zarr", *field_flags(*lines, *share), *flags)
    dump(tmp_path / "in/q1_s1.pkl", states(2, 4, 8, seed=10))

    assert "added from 1 file" in convert(tmp_path / "in", tmp_path / "s.zarr", *flags).stdout
    assert [trace.score for trace in tracestore.open(tmp_path / "s.zarr")] == [1, 0, 1, 0]


ORDERS = {
    "chunks": ("b_{chunk}.pkl -> N L S D", "labels.csv : []/ok"),
    "answers": ("b_{sample}.pkl : [id=#] -> L S D", "labels.csv : [id=id, sample=#]/ok"),
}


@pytest.mark.parametrize("kind", ORDERS)
def test_rows_with_an_order_are_joined_to_the_traces_of_all_files(tmp_path, kind):
    """A changed file was refused: the rows of the table were too many for its traces."""
    for k in range(2):
        dump(tmp_path / f"in/b_{k}.pkl", [states(2, 4, 8, seed=k), states(2, 4, 8, seed=k + 5)])
    table(
        tmp_path / "in/labels.csv",
        [{"ok": ok} | ({"id": k // 2} if kind == "answers" else {}) for k, ok in enumerate((1, 0, 0, 1))],
    )
    states_line, label = ORDERS[kind]
    lines = [f"hidden_states = {states_line}", f"is_correct = {label}"]
    first = convert(tmp_path / "in", tmp_path / "s.zarr", *field_flags(*lines)).stdout
    assert "4 traces added" in first
    before = labels_by_key(tmp_path / "s.zarr")
    changed = [states(2, 4, 8, seed=21), states(2, 4, 8, seed=22)]
    dump(tmp_path / "in/b_1.pkl", changed)

    convert(tmp_path / "in", tmp_path / "s.zarr", "--on-conflict", "keep-last")

    assert labels_by_key(tmp_path / "s.zarr") == before
    stored = [trace.hidden_states for trace in tracestore.open(tmp_path / "s.zarr")]
    assert all(any(np.allclose(value, found, atol=1e-2) for found in stored) for value in changed)


def labels_by_key(store):
    return {(trace.question_id, trace.sample): trace.score for trace in tracestore.open(store)}
