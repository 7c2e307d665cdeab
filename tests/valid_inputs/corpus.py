"""Valid files of every format, protocol, kind of array and container, written by the installed libraries."""

import gzip
import io
import pickle
import pickletools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.helpers import as_torch, make_graphs, make_trace, make_traces

DTYPES = {"float16": "f2", "float32": "f4", "bfloat16": "f4"}


class ValidFile(NamedTuple):
    """A file and the expected records (see `expected_record`)."""

    name: str
    data: bytes
    expected: list[dict[str, Any]]


def raw(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Return dtype, shape and bytes of an array or tensor, in C order and native byte order."""
    if isinstance(value, torch.Tensor):
        bits = value.contiguous()
        if value.dtype == torch.bfloat16:
            return "bfloat16", tuple(value.shape), bits.view(torch.int16).numpy().tobytes()
        value = bits.numpy()
    value = np.ascontiguousarray(value, value.dtype.newbyteorder("="))
    return value.dtype.name, value.shape, value.tobytes()


def expected_record(trace: dict[str, Any]) -> dict[str, Any]:
    """Return the expected fields of the record of a pickled trace."""
    own = ("hidden_states", "attentions", "tokens", "tokens_decoded", "question_id")
    return {
        "question_id": trace["question_id"],
        "hidden": [raw(h) for h in trace["hidden_states"]],
        "attention": [raw(a) for a in trace["attentions"]],
        "tokens": [int(t) for t in trace["tokens"]],
        "decoded": [str(s) for s in trace["tokens_decoded"]],
        "rest": {k: v for k, v in trace.items() if k not in own},
    }


def renamed(data: bytes, protocol: int) -> bytes:
    """Return the pickle with the module names of NumPy 1."""
    if protocol < 4:
        return data.replace(b"numpy._core.", b"numpy.core.")
    for name in (b"numpy._core.multiarray", b"numpy._core.numeric"):
        old = name.replace(b"_core", b"core")
        data = data.replace(b"\x8c%c%s" % (len(name), name), b"\x8c%c%s" % (len(old), old))
    # The length of a frame no longer matches; the pickle is equivalent without its only frame.
    return data[:2] + data[11:] if data[2:3] == b"\x95" else data


def traces_with_extras() -> list[dict[str, Any]]:
    """Return traces with further texts and numbers."""
    traces = make_traces(3)
    traces[0] |= {"question": "", "prompt_length": 1, "generated_text": "", "note": "no field", "flag": True}
    traces[1] |= {"generated_answer": "\ud800 alone", "low": -(2**40), "part": 2.5, "huge": 10**30}
    traces[2] |= {"tokens_before_cutoff": 7, "text": "é✓🐍\n\t\0\\'\"" * 9, "nan_free": -0.0}
    return traces


def variants(dtype: str, kind: str) -> list[dict[str, Any]]:
    """Return the traces with another dtype and memory layout."""
    traces = [{**t, **arrays} for t, arrays in zip(traces_with_extras(), make_arrays(DTYPES[dtype]), strict=True)]
    if kind == "fortran":
        for trace in traces:
            for name in ("hidden_states", "attentions"):
                trace[name] = [np.asfortranarray(a) for a in trace[name]]
    elif kind == "sliced":
        for trace in traces:
            trace["hidden_states"] = [np.repeat(h, 2, axis=1)[:, ::2] for h in trace["hidden_states"]]
    elif kind == "stacked":
        for trace in traces:
            trace |= {name: np.stack(trace[name]) for name in ("hidden_states", "attentions")}
    elif kind == "big_endian":
        for trace in traces:
            trace["hidden_states"] = [h.astype(h.dtype.newbyteorder(">")) for h in trace["hidden_states"]]
    elif kind == "torch":
        traces = [as_torch(t, getattr(torch, dtype)) for t in traces]
    elif kind == "torch_views":
        # Not contiguous, with all layers of a trace in one storage.
        for k, trace in enumerate(traces):
            hidden = torch.from_numpy(np.stack(trace["hidden_states"])).to(getattr(torch, dtype))
            trace["hidden_states"] = list(hidden.transpose(1, 2).contiguous().transpose(1, 2).unbind(0))
            shared = torch.from_numpy(np.stack(trace["attentions"])).to(getattr(torch, dtype))
            trace["attentions"] = list(shared.unbind(0))
            trace["tokens"] = torch.from_numpy(np.repeat(trace["tokens"], 2))[::2]
            if k == 2:
                trace["hidden_states"] = [torch.nn.Parameter(h, requires_grad=False) for h in trace["hidden_states"]]
    return traces


def make_arrays(dtype: str) -> Iterator[dict[str, Any]]:
    for k in range(3):
        trace = make_trace(k, dtype=dtype)
        yield {name: trace[name] for name in ("hidden_states", "attentions")}


KINDS = [
    *(
        (dtype, kind)
        for dtype in ("float16", "float32")
        for kind in ("plain", "fortran", "sliced", "stacked", "big_endian")
    ),
    *((dtype, kind) for dtype in DTYPES for kind in ("torch", "torch_views")),
]


def saved(value: Any, zip_format: bool, protocol: int) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, pickle_protocol=protocol, _use_new_zipfile_serialization=zip_format)
    return out.getvalue()


def packed(data: bytes, protocol: int) -> Iterator[tuple[str, bytes]]:
    """Yield suffix and bytes: plain, and gzip, of three members in the odd protocols."""
    yield "", data
    if protocol % 2 == 0:
        yield ".gz", gzip.compress(data, 1)
        return
    third = len(data) // 3
    members = (gzip.compress(p, 1) for p in (data[:third], data[third : 2 * third], data[2 * third :]))
    yield ".members.gz", b"".join(members)


def pickles(dtype: str, kind: str) -> Iterator[ValidFile]:
    """Yield pickled traces, as a list and as a bare dict, by pickle.dump and torch.save."""
    traces = variants(dtype, kind)
    for protocol in range(6):
        for shape, value, kept in (("list", traces, traces), ("bare", traces[2], traces[2:])):
            expected = [expected_record(t) for t in kept]
            data = pickle.dumps(value, protocol)
            name = f"{shape}-{dtype}-{kind}-protocol{protocol}"
            for suffix, content in packed(data, protocol):
                yield ValidFile(f"{name}.pkl{suffix}", content, expected)
            if (old := renamed(data, protocol)) != data:
                for suffix, content in packed(old, protocol):
                    yield ValidFile(f"{name}-numpy1.pkl{suffix}", content, expected)
            if protocol == 4:
                yield ValidFile(f"{name}-optimized.pkl", pickletools.optimize(data), expected)
            if kind.startswith("torch") and protocol >= 2:
                for zip_format in (True, False):
                    form = "zip" if zip_format else "legacy"
                    yield ValidFile(f"{name}-{form}.pt", saved(value, zip_format, protocol), expected)


def sequence_files() -> Iterator[ValidFile]:
    """Yield dicts of sequences."""
    rng = np.random.default_rng(3)
    for dtype in ("float16", "float32", "bfloat16"):
        sequences = torch.from_numpy(rng.standard_normal((4, 3, 5)).astype("f4")).to(getattr(torch, dtype))
        for how in ("contiguous", "transposed", "numpy"):
            if how == "numpy" and dtype == "bfloat16":
                continue
            value = sequences
            if how == "transposed":
                value = sequences.permute(2, 1, 0).contiguous().permute(2, 1, 0)
            elif how == "numpy":
                value = sequences.numpy()
            for ids, texts in (
                (["a", "b", "é", "\ud800"], None),
                ([1, 2, 3, 4], None),
                (np.array(["w", "x", "y", "z"]), None),
            ):
                labels = torch.tensor([0.0, 1.0, float("nan"), 1.0])
                whole = {"sequences": value, "labels": labels, "question_ids": ids}
                texts = [str(i) for i in ids]
                expected = [
                    {"question_id": texts[k], "last_token": raw(sequences[k]), "label": (0.0, 1.0, None, 1.0)[k]}
                    for k in range(4)
                ]
                name = f"sequences-{dtype}-{how}-{type(ids[0]).__name__}"
                yield from every_container(name, whole, expected)


def graph_files() -> Iterator[ValidFile]:
    """Yield dicts of graphs, with and without labels."""
    traces = make_traces(3)
    graphs = [make_graphs(t) for t in traces]
    texts = [t["question_id"] for t in traces]
    for labeled in (True, False):
        whole: dict[str, Any] = {"graphs": graphs, "question_ids": texts}
        if labeled:
            whole["labels"] = torch.tensor([1.0, 0.0, 1.0])
        expected = [
            {
                "question_id": texts[k],
                "hidden": [raw(g.x) for g in layers],
                "edges": [(raw(g.edge_index), raw(g.edge_attr.reshape(-1))) for g in layers],
                "label": (1.0, 0.0, 1.0)[k] if labeled else None,
                "rest": {
                    name: [g[name] for g in layers]
                    for name in ("num_possible_edges", "num_filtered_edges", "filter_ratio")
                },
            }
            for k, layers in enumerate(graphs)
        ]
        yield from every_container(f"graphs-{'labeled' if labeled else 'unlabeled'}", whole, expected)


def every_container(name: str, value: Any, expected: list[dict[str, Any]]) -> Iterator[ValidFile]:
    """Yield the value in every protocol and container."""
    for protocol in range(6):
        data = pickle.dumps(value, protocol)
        for suffix, content in packed(data, protocol):
            yield ValidFile(f"{name}-protocol{protocol}.pkl{suffix}", content, expected)
        if (old := renamed(data, protocol)) != data:
            yield ValidFile(f"{name}-protocol{protocol}-numpy1.pkl", old, expected)
        if protocol >= 2:
            for zip_format in (True, False):
                form = "zip" if zip_format else "legacy"
                yield ValidFile(f"{name}-protocol{protocol}-{form}.pt", saved(value, zip_format, protocol), expected)
