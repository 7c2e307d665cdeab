"""Files of HDF5: groups of traces, stacks, texts; links, plugins and other files are refused."""

import os
import signal

import numpy as np
import pytest

import tracestore
from tests.helpers import convert, error_of, read_traces, tree_bytes
from tests.ingest.containers.layouts import LAYOUTS, base, check
from tests.tiers import long
from tracestore.errors import InvalidInputError
from tracestore.ingest.containers import hdf5_process
from tracestore.ingest.readers import hdf5_process as reading_process

h5py = pytest.importorskip("h5py")
HEADS = ("--attention", "heads")


def stored(tmp_path, source, *flags):
    convert(source, tmp_path / "s.zarr", *(flags or HEADS))
    return tracestore.open(tmp_path / "s.zarr")


def write(path, arrays, **options):
    with h5py.File(path, "w") as file:
        for name, value in arrays.items():
            file.create_dataset(name, data=value, **options)
    return path


@pytest.mark.parametrize("compression", ["gzip", *long(None, "lzf")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_a_trace(tmp_path, layout, compression):
    arrays = base(tokens=5)
    path = write(tmp_path / "q7.h5", LAYOUTS[layout](arrays), compression=compression, shuffle=compression is not None)
    store = stored(tmp_path, path)
    check(store, [arrays], layout)
    assert store.question_ids == ["q7"] and not store[0].extras


@pytest.mark.parametrize("outer", ["", "traces/"])
@pytest.mark.parametrize("layout", ["stacked", "layer_0", "hidden_states/layer_0"])
def test_a_group_per_trace(tmp_path, outer, layout):
    traces = [base(k, tokens=2 + k) for k in range(11)]
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file.attrs["model"] = "m"
        for k, arrays in enumerate(traces):
            group = file.create_group(f"{outer}q{k}")
            for name, value in LAYOUTS[layout](arrays).items():
                group[name] = value
            group.attrs["question"] = f"Why {k}?"
            group["generated_answer"] = "because ✓"
            group.attrs["sample"] = 3
    store = stored(tmp_path, tmp_path / "a.hdf5")
    check(store, traces)
    assert store.question_ids == [f"q{k}" for k in range(11)]
    assert store[10].question == "Why 10?" and store[4].answer == "because ✓" and store[4].sample == 3


def test_a_stack_of_traces(tmp_path):
    traces = [base(k, tokens=4) for k in range(5)]
    arrays = {name: np.stack([t[name] for t in traces]) for name in traces[0]}
    arrays |= {"question_id": [f"q{k}" for k in range(5)], "question": ["é?"] * 5, "prompt_length": np.arange(5)}
    store = stored(tmp_path, write(tmp_path / "a.h5", arrays))
    check(store, traces)
    assert store.question_ids == [f"q{k}" for k in range(5)]
    assert store[4].question == "é?" and store[4].prompt_length == 4


def test_tokens_of_variable_length(tmp_path):
    traces = [base(k, tokens=2 + k, attention=False) for k in range(3)]
    width = max(len(t["tokens"]) for t in traces)
    pad = [np.pad(t["hidden_states"], [(0, 0), (0, width - len(t["tokens"])), (0, 0)]) for t in traces]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["hidden_states"] = np.stack(pad)
        file["num_tokens"] = [len(t["tokens"]) for t in traces]
        tokens = file.create_dataset("tokens", 3, h5py.vlen_dtype("i4"))
        for k, trace in enumerate(traces):
            tokens[k] = trace["tokens"]
    check(stored(tmp_path, tmp_path / "a.h5", "--attention", "none"), traces)


def test_workers_do_not_change_the_bytes(tmp_path):
    (tmp_path / "in").mkdir()
    for k in range(5):
        write(tmp_path / f"in/{k}.h5", base(k, tokens=3 + k), compression="gzip")
    convert(tmp_path / "in", tmp_path / "s.zarr", "--workers", 1)
    convert(tmp_path / "in", tmp_path / "t.zarr", "--workers", 3)
    assert tree_bytes(tmp_path / "s.zarr") == tree_bytes(tmp_path / "t.zarr")
    assert "(5 files already in the store" in convert(tmp_path / "in", tmp_path / "s.zarr").stdout


def external_link(file, folder):
    write(folder / "other.bin", base())
    file["hidden_states"] = h5py.ExternalLink(str(folder / "other.bin"), "hidden_states")


def soft_link(file, folder):
    file["x/y"] = base()["hidden_states"]
    file["hidden_states"] = h5py.SoftLink("/x/y")


def virtual(file, folder):
    write(folder / "other.bin", base())
    layout = h5py.VirtualLayout((3, 4, 8), "f2")
    layout[:] = h5py.VirtualSource(folder / "other.bin", "hidden_states", (3, 4, 8))
    file.create_virtual_dataset("hidden_states", layout)


def external_storage(file, folder):
    (folder / "raw.bin").write_bytes(b"secret" * 100)
    file.create_dataset("hidden_states", (3, 4, 8), "f2", external=[(str(folder / "raw.bin"), 0, 192)])


def plugin(file, folder):
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk((3, 4, 8))
    plist.set_filter(32015, h5py.h5z.FLAG_OPTIONAL, (3,))
    space = h5py.h5s.create_simple((3, 4, 8))
    h5py.h5d.create(file.id, b"hidden_states", h5py.h5t.IEEE_F16LE, space, plist)


def references(file, folder):
    file["x"] = [1]
    file.create_dataset("hidden_states", (1,), h5py.ref_dtype)[0] = file["x"].ref


def compound(file, folder):
    file["hidden_states"] = np.zeros((3, 4), [("a", [("b", "f2"), ("c", "f2")])])


def loop(file, folder):
    group = file.create_group("a/b")
    group["c"] = file["a"]


def deep(file, folder):
    file.create_group("/".join("abcdefghijkl"))


def opaque(file, folder):
    file["hidden_states"] = np.zeros((3, 4), "V8")


def bomb(file, folder):
    file.create_dataset("hidden_states", (4, 1 << 20, 1 << 12), "f2", chunks=(1, 1024, 1024), compression="gzip")


def large_chunks(file, folder):
    data = file.create_dataset("hidden_states", (3, 1 << 15, 1 << 12), "f2", chunks=(2, 1 << 15, 1 << 12))
    data.id.write_direct_chunk((0, 0, 0), bytes(2 << 28))


def empty(file, folder):
    file["hidden_states"] = h5py.Empty("f2")


def nothing(file, folder):
    file.attrs["x"] = 1


REFUSED = {
    external_link: "external link",
    soft_link: "soft link",
    virtual: "other files",
    external_storage: "other files",
    plugin: "filter 32015",
    references: "references",
    compound: "dtype",
    opaque: "dtype",
    loop: "twice",
    deep: "nested deeper",
    bomb: "too many values",
    large_chunks: "chunks",
    empty: "without a shape",
    nothing: "missing key",
}


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.__name__)
def test_refused_files(tmp_path, case):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["tokens"] = np.arange(4)
        if case in (loop, deep, nothing):
            del file["tokens"]
        case(file, tmp_path)
    message = error_of("convert", tmp_path / "a.h5", tmp_path / "s.zarr", "--attention", "none", code=3)
    assert "a.h5" in message and REFUSED[case] in message, message


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_truncated_files_are_refused(tmp_path, share):
    path = write(tmp_path / "a.h5", base(), compression="gzip")
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    assert "a.h5" in error_of("convert", path, tmp_path / "s.zarr", code=3)


@pytest.fixture
def process(monkeypatch):
    """Return a function that starts the process that reads files, and gives it to the next reader."""

    def start():
        process = hdf5_process.HDF5Process(hdf5_process.__name__)
        monkeypatch.setattr(hdf5_process._idle, "take", lambda: process)
        return process

    return start


def three_traces(path):
    with h5py.File(path, "w") as file:
        for k in range(3):
            for name, value in base(k).items():
                file[f"q{k}/{name}"] = value
    return path


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGSTOP])
def test_a_library_that_crashes_or_hangs_refuses_the_file(tmp_path, process, monkeypatch, number):
    reader = process()
    records = read_traces(three_traces(tmp_path / "a.h5"), "a.h5")
    assert next(records).question_id == "q0"
    monkeypatch.setattr(reading_process, "TIMEOUT_S", 0.5)
    os.kill(reader._process.pid, number)
    with pytest.raises(InvalidInputError, match=r"a\.h5, trace 1.*HDF5 library") as error:
        list(records)
    assert "damaged" in str(error.value) and reader._process.poll() is not None


def test_a_process_reads_one_file_after_the_other_and_ends_after_a_refusal(tmp_path, process):
    reader = process()
    for _ in range(2):
        assert len(list(read_traces(three_traces(tmp_path / "a.h5"), "a.h5"))) == 3
    assert reader._process.poll() is None
    (tmp_path / "b.h5").write_bytes((tmp_path / "a.h5").read_bytes()[:2000])
    with pytest.raises(InvalidInputError):
        list(read_traces(tmp_path / "b.h5", "b.h5"))
    assert reader._process.poll() is not None


@pytest.mark.long
@pytest.mark.parametrize("count", [5, 200])
def test_damaged_texts_do_not_end_the_process(tmp_path, monkeypatch, count):
    """The library reads outside its memory, or never ends, for some damaged texts of variable length."""
    monkeypatch.setattr(reading_process, "TIMEOUT_S", 4.0)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, value in base().items():
            file[name] = value
        file.attrs["question"] = "why"
        file["generated_answer"] = "x" * 20
    data = (tmp_path / "a.h5").read_bytes()
    heap = data.index(b"GCOL")
    rng = np.random.default_rng(0)
    num_refused = 0
    for _ in range(count):
        changed = bytearray(data)
        for _ in range(4):
            changed[heap + rng.integers(4, 80)] = rng.integers(0, 256)
        (tmp_path / "b.h5").write_bytes(changed)
        try:
            list(read_traces(tmp_path / "b.h5", "b.h5"))
        except InvalidInputError as error:
            assert "\n" not in str(error)
            num_refused += 1
    assert 0 < num_refused <= count
    # The next file is read as if nothing had happened.
    (record,) = read_traces(tmp_path / "a.h5", "a.h5")
    assert record.strings["question"] == "why" and record.strings["generated_answer"] == "x" * 20


def test_groups_of_single_steps_are_joined(tmp_path):
    arrays = {f"q0/step_{n}/layer_{k}": np.full((1, 8), 10 * n + k, "f4") for n in range(11) for k in range(2)}
    write(tmp_path / "a.h5", arrays)
    (record,) = read_traces(tmp_path / "a.h5", "a.h5", need_attention=None)
    assert record.question_id == "q0" and np.shape(record.hidden) == (2, 11, 8)
    assert record.hidden[1][:, 0].tolist() == [10 * n + 1 for n in range(11)]


def test_steps_without_an_array_of_the_others_are_refused(tmp_path):
    arrays = {"q0/step_0/hidden_states": np.ones((2, 1, 8), "f4"), "q0/step_0/attention": np.ones((2, 3, 1, 1), "f4")}
    write(tmp_path / "a.h5", arrays | {"q0/step_1/hidden_states": np.ones((2, 1, 8), "f4")})
    message = error_of("convert", tmp_path / "a.h5", tmp_path / "s.zarr", code=3)
    assert "attentions: found no array in step 1, expected one in each step" in message


def test_the_text_of_an_answer_to_a_question(tmp_path):
    traces = [base(k, tokens=2 + k, attention=False) for k in range(3)]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for k, trace in enumerate(traces):
            group = file.create_group(f"coqa_1/generations/{k}")
            group["hidden_states"] = trace["hidden_states"]
            group.attrs["text"] = f"Answer {k}"
    store = stored(tmp_path, tmp_path / "a.h5", "--attention", "none")
    assert [(t.question_id, t.sample, t.answer) for t in store] == [("coqa_1", k, f"Answer {k}") for k in range(3)]


def write_frame(file, name, values, index, **others):
    """Write a frame, or a series, as to_hdf of pandas does."""
    members = ("values", "index") if values.ndim == 1 else ("block0_values", "axis1")
    group = file.create_group(name)
    group.attrs["pandas_type"] = np.bytes_("series" if values.ndim == 1 else "frame")
    group.attrs["TITLE"] = h5py.Empty("S1")
    for key, value in {**dict(zip(members, (values, np.asarray(index, "S")), strict=True)), **others}.items():
        group[key] = value


def test_frames_of_pandas(tmp_path):
    states = np.random.default_rng(0).random((2, 4, 8), np.float32)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for k in range(2):
            write_frame(file, f"layer_{k}", states[k], list("abcd"))
        write_frame(file, "is_hallucination", np.array([0, 1, 1, 0]), list("abcd"))
    store = stored(tmp_path, tmp_path / "a.h5", "--attention", "none")
    assert {t.question_id: t.score for t in store} == {"a": 0, "b": 1, "c": 1, "d": 0}
    np.testing.assert_allclose(store["c"].last_token, states[:, 2], atol=1e-3)


@pytest.mark.parametrize("index, others", [("abcx", {}), ("abcd", {"block1_values": np.zeros(4)})])
def test_other_frames_of_pandas_are_refused(tmp_path, index, others):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        write_frame(file, "layer_0", np.ones((4, 8), "f4"), list("abcd"))
        write_frame(file, "layer_1", np.ones((4, 8), "f4"), list(index), **others)
    reason = "another index" if not others else "save it with DataFrame.to_parquet"
    assert reason in error_of("convert", tmp_path / "a.h5", tmp_path / "s.zarr", code=3)


def test_attributes_of_arrays_and_files_with_other_fields_of_the_same_traces(tmp_path):
    (tmp_path / "in").mkdir()
    traces = {f"nq_{k}": base(k, tokens=3 + k) for k in range(3)}
    for name in ("hidden_states", "attentions"):
        with h5py.File(tmp_path / f"in/{name}.h5", "w") as file:
            for key, arrays in traces.items():
                array = file.create_dataset(key, data=arrays[name])
                array.attrs["question"], array.attrs["unit"] = f"{key}?", "none"
    store = stored(tmp_path, tmp_path / "in")
    for key, arrays in traces.items():
        assert store[key].question == f"{key}?"
        np.testing.assert_allclose(store[key].hidden_states, arrays["hidden_states"], atol=1e-3)
