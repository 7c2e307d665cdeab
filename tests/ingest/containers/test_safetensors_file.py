"""Files of safetensors: plain ones, and those of vLLM and speculators."""

import fcntl
import json
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

import tracestore
from tests.helpers import convert, error_of
from tests.ingest.containers.layouts import LAYOUTS, base, check

HEADS = ("--attention", "heads")
NONE = ("--attention", "none")


def stored(tmp_path, source, *flags):
    convert(source, tmp_path / "s.zarr", *(flags or HEADS))
    return tracestore.open(tmp_path / "s.zarr")


def save(path, arrays, **metadata):
    """Write arrays with the library, which takes contiguous ones only."""
    save_file({name: np.ascontiguousarray(a) for name, a in arrays.items()}, path, metadata or None)
    return path


def connector_file(path, num_layers=4, num_tokens=9, lost=0, dtype="bfloat16", seed=0):
    """Write a file as ExampleHiddenStatesConnector of vLLM does; return its tensors.

    `lost` tokens of a cached prefix have no hidden states, as in vLLM 0.22 with prefix caching.
    """
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, num_layers, 16, generator=generator).to(getattr(torch, dtype))
    tensors = {"hidden_states": hidden, "token_ids": torch.arange(num_tokens)}
    save_file(tensors | {"hidden_states": hidden[lost:].contiguous()}, path)
    return tensors


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_a_trace(tmp_path, layout):
    arrays = base(tokens=5)
    tensors = LAYOUTS[layout](arrays)
    path = save(tmp_path / "q7.safetensors", tensors, question="Who?", prompt_length="3", format="np")
    store = stored(tmp_path, path)
    check(store, [arrays], layout)
    assert store.question_ids == ["q7"] and not store[0].extras
    assert store[0].question == "Who?" and store[0].prompt_length == 3


def test_a_stack_and_named_traces(tmp_path):
    traces = [base(k, tokens=4) for k in range(5)]
    save(tmp_path / "a.safetensors", {name: np.stack([t[name] for t in traces]) for name in traces[0]})
    check(stored(tmp_path, tmp_path / "a.safetensors"), traces)
    named = {f"q{k}/{name}": value for k, t in enumerate(traces) for name, value in t.items()}
    convert(save(tmp_path / "b.safetensors", named), tmp_path / "t.zarr", *HEADS)
    store = tracestore.open(tmp_path / "t.zarr")
    check(store, traces)
    assert store.question_ids == [f"q{k}" for k in range(5)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("num_tokens", [4, 9])  # as many tokens as layers, and more
def test_files_of_the_connector_of_vllm(tmp_path, dtype, num_tokens):
    torch = pytest.importorskip("torch")
    folder = tmp_path / "in"
    folder.mkdir()
    tensors = [connector_file(folder / f"cmpl-{k}-0.safetensors", 4, num_tokens, 0, dtype, k) for k in range(3)]
    (folder / "cmpl-0-0.safetensors.lock").touch()
    store = stored(tmp_path, folder, *NONE, "--dtype", "keep")
    assert store.question_ids == [f"cmpl-{k}-0" for k in range(3)] and store.num_layers == 4
    for trace, expected in zip(store, tensors, strict=True):
        bits = expected["hidden_states"].transpose(0, 1).contiguous()
        bits = bits.view(torch.int16).numpy().view("u2") if dtype == "bfloat16" else bits.numpy()
        np.testing.assert_array_equal(trace.hidden_states_bits, bits)
        np.testing.assert_array_equal(trace.tokens, expected["token_ids"].numpy())


@pytest.mark.parametrize("num_tokens", [4, 9])
def test_states_missing_because_of_prefix_caching_are_refused(tmp_path, num_tokens):
    connector_file(tmp_path / "hs_3.safetensors", 4, num_tokens, lost=2)
    message = error_of("convert", tmp_path / "hs_3.safetensors", tmp_path / "s.zarr", *NONE, code=3)
    assert "hs_3.safetensors, trace 0, hidden_states: found " in message
    assert f"{num_tokens - 2} tokens, expected {num_tokens} as in token_ids" in message
    assert "--no-enable-prefix-caching" in message


def test_a_file_that_is_being_written_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    connector_file(path)
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "still writing" in error_of("convert", path, tmp_path / "s.zarr", *NONE, code=3)
    convert(path, tmp_path / "s.zarr", *NONE)


@pytest.mark.parametrize("granularity", ["token", "tensor"])
def test_scaled_8_bit_floats_of_speculators(tmp_path, granularity):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    hidden = torch.randn(7, 3, 8, generator=torch.Generator().manual_seed(0)) * 20
    flat = hidden.reshape(7, -1)
    scales = (flat.abs().amax(-1, keepdim=True) if granularity == "token" else flat.abs().amax().reshape(1)) / 448
    codes = (flat / scales).to(torch.float8_e4m3fn).reshape(hidden.shape)
    tensors = {"hidden_states": codes, "hidden_states_scales": scales, "token_ids": torch.arange(7)}
    save_file(tensors, tmp_path / "a.safetensors")
    store = stored(tmp_path, tmp_path / "a.safetensors", *NONE, "--dtype", "keep")
    expected = codes.float() * scales.reshape(-1, 1, 1)
    np.testing.assert_array_equal(store[0].hidden_states, expected.transpose(0, 1).numpy())


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_every_8_bit_float(tmp_path, dtype):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    codes = torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype)).reshape(1, 4, 64)
    save_file({"hidden_states": codes, "tokens": torch.arange(4)}, tmp_path / "a.safetensors")
    store = stored(tmp_path, tmp_path / "a.safetensors", *NONE)
    np.testing.assert_array_equal(store[0].hidden_states, codes.to(torch.float16).numpy())


def build(header, data=b"", *, length=None):
    """Return the bytes of a file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


F16 = {"dtype": "F16", "shape": [1, 2, 4], "data_offsets": [0, 16]}
DAMAGED = {
    "header beyond the file": build({"hidden_states": F16}, bytes(16), length=10_000),
    "not JSON": build(b"{hidden_states}", bytes(16)),
    "twice": build(b'{"a": 1, "a": 2}'),
    "not a dict": build(b'{"a": [1]}'),
    "shape": build({"hidden_states": F16 | {"shape": [1, 2, 5]}}, bytes(16)),
    "negative shape": build({"hidden_states": F16 | {"shape": [-1, -2, 4]}}, bytes(16)),
    "huge shape": build({"hidden_states": F16 | {"shape": [1 << 40, 1 << 40]}}, bytes(16)),
    "bool": build({"hidden_states": F16 | {"shape": [True, 2, 4]}}, bytes(16)),
    "offsets": build({"hidden_states": F16 | {"data_offsets": [4, 20]}}, bytes(20)),
    "reversed offsets": build({"hidden_states": F16 | {"data_offsets": [16, 0]}}, bytes(16)),
    "overlap": build({"hidden_states": F16, "tokens": F16}, bytes(16)),
    "truncated": build({"hidden_states": F16}, bytes(15)),
    "trailing": build({"hidden_states": F16}, bytes(17)),
    "dtype": build({"hidden_states": F16 | {"dtype": "F4"}}, bytes(16)),
    "metadata": build({"__metadata__": {"a": 1}, "hidden_states": F16}, bytes(16)),
    "deep": build(b'{"a":' + b"[" * 100_000, b""),
    "dimensions": build({"hidden_states": F16 | {"shape": [1] * 70 + [8]}}, bytes(16)),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_refused(tmp_path, name):
    (tmp_path / "a.safetensors").write_bytes(DAMAGED[name])
    message = error_of("convert", tmp_path / "a.safetensors", tmp_path / "s.zarr", *NONE, code=3)
    assert "a.safetensors" in message and "not a trace file" not in message


def test_the_header_is_read_as_the_library_reads_it(tmp_path):
    """Each change of a byte of the header is refused by both readers, or gives both the same arrays."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    from tracestore.errors import InvalidInputError
    from tracestore.ingest.containers.safetensors_file import safetensors_columns
    from tracestore.ingest.files.byte_source import map_file

    arrays = {"hidden_states": np.arange(8, dtype="f2").reshape(1, 2, 4), "tokens": np.arange(2), "x": np.zeros((0, 3))}
    data = save(tmp_path / "a.safetensors", arrays, note="x").read_bytes()
    path, rng, same = tmp_path / "b.safetensors", np.random.default_rng(0), 0
    for _ in range(3000):
        changed = bytearray(data)
        end = 8 + int.from_bytes(data[:8], "little")
        for _ in range(rng.integers(1, 3)):
            changed[rng.integers(0, end)] = rng.choice(list(b'0123456789,:[]{}"FUI \x00'))
        path.write_bytes(changed)
        try:
            found, _ = safetensors_columns(map_file(path))
        except InvalidInputError:
            continue  # refusing more than the library does is allowed
        try:
            expected = load_file(path)
        except (SafetensorError, KeyError):
            pytest.fail(f"only the library refuses {bytes(changed[:end])!r}")
        assert found.keys() == expected.keys()
        for name, column in found.items():
            np.testing.assert_array_equal(column.whole().view("u1"), expected[name].view("u1"))
        same += 1
    assert same > 100


def test_the_input_of_a_layer_is_the_output_of_the_one_before(tmp_path):
    layers = np.random.default_rng(0).random((4, 5, 8), np.float32)
    arrays = {f"blocks.{k}.hook_resid_pre": layers[k][None] for k in range(3)}
    arrays |= {"blocks.2.hook_resid_post": layers[3][None], "tokens": np.arange(5)}
    store = stored(tmp_path, save(tmp_path / "q7.safetensors", arrays), *NONE)
    np.testing.assert_allclose(store[0].hidden_states, layers[1:], atol=1e-3)
