"""Arrays of NumPy: layouts, stacks, tables next to them, refusals."""

import csv
import json
import zipfile

import numpy as np
import pytest

import tracestore
from tests.helpers import convert, error_of
from tests.ingest.containers.layouts import LAYOUTS, base, check

HEADS = ("--attention", "heads")


def stored(tmp_path, source, *flags):
    convert(source, tmp_path / "s.zarr", *(flags or HEADS))
    return tracestore.open(tmp_path / "s.zarr")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_a_trace(tmp_path, layout, save):
    arrays = base(tokens=5)
    save(tmp_path / "q7.npz", **LAYOUTS[layout](arrays))
    store = stored(tmp_path, tmp_path / "q7.npz")
    check(store, [arrays], layout)
    assert store.question_ids == ["q7"] and not store[0].extras


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_stack_of_traces_is_taken_apart(tmp_path, save, order):
    traces = [base(k, tokens=4) for k in range(5)]
    stacks = {name: np.asarray(np.stack([t[name] for t in traces]), order=order) for name in traces[0]}
    ids = np.array([f"q{k}" for k in range(5)])
    save(tmp_path / "a.npz", **stacks, question_ids=ids, prompt_length=np.arange(5), model="m")
    store = stored(tmp_path, tmp_path / "a.npz")
    check(store, traces)
    assert store.question_ids == ids.tolist()
    assert [t.prompt_length for t in store] == [0, 1, 2, 3, 4] and store[3].extras == {"model": "m"}


@pytest.mark.parametrize("side", ["left", "right", "lengths"])
def test_padding_is_removed(tmp_path, side):
    traces = [base(k, tokens=3 + k) for k in range(3)]
    widths = [5 - len(t["tokens"]) for t in traces]
    pads = [(w, 0) if side == "left" else (0, w) for w in widths]
    stacks = {
        "hidden_states": [np.pad(t["hidden_states"], [(0, 0), p, (0, 0)]) for t, p in zip(traces, pads, strict=True)],
        "attentions": [np.pad(t["attentions"], [(0, 0), (0, 0), p, p]) for t, p in zip(traces, pads, strict=True)],
        "input_ids": [np.pad(t["tokens"], p) for t, p in zip(traces, pads, strict=True)],
    }
    if side == "lengths":
        stacks["lengths"] = [len(t["tokens"]) for t in traces]
    else:
        stacks["attention_mask"] = [np.pad(np.ones(5 - w, int), p) for w, p in zip(widths, pads, strict=True)]
    np.savez(tmp_path / "a.npz", **{name: np.stack(rows) for name, rows in stacks.items()})
    store = stored(tmp_path, tmp_path / "a.npz")
    check(store, traces)
    assert not store[0].extras


@pytest.mark.parametrize("form", ["q{}/{}", "q{}.{}", "q{}_{}", "{1}_{0}"])
def test_names_of_traces_in_the_names_of_arrays(tmp_path, form):
    traces = [base(k, tokens=2 + k) for k in range(11)]
    arrays = {form.format(k, name): value for k, t in enumerate(traces) for name, value in t.items()}
    np.savez(tmp_path / "a.npz", **arrays, **{form.format(3, "question"): "Who?"})
    store = stored(tmp_path, tmp_path / "a.npz")
    check(store, traces)
    assert store.question_ids == [str(k) if form == "{1}_{0}" else f"q{k}" for k in range(11)]
    assert [t.question for t in store][3] == "Who?" and store[2].question is None


def test_one_layer_and_last_tokens(tmp_path):
    traces = [base(k, tokens=4, attention=False) for k in range(3)]
    hidden, tokens = (np.stack([t[n] for t in traces]) for n in ("hidden_states", "tokens"))
    np.savez(tmp_path / "one.npz", hidden_states=hidden[:, 1], tokens=tokens)
    check(
        stored(tmp_path, tmp_path / "one.npz", "--attention", "none"),
        [t | {"hidden_states": t["hidden_states"][1:2]} for t in traces],
    )
    for name, arrays in {
        "named": {"last_token": hidden[:, :, -1], "ids": ["a", "b", "c"]},
        "with ids": {"hidden_states": hidden[:, :, -1], "question_ids": ["a", "b", "c"]},
        "by layer": {f"layer_{k}": hidden[:, k, -1] for k in range(3)} | {"ids": ["a", "b", "c"]},
        "sequences": {"sequences": hidden[:, :, -1], "labels": [0, 1, 1], "question_ids": ["a", "b", "c"]},
    }.items():
        np.savez(tmp_path / f"{name}.npz", **arrays)
        convert(tmp_path / f"{name}.npz", tmp_path / f"{name}.zarr")
        store = tracestore.open(tmp_path / f"{name}.zarr")
        assert store.question_ids == ["a", "b", "c"]
        np.testing.assert_array_equal([t.last_token for t in store], hidden[:, :, -1])
        assert [t.label for t in store] == [0, 1, 1] if "labels" in arrays else np.isnan(store.labels).all()


@pytest.mark.parametrize("table", ["jsonl", "csv", "json", "json by id"])
@pytest.mark.parametrize("name", ["a", "metadata"])
def test_a_table_beside_an_archive(tmp_path, table, name):
    traces = [base(k, tokens=4) for k in range(4)]
    folder = tmp_path / "in"
    folder.mkdir()
    np.savez(folder / "a.npz", **{n: np.stack([t[n] for t in traces]) for n in traces[0]})
    rows = [{"id": f"q{k}", "question": f"Why {k}?", "prompt_length": k, "note": "a, b"} for k in range(4)]
    write_table(folder / name, rows, table)
    store = stored(tmp_path, folder)
    check(store, traces)
    assert store.question_ids == ["q0", "q1", "q2", "q3"]
    assert [t.question for t in store] == [f"Why {k}?" for k in range(4)]
    assert store[2].prompt_length == 2 and store[2].extras == {"note": "a, b"}


def write_table(path, rows, kind):
    """Write rows as a table of a kind; the path has no suffix."""
    if kind == "jsonl":
        path.with_suffix(".jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    elif kind == "csv":
        with open(path.with_suffix(".csv"), "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        value = {r["id"]: {k: v for k, v in r.items() if k != "id"} for r in rows} if kind == "json by id" else rows
        path.with_suffix(".json").write_text(json.dumps(value))


@pytest.mark.parametrize("key", ["file", "id", None])
def test_a_folder_with_one_file_a_sample(tmp_path, key):
    traces = [base(k, tokens=2 + k, attention=False) for k in range(12)]
    folder = tmp_path / "in"
    folder.mkdir()
    rows = []
    for k, trace in enumerate(traces):
        np.save(folder / f"s_{k}.npy", trace["hidden_states"])
        name = {"file": {"file": f"acts/s_{k}.npy"}, "id": {"id": f"s_{k}"}, None: {}}[key]
        rows.append({**name, "tokens": trace["tokens"].tolist(), "question": f"{k}?"})
    order = rows if key is None else rows[::-1]
    (folder / "meta.jsonl").write_text("".join(json.dumps(row) + "\n" for row in order))
    store = stored(tmp_path, folder, "--attention", "none")
    check(store, traces)
    assert store.question_ids == [f"s_{k}" for k in range(12)]
    assert [t.question for t in store] == [f"{k}?" for k in range(12)]


@pytest.mark.parametrize("nested", [False, True])
def test_a_folder_with_one_file_a_field(tmp_path, nested):
    traces = [base(k, tokens=3 + k) for k in range(3)]
    for k, trace in enumerate(traces[: 3 if nested else 1]):
        folder = tmp_path / "in" / f"q{k}" if nested else tmp_path / "in"
        folder.mkdir(parents=True)
        for name, value in trace.items():
            np.save(folder / f"{name}.npy", value)
        (folder / "meta.json").write_text(json.dumps({"question": f"{k}?", "question_id": f"id{k}"}))
    store = stored(tmp_path, tmp_path / "in")
    check(store, traces[: len(store)])
    assert len(store) == (3 if nested else 1) and store.question_ids[0] == "id0"
    assert store[0].source[0] == ("q0" if nested else "in")


def test_files_of_stacked_fields_with_a_table(tmp_path):
    traces = [base(k, tokens=4) for k in range(4)]
    (tmp_path / "in").mkdir()
    for name in traces[0]:
        np.save(tmp_path / "in" / f"{name}.npy", np.stack([t[name] for t in traces]))
    (tmp_path / "in/data.csv").write_text("qid,question\n" + "".join(f"q{k},{k}?\n" for k in range(4)))
    store = stored(tmp_path, tmp_path / "in")
    check(store, traces)
    assert store.question_ids == ["q0", "q1", "q2", "q3"] and store[3].question == "3?"


def test_bfloat16_as_numpy_writes_it(tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    arrays = base(attention=False)
    np.savez(tmp_path / "a.npz", **arrays | {"hidden_states": arrays["hidden_states"].astype(ml_dtypes.bfloat16)})
    store = stored(tmp_path, tmp_path / "a.npz", "--attention", "none", "--dtype", "keep")
    expected = arrays["hidden_states"].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(store[0].hidden_states_bits, expected.view("u2"))


def test_a_second_run_skips_and_a_changed_row_is_reported(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for k in range(3):
        np.savez(folder / f"{k}.npz", **base(k))
    (folder / "t.jsonl").write_text("".join(json.dumps({"question": f"{k}"}) + "\n" for k in range(3)))
    convert(folder, tmp_path / "s.zarr")
    assert "(3 files already in the store" in convert(folder, tmp_path / "s.zarr").stdout
    (folder / "t.jsonl").write_text("".join(json.dumps({"question": f"{k % 2}"}) + "\n" for k in range(3)))
    done = convert(folder, tmp_path / "s.zarr", "--on-conflict", "keep-first")
    assert "(2 files already in the store" in done.stdout and "2.npz: the file has changed" in done.stdout


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_do_not_change_the_bytes(tmp_path, workers):
    from tests.helpers import tree_bytes

    folder = tmp_path / "in"
    folder.mkdir()
    for k in range(6):
        np.savez_compressed(folder / f"{k}.npz", **base(k, tokens=3 + k))
    convert(folder, tmp_path / "s.zarr", "--workers", "1")
    convert(folder, tmp_path / "t.zarr", "--workers", workers)
    assert tree_bytes(tmp_path / "s.zarr") == tree_bytes(tmp_path / "t.zarr")


class Live:
    """An object whose unpickling would create a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed, None])
def test_python_objects_are_refused(tmp_path, save):
    objects = np.array([Live(tmp_path / "marker"), {}], dtype=object)
    if save is None:
        np.save(tmp_path / "a.npy", objects, allow_pickle=True)
    else:
        save(tmp_path / "a.npz", **base(), extra=objects)
    path = next(tmp_path.glob("a.np*"))
    message = error_of("convert", path, tmp_path / "s.zarr", code=3)
    assert path.name in message and "Python objects" in message and not (tmp_path / "marker").exists()


def test_refusals_name_file_field_and_advice(tmp_path):
    def refused(name, save, *needed):
        save(tmp_path / name)
        message = error_of("convert", tmp_path / name, tmp_path / "s.zarr", code=3)
        assert all(text in message for text in (name, *needed)), message

    refused("ambiguous.npy", lambda p: np.save(p, np.zeros((4, 8), "f2")), "hidden_states", "last_token")
    refused("none.npz", lambda p: np.savez(p, x=np.zeros(3)), "hidden_states: missing key; found x")
    refused("ints.npz", lambda p: np.savez(p, hidden_states=np.zeros((2, 3, 4), int)), "hidden_states[0]", "int64")
    refused("fields.npy", lambda p: np.save(p, np.zeros(3, [("a", "i4")])), "hidden_states: missing key; found a")
    nested = [("a", [("b", "i4")])]
    refused("nested.npy", lambda p: np.save(p, np.zeros(3, nested)), "a dtype with nested fields")
    refused("two.npz", lambda p: np.savez(p, hidden_states=np.zeros((2, 3, 4)), layer_0=np.zeros((3, 4))), "by layer")

    def short(path):
        np.save(path, base()["hidden_states"])
        path.write_bytes(path.read_bytes()[:-1])

    refused("short.npy", short, "bytes, expected")

    def other(path):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
            archive.write(tmp_path / "ambiguous.npy", "hidden_states.npy")

    refused("lzma.npz", other, "another method")


def test_a_table_that_does_not_fit_is_refused(tmp_path):
    (tmp_path / "in").mkdir()
    np.savez(tmp_path / "in/a.npz", **base())
    (tmp_path / "in/a.jsonl").write_text('{"question": "a"}\n{"question": "b"}\n')
    assert "a.jsonl has 2 rows for 1 traces" in error_of("convert", tmp_path / "in", tmp_path / "s.zarr", code=3)
    (tmp_path / "in/a.jsonl").write_text("[1]\n")
    assert "a.jsonl, row 0: found list" in error_of("convert", tmp_path / "in", tmp_path / "s.zarr", code=3)


def test_bombs_are_refused(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", hidden_states=np.zeros((1, 1 << 28), "u1"))
    assert "too many for a file" in error_of("convert", tmp_path / "a.npz", tmp_path / "s.zarr", code=3)


@pytest.mark.parametrize("ids", [[9, 3, 7, 1], [9, 3, 9, 1]])
def test_ids_of_tokens_are_not_taken_for_those_of_traces(tmp_path, ids):
    layers = {f"L{k:02d}_hidden": np.full((4, 8), k, "f2") for k in range(3)}
    np.savez(tmp_path / "a.npz", ids=np.array(ids), **layers)
    if len(set(ids)) == len(ids):
        message = error_of("convert", tmp_path / "a.npz", tmp_path / "s.zarr", code=3)
        assert "--map tokens=ids or --map question_id=ids" in message
        flags = ("--map", "tokens=ids")
    convert(tmp_path / "a.npz", tmp_path / "s.zarr", *(flags if len(set(ids)) == len(ids) else ()))
    (trace,) = tracestore.open(tmp_path / "s.zarr")
    assert trace.tokens.tolist() == ids and trace.hidden_states[:, 0, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["n_tokens", "lengths"])
def test_the_longest_trace_tells_the_axis_of_tokens(tmp_path, name):
    states = [np.random.default_rng(n).normal(size=(n, 2, 8)).astype("f2") for n in (3, 5, 4)]
    padded = np.stack([np.concatenate([s, np.full((5 - len(s), 2, 8), np.nan, "f2")]) for s in states])
    np.savez(tmp_path / "a.npz", hidden_states=padded, question_id=["a", "b", "c"], **{name: [3, 5, 4]})
    convert(tmp_path / "a.npz", tmp_path / "s.zarr", "--attention", "none")
    with tracestore.open(tmp_path / "s.zarr") as store:
        for key, expected in zip("abc", states, strict=True):
            np.testing.assert_array_equal(store[key].hidden_states, expected.transpose(1, 0, 2))


@pytest.mark.parametrize("count", [2, 3])
def test_a_batch_with_layers_first(tmp_path, count):
    """(L, N, S, D) with a mask (N, S); with as many traces as layers, padding tells the axes."""
    traces = [base(k, tokens=2 + k) for k in range(count)]
    size = 1 + count
    mask = np.array([np.arange(size) < len(t["tokens"]) for t in traces])
    hidden, attention = np.zeros((3, count, size, 8), "f2"), np.zeros((3, count, 2, size, size), "f2")
    for k, trace in enumerate(traces):
        n = len(trace["tokens"])
        hidden[:, k, :n], attention[:, k, :, :n, :n] = trace["hidden_states"], trace["attentions"]
    tokens = np.array([np.resize(t["tokens"], size) for t in traces])
    ids = [f"q{k}" for k in range(count)]
    arrays = {"hidden_states": hidden, "attentions": attention, "attention_mask": mask, "input_ids": tokens}
    np.savez(tmp_path / "a.npz", **arrays, question_ids=ids)

    store = stored(tmp_path, tmp_path / "a.npz")

    assert store.question_ids == ids
    check(store, traces)
