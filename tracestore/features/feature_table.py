"""Features of every trace of a store: computed in one pass, cached in files, and mapped.

The cache is the folder features/ in the cache folder ($TRACESTORE_CACHE_DIR). The name of an entry is a digest of the
manifest of the store, of the name and options of the features, and of the version of this module. The manifest has
the generation and the checksums of everything in the store, so that an entry is never out of date, and a copy of a
store uses the entry of the original.
"""

import hashlib
import io
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tracestore.data.tokens.answers import answer_span
from tracestore.errors import UsageError
from tracestore.features.trace_features import STATISTICS, attention_features, pooled_states, token_statistics
from tracestore.platform_support import preallocate
from tracestore.store.format import schema
from tracestore.store.io.fsio import give_name, map_os_errors
from tracestore.store.io.local_folders import cache_dir
from tracestore.store.read.store import TraceStore
from tracestore.store.read.subset import TraceSubset
from tracestore.store.read.trace import Trace

# Increased whenever the values of a feature change.
VERSION = 2
DEFAULT_TOP_K = 10
# Traces whose features are collected before they are written.
_BLOCK_TRACES = 32
# The features (L, N, ...), of which a detector reads one layer; all others are (N, ...).
LAYER_FIRST = ("last", "prompt_last", "answer_mean", "answer_max")
Values = dict[str, np.ndarray]


@dataclass(frozen=True)
class _Group:
    """Features that are computed together: their shapes for one trace, and the function that computes them."""

    shapes: Callable[[TraceStore, int], dict[str, tuple[int, ...]]]
    compute: Callable[[Trace, TraceStore, int], Values]
    dtype: str = "<f8"


def _states(store: TraceStore, _: int) -> dict[str, tuple[int, ...]]:
    state = (store.num_layers, store.hidden_dim)
    return {"prompt_last": state, "answer_mean": state, "answer_max": state, "hidden_logdet": state[:1]}


def _maps(store: TraceStore, top_k: int) -> dict[str, tuple[int, ...]]:
    maps = (store.num_layers, store.num_stored_heads)
    return {"lookback": maps, "attention_logdet": maps, "laplacian": (*maps, top_k)}


_GROUPS = {
    "last": _Group(
        lambda store, _: {"last": (store.num_layers, store.hidden_dim)},
        lambda trace, store, _: {"last": schema.as_float32(trace.last_token_bits, store.hidden_dtype)},
        "<f4",
    ),
    "hidden": _Group(_states, lambda trace, store, _: pooled_states(trace, store.hidden_dtype), "<f4"),
    "attention": _Group(_maps, lambda trace, store, top_k: attention_features(trace, store.attention_dtype, top_k)),
    "tokens": _Group(
        lambda store, _: {"tokens": (len(STATISTICS),)}, lambda trace, store, _: {"tokens": token_statistics(trace)}
    ),
}


def features(store: TraceStore, group: str, *, top_k: int = DEFAULT_TOP_K) -> Values:
    """Return features of all N traces of a store, computed for all layers in one pass, or mapped from the cache.

    Parameters
    ----------
    store : TraceStore
    group : {"last", "hidden", "attention", "tokens"}
        last: last ``(L, N, D)``. hidden: prompt_last, answer_mean, answer_max ``(L, N, D)``, hidden_logdet ``(N, L)``.
        All of these are float32. attention: lookback, attention_logdet ``(N, L, H)``, laplacian ``(N, L, H, top_k)``;
        tokens: tokens ``(N, 5)``, the columns of `trace_features.STATISTICS`. These are float64.
    top_k : int
        Eigenvalues of each attention map; a part of the key of "attention" only.

    Returns
    -------
    dict of str to np.ndarray
        Read-only maps. A trace that lacks what a feature needs has NaN.

    Raises
    ------
    DiskFullError
        If the cache folder has no space.
    UsageError
        For a subset of a store, whose rows would be those of other traces.
    """
    _refuse_subset(store)
    spec = _GROUPS[group]
    options: dict[str, object] = {"names": sorted(spec.shapes(store, top_k))}
    options |= {"top_k": top_k} if group == "attention" else {}

    def write(folder: Path) -> None:
        shapes = spec.shapes(store, top_k)
        out = {
            name: _create(folder, name, spec.dtype, _with_traces(name, shape, len(store)))
            for name, shape in shapes.items()
        }
        for first in range(0, len(store), _BLOCK_TRACES):
            count = min(_BLOCK_TRACES, len(store) - first)
            block = {name: np.full((count, *shape), np.nan, spec.dtype) for name, shape in shapes.items()}
            for k in range(count):
                for name, values in spec.compute(store.private_trace(first + k), store, top_k).items():
                    block[name][k] = values
            for name, values in block.items():
                if name in LAYER_FIRST:
                    out[name][:, first : first + count] = values.swapaxes(0, 1)
                else:
                    out[name][first : first + count] = values

    return _cached(store, group, options, write)


def token_state_bits(store: TraceStore, layers: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the hidden states of the answers of all N traces in some layers, mapped from the cache.

    Parameters
    ----------
    store : TraceStore
    layers : sequence of int
        K layers.

    Returns
    -------
    values : np.ndarray
        ``(M, K, D)`` in the stored dtype (uint16 for bfloat16), M positions of all answers.
    offsets : np.ndarray
        ``(N + 1,)`` int64; trace k has the values offsets[k] to offsets[k + 1], none if it does not tell where its
        answer is.
    """
    _refuse_subset(store)
    chosen = [int(layer) for layer in layers]

    def write(folder: Path) -> None:
        spans = [answer_span(trace, trace.num_tokens) or (0, 0) for trace in store]
        offsets = np.cumsum([0, *(end - begin for begin, end in spans)], dtype=np.int64)
        _create(folder, "offsets", "<i8", offsets.shape)[:] = offsets
        dtype = schema.storage_dtype(store.hidden_dtype).str
        values = _create(folder, "values", dtype, (int(offsets[-1]), len(chosen), store.hidden_dim))
        for k, (begin, end) in enumerate(spans):
            if begin < end:
                states = store.private_trace(k).hidden_states_bits[chosen, begin:end]
                values[offsets[k] : offsets[k + 1]] = states.transpose(1, 0, 2)

    found = _cached(store, "token_states", {"layers": chosen}, write)
    return found["values"], found["offsets"]


def _refuse_subset(store: TraceStore) -> None:
    if isinstance(store, TraceSubset):
        raise UsageError(f"found a subset of {store.path}, expected the store: pass subset.store and subset.indices")


def _with_traces(name: str, shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    return (shape[0], count, *shape[1:]) if name in LAYER_FIRST else (count, *shape)


def _create(folder: Path, name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a writable map of a new file. An array without values is saved at once, because it cannot be mapped."""
    if 0 in shape:
        np.save(folder / f"{name}.npy", np.empty(shape, dtype))
        return np.empty(shape, dtype)
    # The space is reserved first: writing into a map on a full disk would end the process.
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": dtype, "fortran_order": False, "shape": shape})
    with open(folder / f"{name}.npy", "wb") as file:
        preallocate(file.fileno(), header.tell() + int(np.prod(shape)) * np.dtype(dtype).itemsize)
        os.pwrite(file.fileno(), header.getbuffer(), 0)
    created: np.ndarray = np.lib.format.open_memmap(folder / f"{name}.npy", mode="r+")
    return created


def _cached(store: TraceStore, name: str, options: dict[str, object], write: Callable[[Path], None]) -> Values:
    """Return the arrays of an entry of the cache. `write` fills a folder with them if there is no entry."""
    key = json.dumps([VERSION, name, options], sort_keys=True).encode()
    digest = hashlib.blake2b(store.internals.manifest.to_bytes() + key, digest_size=16).hexdigest()
    folder = cache_dir() / "features" / f"{name}-{digest}"
    if not folder.is_dir():
        with map_os_errors(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".", dir=folder.parent, ignore_cleanup_errors=True) as temporary:
                write(Path(temporary))
                give_name(Path(temporary), folder)  # unless another process has made the same entry
    return {path.stem: np.load(path, mmap_mode="r", allow_pickle=False) for path in sorted(folder.glob("*.npy"))}
