"""Small stores of every kind that the format allows, and the values that tracestore reads from them.

python -m tests.store.format.store_kinds FOLDER writes the store of each kind to FOLDER/stores and its expected
values, pickled, to FOLDER/expected. A reader that is written from docs/format.md can be compared with them.
"""

import csv
import json
import math
import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import tracestore
from tests.helpers import (
    as_torch,
    command,
    convert,
    make_optional,
    make_trace,
    make_traces,
    write_pickle,
    write_scores,
    write_store,
)
from tests.store.format.zarr_libraries import assert_identical
from tracestore.convert import cutting
from tracestore.store.format import schema
from tracestore.store.format.provenance import Provenance
from tracestore.store.write.record import record_from_dict
from tracestore.store.write.writer import StoreWriter

KINDS: dict[str, Callable[[Path], None]] = {}
# Kinds that differ little from another one.
SIMILAR = """
bfloat16_to_float16_mean codec_blosc_lz4_float32_heads codec_zstd continued_after_a_kill_before_the_first_commit
default_score_without_values edges_blosc edges_legacy_file edges_reversed edges_with_labels_and_fields
index_parts_merged integer_ids killed labels_of_later_sources lens_zstd merged_provenances mixed_layouts_mean
optional_fields_of_one_segment overwritten pickles_then_sequences replaced_in_one_run repaired_manifest
rounded_to_float16_heads scores_by_sample scores_of_hallucination several_files_per_segment split_source
square_mean subset_by_split
"""


def kind(function: Callable[[Path], None]) -> Callable[[Path], None]:
    """Add a function that writes a store to KINDS."""
    KINDS[function.__name__] = function
    return function


def variants(options: Mapping[str, Mapping[str, Any]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds a function to KINDS once for each name in `options`, called with its value."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        for name, values in options.items():
            KINDS[name] = partial(function, **values)
        return function

    return add


# Sources


def inputs(path: Path, name: str = "inputs") -> Path:
    """Return a folder for sources next to the store; make it if it does not exist."""
    folder = path.parent / name
    folder.mkdir(exist_ok=True)
    return folder


def square(k: int, **options: Any) -> dict[str, Any]:
    """Return a trace whose attention is not causal."""
    return make_trace(k, causal=False, **options)


def changed(trace: dict[str, Any]) -> dict[str, Any]:
    """Return the trace with another answer and other hidden states."""
    hidden = [h + 1 for h in trace["hidden_states"]]
    return {**trace, "hidden_states": hidden, "generated_answer_clean": "another"}


def with_next_token(trace: dict[str, Any]) -> dict[str, Any]:
    """Return the trace with one more token than hidden states."""
    count = len(trace["tokens"]) + 1
    return trace | {"tokens": np.arange(count) + 7, "tokens_decoded": [f"n{k}" for k in range(count)]}


def layers_of(trace: dict[str, Any], *, reverse: bool = False) -> list[dict[str, np.ndarray]]:
    """Return a graph for each layer, with edges where the head-averaged attention exceeds 0.4.

    The graphs are dicts of arrays, because the import of torch_geometric takes many seconds.
    """
    found = []
    for hidden, attention in zip(trace["hidden_states"], trace["attentions"], strict=True):
        mean = np.tril(attention.astype("f4").mean(0))
        target, source = np.nonzero(mean > 0.4)
        weight = mean[target, source].astype(attention.dtype)
        index = np.stack([target, source] if reverse else [source, target])
        found.append({"x": hidden, "edge_index": index, "edge_attr": weight[:, None], "num_nodes": len(hidden)})
    return found


def graphs_of(traces: Sequence[dict[str, Any]], *, reverse: bool = False, **more: Any) -> dict[str, Any]:
    """Return the content of a file of graphs."""
    graphs = [layers_of(t, reverse=reverse) for t in traces]
    return {"graphs": graphs, "question_ids": [t["question_id"] for t in traces]} | more


def sequences_of(traces: Sequence[dict[str, Any]], added: float = 0) -> dict[str, Any]:
    """Return the content of a file of last tokens, to which `added` was added."""
    last = np.stack([np.stack(t["hidden_states"])[:, -1] for t in traces])
    labels = np.array([(0, 1, np.nan)[k % 3] for k in range(len(traces))])
    return {
        "sequences": last + last.dtype.type(added),
        "labels": labels,
        "question_ids": [t["question_id"] for t in traces],
    }


def save_torch(path: Path, value: Any, *, zip_format: bool = True) -> Path:
    """Write a .pt file with a value whose arrays become tensors; return the path."""
    import torch

    def convert(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: convert(v) for key, v in item.items()}
        if isinstance(item, list):
            return [convert(v) for v in item]
        return torch.from_numpy(item.copy()) if isinstance(item, np.ndarray) else item

    path.parent.mkdir(exist_ok=True)
    torch.save(convert(value), path, _use_new_zipfile_serialization=zip_format)
    return path


@contextmanager
def small_segments(**limits: int) -> Iterator[None]:
    """Change the default limits commit_bytes and split_bytes of StoreWriter, and the former of conversions."""
    least = limits.get("commit_bytes", cutting.MIN_BYTES)
    with mock.patch.dict(StoreWriter.__init__.__kwdefaults__, limits), mock.patch.object(cutting, "MIN_BYTES", least):
        yield


def append_source(writer: StoreWriter, name: str, traces: Sequence[dict[str, Any]]) -> None:
    """Append traces to a writer as one source."""
    writer.begin_source(name, len(traces), "", None)
    for position, trace in enumerate(traces):
        writer.append_packed(writer.pack(record_from_dict(trace, source_name=name, position=position)))
    writer.end_source()


# Attention and layouts


@variants({f"attention_{mode}": {"attention": mode} for mode in schema.ATTENTION_MODES})
def attention(path: Path, *, attention: str) -> None:
    write_store(path, make_traces(6), attention=attention, score=lambda k: k / 4)


@variants({f"square_{mode}": {"attention": mode} for mode in ("mean", "heads")})
def square_attention(path: Path, *, attention: str) -> None:
    write_store(path, [square(k, tokens=3 + k) for k in range(3)], attention=attention)


@variants({f"mixed_layouts_{mode}": {"attention": mode} for mode in ("mean", "heads")})
def mixed_layouts(path: Path, *, attention: str) -> None:
    traces = [square(k, tokens=4) if k in (1, 2, 4) else make_trace(k, tokens=2 + k) for k in range(6)]
    write_store(path, traces, attention=attention, commit_after=[0, 3])


@kind
def one_head_and_one_layer(path: Path) -> None:
    write_store(path, make_traces(3, layers=1, heads=1, dim=1), attention="heads")


@kind
def one_token_traces(path: Path) -> None:
    write_store(path, make_traces(4, tokens=1, layers=2), attention="heads")


@kind
def attention_missing_in_the_sources(path: Path) -> None:
    traces = make_traces(3)
    for trace in traces:
        del trace["attentions"]
    convert(write_pickle(inputs(path) / "a.pkl", traces), path, "--attention", "none")


@variants({"several_inner_chunks": {"codec": "none"}, "several_inner_chunks_zstd": {"codec": "blosc-zstd"}})
def several_inner_chunks(path: Path, *, codec: str) -> None:
    traces = [make_trace(k, tokens=90 + 40 * k, layers=2, dim=700, heads=4) for k in range(2)]
    write_store(path, traces, attention="heads", codec=codec)


@variants({f"large_and_small_layers_{mode}": {"attention": mode} for mode in ("mean", "heads")})
def large_and_small_layers(path: Path, *, attention: str) -> None:
    """Mix traces whose layers are small with others: the segment has the checksums of all."""
    traces = make_traces(4, tokens=lambda k: (150, 2, 160, 140)[k], layers=2, dim=200, heads=4, causal=lambda k: k < 3)
    write_store(path, traces, attention=attention)


# Edges and last tokens


@kind
def large_and_small_layers_of_edges(path: Path) -> None:
    value = graphs_of(make_traces(3, tokens=lambda k: (90, 3, 110)[k], layers=2))
    convert(save_torch(inputs(path, "gnn") / "preprocessed_0.pt", value), path)


@variants({"edges": {}, "edges_reversed": {"reverse": True}, "edges_legacy_file": {"zip_format": False}})
def edges(path: Path, *, reverse: bool = False, zip_format: bool = True) -> None:
    value = graphs_of(make_traces(5, tokens=lambda k: k + 2), reverse=reverse)
    convert(save_torch(inputs(path, "gnn") / "preprocessed_0.pt", value, zip_format=zip_format), path)


@kind
def edges_of_both_directions(path: Path) -> None:
    """Reverse the edges of some traces, in a segment with others and in one of their own."""
    traces, folder = make_traces(8, tokens=4), inputs(path, "gnn")
    save_torch(folder / "a.pt", graphs_of(traces[:2]))
    save_torch(folder / "b.pt", graphs_of(traces[2:5], reverse=True))
    convert(folder, path)
    save_torch(folder / "c.pt", graphs_of(traces[5:], reverse=True))
    convert(folder, path)


@kind
def layers_without_edges(path: Path) -> None:
    value = graphs_of(make_traces(4, tokens=3))
    for k, layer in ((0, 0), (1, 1), (3, 2)):
        for name in ("edge_index", "edge_attr"):
            array = value["graphs"][k][layer][name]
            value["graphs"][k][layer][name] = array[:, :0] if name == "edge_index" else array[:0]
    convert(write_pickle(inputs(path) / "graphs.pkl", value), path)


@kind
def no_edges_at_all(path: Path) -> None:
    value = graphs_of(make_traces(2, tokens=3))
    for layer in (layer for layers in value["graphs"] for layer in layers):
        layer |= {"edge_index": layer["edge_index"][:, :0], "edge_attr": layer["edge_attr"][:0]}
    convert(write_pickle(inputs(path) / "graphs.pkl", value), path)


@kind
def edges_with_labels_and_fields(path: Path) -> None:
    value = graphs_of(make_traces(3, tokens=3), labels=[0.0, float("nan"), 1.0])
    value["graphs"][1][0]["note"] = "only layer 0 has it"
    convert(write_pickle(inputs(path) / "graphs.pkl", value), path)


@variants({"edges_float32": {"dtype": "f4", "codec": "none"}, "edges_blosc": {"dtype": "f2", "codec": "blosc-lz4"}})
def edges_of_arrays(path: Path, *, dtype: str, codec: str) -> None:
    value = graphs_of(make_traces(4, tokens=5, dtype=dtype))
    convert(write_pickle(inputs(path) / "graphs.pkl", value), path, "--dtype", "keep", "--codec", codec)


@kind
def edges_bfloat16(path: Path) -> None:
    import torch

    value = graphs_of(make_traces(3, tokens=4, dtype="f4"))
    for layer in (layer for layers in value["graphs"] for layer in layers):
        layer |= {name: torch.from_numpy(layer[name]).bfloat16() for name in ("x", "edge_attr")}
    convert(write_pickle(inputs(path) / "graphs.pkl", value), path, "--dtype", "keep")


@kind
def graphs_without_attention(path: Path) -> None:
    """Convert graphs and pickles with --attention none."""
    write_pickle(inputs(path) / "graphs.pkl", graphs_of(make_traces(2, tokens=3)))
    write_pickle(inputs(path) / "traces.pkl", make_traces(5)[2:])
    convert(inputs(path), path, "--attention", "none")


@kind
def sequences_only(path: Path) -> None:
    convert(save_torch(inputs(path, "lstm_solo") / "preprocessed_0.pt", sequences_of(make_traces(5))), path)


@kind
def sequences_only_float32_zstd(path: Path) -> None:
    source = write_pickle(inputs(path) / "sequences.pkl", sequences_of(make_traces(7, dtype="f4")))
    convert(source, path, "--dtype", "keep", "--codec", "zstd")


@kind
def graphs_and_sequences_together(path: Path) -> None:
    traces, folder = make_traces(6, tokens=3), inputs(path)
    save_torch(folder / "gnn/preprocessed_0.pt", graphs_of(traces[:5]))
    save_torch(folder / "lstm_solo/preprocessed_0.pt", sequences_of(traces[1:]))
    convert(folder, path)


def convert_days(path: Path, *values: object, options: Sequence[object] = ()) -> None:
    """Convert one file on each day, so that each is a commit."""
    for day, value in enumerate(values):
        convert(write_pickle(inputs(path) / f"day{day}.pkl", value), path, *options)


@kind
def sequences_then_graphs(path: Path) -> None:
    """Add graphs to traces of the first index part by patches in the second one."""
    traces = make_traces(9, tokens=3)
    convert_days(path, sequences_of(traces[:8], 1), graphs_of(traces[2:4]))


@kind
def graphs_then_sequences(path: Path) -> None:
    traces = make_traces(9, tokens=3)
    convert_days(path, graphs_of(traces[:8]), sequences_of(traces[5:], 1))


@kind
def patches_merged_into_their_part(path: Path) -> None:
    traces = make_traces(8, tokens=3)
    convert_days(path, graphs_of(traces[:2]), sequences_of(traces[:8], 1))


@kind
def patches_of_several_parts(path: Path) -> None:
    """Add graphs or sequences to traces of the days before, and new traces."""
    traces = make_traces(20, tokens=2)
    convert_days(
        path,
        sequences_of(traces[:12]),
        graphs_of([*traces[1:3], *traces[12:15]]),
        graphs_of(traces[4:5]),
        sequences_of([traces[12], traces[15]]),
    )


@kind
def sequences_then_pickles(path: Path) -> None:
    """Add hidden states of all tokens, attention and texts by pickles."""
    traces = make_traces(6, tokens=lambda k: 2 + k)
    convert_days(path, sequences_of(traces[:5]), [t | make_optional(len(t["tokens"])) for t in traces[3:]])


@kind
def pickles_then_sequences(path: Path) -> None:
    traces = make_traces(6)
    convert_days(path, traces[:5], sequences_of(traces[4:]))


# Dtypes and codecs


DTYPES = {
    f"{name}_{mode}": {"source": source, "attention": mode, "dtype": dtype}
    for name, source, dtype in (
        ("rounded_to_float16", "f4", "float16"),
        ("keep_float32", "f4", "keep"),
        ("keep_bfloat16", "bfloat16", "keep"),
        ("bfloat16_to_float16", "bfloat16", "float16"),
    )
    for mode in ("mean", "heads")
}


@variants(DTYPES)
def dtypes(path: Path, *, source: str, attention: str, dtype: str) -> None:
    traces = make_traces(4, dtype="f4")
    traces[3] = square(3, dtype="f4")
    if source == "bfloat16":
        import torch

        traces = [as_torch(t, torch.bfloat16) for t in traces]
    write_store(path, traces, attention=attention, dtype=dtype)


@kind
def keep_different_dtypes(path: Path) -> None:
    """Write hidden states in float32 and attention in float16."""
    traces = make_traces(3, tokens=3)
    for trace in traces:
        trace["hidden_states"] = [h.astype("f4") / 3 for h in trace["hidden_states"]]
    write_store(path, traces, attention="heads", dtype="keep")


CODECS = {f"codec_{codec.replace('-', '_')}": {"codec": codec} for codec in ("blosc-zstd", "blosc-lz4", "zstd")}


@variants(
    {name: {**options, "attention": "mean", "dtype": "f2"} for name, options in CODECS.items()}
    | {f"{name}_float32_heads": {**options, "attention": "heads", "dtype": "f4"} for name, options in CODECS.items()}
)
def codecs(path: Path, *, codec: str, attention: str, dtype: str) -> None:
    traces = make_traces(5, dtype=dtype, tokens=lambda k: 9 - k)
    write_store(path, traces, attention=attention, dtype="keep", codec=codec, commit_after=[2])


# Commits, conflicts, merges


@variants(
    {
        "index_parts_unmerged": {"ends": [7, 10, 11]},
        "index_parts_merged": {"ends": [0, 1, 2, 3]},
        "index_parts_merged_in_part": {"ends": [5, 6, 7, 8, 9]},
    }
)
def index_parts(path: Path, *, ends: list[int]) -> None:
    write_store(path, make_traces(ends[-1] + 1), score=lambda k: k / 8, group=lambda k: f"g{k % 3}", commit_after=ends)


@kind
def several_files_per_segment(path: Path) -> None:
    traces = make_traces(7)
    for k in range(3):
        write_pickle(inputs(path) / f"{k}.pkl", traces[2 * k : 2 * k + 3])  # Neighbors share a trace.
    convert(inputs(path), path)


@kind
def replaced_traces(path: Path) -> None:
    """Replace traces, one of them twice, by traces of other lengths, layouts and fields."""
    traces = make_traces(8, tokens=4)
    second = [changed(traces[1]), make_trace(2, tokens=7), square(3, tokens=4) | make_optional(4), make_trace(8)]
    third = [changed(changed(traces[1]))]
    convert_days(path, traces, second, third, options=["--on-conflict", "keep-last"])


@kind
def replaced_in_one_run(path: Path) -> None:
    traces = make_traces(5)
    write_pickle(inputs(path) / "a.pkl", traces)
    write_pickle(inputs(path) / "b.pkl", [changed(traces[0]), changed(changed(traces[0])), changed(traces[4])])
    convert(inputs(path), path, "--on-conflict", "keep-last")


@kind
def replaced_sequences_and_graphs(path: Path) -> None:
    traces = make_traces(6, tokens=3)
    days = [
        graphs_of(traces),
        sequences_of(traces, 1),
        sequences_of(traces[1:3], 2),
        graphs_of([make_trace(4, tokens=6)]),
    ]
    convert_days(path, *days, options=["--on-conflict", "keep-last"])


@kind
def replaced_nonfinite(path: Path) -> None:
    """Replace a trace with NaN by one without, and one without by one with NaN."""
    traces = make_traces(4, tokens=3)
    bad = [t | {"hidden_states": [h * np.float16("nan") for h in t["hidden_states"]]} for t in traces]
    convert_days(path, [bad[0], *traces[1:]], [traces[0], bad[1]], options=["--on-conflict", "keep-last"])


@kind
def skipped_traces(path: Path) -> None:
    traces = make_traces(5)
    second = [changed(traces[1]), make_trace(7), changed(traces[4])]
    convert_days(path, traces, second, options=["--on-conflict", "keep-first"])


@kind
def refused_file(path: Path) -> None:
    write_pickle(inputs(path) / "a.pkl", make_traces(2))
    write_pickle(inputs(path) / "b.pkl", [make_trace(2), {"hidden_states": 1}])
    write_pickle(inputs(path) / "c.pkl", [make_trace(3)])
    convert(inputs(path), path, "--skip-bad")


@kind
def merged(path: Path) -> None:
    """Merge stores of pickles and of last tokens, with several commits, scores, groups and labels."""
    traces = make_traces(9)
    one, two, three = (path.parent / f"{name}.zarr" for name in ("one", "two", "three"))
    write_store(one, traces[:5], score=lambda k: k / 8 if k % 2 else None, group="é", commit_after=[1, 2])
    write_store(two, traces[3:8], score=0.75, label=lambda k: k % 2 if k < 3 else None, codec="zstd")
    convert(write_pickle(inputs(path) / "sequences.pkl", sequences_of(traces[6:])), three)
    command("merge", one, two, three, path, "--codec", "blosc-zstd", check=0)


@kind
def merged_into_a_store(path: Path) -> None:
    """Merge into one store several times; the second commit adds places to traces of the first one."""
    traces = make_traces(6, tokens=3)
    one, two = path.parent / "one.zarr", path.parent / "two.zarr"
    convert_days(one, sequences_of(traces[:5], 1))
    convert(write_pickle(inputs(path) / "graphs.pkl", graphs_of(traces[3:])), two)
    for store in (one, two, one):
        command("merge", store, path, check=0)


@kind
def merged_with_patches(path: Path) -> None:
    sequences_then_graphs(path.parent / "one.zarr")
    command("merge", path.parent / "one.zarr", path, check=0)


def make_large(path: Path) -> Path:
    """Write a store of 15 traces in three segments with scores, two samples of q4 and optional fields."""
    traces = make_traces(15, tokens=3)
    traces[12] |= {"question_id": "q4", "sample": 1} | make_optional(3)
    return write_store(path, traces, score=lambda k: k / 20, commit_after=[4, 9])


@variants(
    {
        "subset_by_ids": {"words": ["--ids", "ids.txt"]},
        "subset_by_split": {"words": ["--split", "train"]},
        "subset_by_segments": {"words": ["--segments", "0,2", "--codec", "blosc-zstd"]},
    }
)
def subset(path: Path, *, words: list[str]) -> None:
    (path.parent / "ids.txt").write_text("q14\nq4\nq0\n")
    words = [str(path.parent / word) if word.endswith(".txt") else word for word in words]
    command("subset", make_large(path.parent / "large.zarr"), path, *words, check=0)


@kind
def subset_with_patches(path: Path) -> None:
    patches_of_several_parts(path.parent / "all.zarr")
    (path.parent / "ids.txt").write_text("q1\nq4\nq13\nq12\n")
    command("subset", path.parent / "all.zarr", path, "--ids", path.parent / "ids.txt", check=0)


@kind
def overwritten(path: Path) -> None:
    write_store(path, make_traces(3))
    convert(write_pickle(inputs(path) / "a.pkl", make_traces(2, seed=5)), path, "--overwrite")


def lens_values(norm: str, dtype: str) -> dict[str, Any]:
    """Return the arguments of set_lens for the traces of make_trace and a vocabulary of 40 tokens."""
    rng = np.random.default_rng(0)
    dim = make_trace(0)["hidden_states"][0].shape[-1]
    values = {"unembedding": rng.standard_normal((40, dim)).astype("f4"), "norm": norm, "eps": 1e-5}
    if norm != "none":
        values["norm_weight"] = rng.random(dim)
    if norm == "layer":
        values |= {"norm_bias": rng.random(dim), "bias": rng.random(40)}
    if dtype == "bfloat16":
        import torch

        values["unembedding"] = torch.from_numpy(values["unembedding"]).bfloat16()
    return values


@variants(
    {
        "lens": {"norm": "rms", "dtype": "float32", "options": {}},
        "lens_zstd": {"norm": "layer", "dtype": "float32", "options": {"codec": "zstd", "dtype": "keep"}},
        "lens_bfloat16": {"norm": "none", "dtype": "bfloat16", "options": {"dtype": "keep"}},
    }
)
def lens(path: Path, *, norm: str, dtype: str, options: dict[str, Any]) -> None:
    """Store a final norm and an unembedding matrix between two commits of traces."""
    traces = make_traces(5, tokens=3)
    with tracestore.create(path, **options) as writer:
        for trace in traces[:3]:
            writer.append(trace)
        writer.set_lens(**lens_values(norm, dtype))
        writer.flush()
        for trace in traces[3:]:
            writer.append(trace)


@kind
def lens_merged(path: Path) -> None:
    """Merge a store with a lens and one without."""
    lens(path.parent / "one.zarr", norm="layer", dtype="float32", options={})
    write_store(path.parent / "two.zarr", make_traces(8, tokens=3)[5:])
    command("merge", path.parent / "two.zarr", path.parent / "one.zarr", path, check=0)


@kind
def split_source(path: Path) -> None:
    """Write a source that does not fit into a segment."""
    with small_segments(split_bytes=2_000):
        convert(write_pickle(inputs(path) / "a.pkl", make_traces(9, tokens=4)), path)


@kind
def several_segments_per_commit(path: Path) -> None:
    """Pack the sources of one commit into several segments, some with rows of two sources."""
    traces = make_traces(12, tokens=3)
    with StoreWriter(path, split_bytes=1_500) as writer:
        for k in range(3):
            append_source(writer, f"part {k}", traces[4 * k : 4 * k + 4])
        writer.commit()
        append_source(writer, "more", make_traces(14)[12:])
        writer.commit()


@kind
def one_commit_per_source(path: Path) -> None:
    for k, trace in enumerate(make_traces(6)):
        write_pickle(inputs(path) / f"{k}.pkl.gz", [trace, changed(trace) | {"question_id": f"c{k}"}])
    with small_segments(commit_bytes=1):
        convert(inputs(path), path)


@kind
def continued_after_a_bad_file(path: Path) -> None:
    """Continue a conversion that ended with an error, after the file was replaced."""
    traces = make_traces(7)
    write_pickle(inputs(path) / "a.pkl", traces[:3])
    data = write_pickle(inputs(path) / "b.pkl", traces[3:]).read_bytes()
    (inputs(path) / "b.pkl").write_bytes(data[:-100])
    with small_segments(commit_bytes=1):
        convert(inputs(path), path, check=3)
        (inputs(path) / "b.pkl").write_bytes(data)
        convert(inputs(path), path)


@variants({"repaired_manifest": {"copy_is_intact": True}, "damaged_manifest_renamed": {"copy_is_intact": False}})
def repaired(path: Path, *, copy_is_intact: bool) -> None:
    """Damage the newest manifest, with or without its copy, and repair the store; then add a commit."""
    traces = make_traces(8)
    write_store(path, traces[:6], score=0.5, commit_after=[3])
    for name in ("manifest/0000000002", *(() if copy_is_intact else ("index/0000000002.manifest",))):
        (path / name).chmod(0o644)
        (path / name).write_bytes((path / name).read_bytes()[:-2])
    command("verify", path, "--repair", check=0)
    with tracestore.create(path, append=True) as writer:
        writer.append(traces[7])


@variants(
    {
        "continued_after_a_kill": {"generation": 2, "follow": True},
        "continued_after_a_kill_before_the_first_commit": {"generation": 1, "follow": True},
        "killed": {"generation": 3, "follow": False},
    }
)
def killed_conversion(path: Path, *, generation: int, follow: bool) -> None:
    """Kill a conversion before the manifest of `generation` gets its name, and continue it if `follow`."""
    for k, trace in enumerate(make_traces(6)):
        write_pickle(inputs(path) / f"{k // 2}-{k}.pkl", [trace])
    original = os.link

    def link(source: Any, target: Any) -> None:
        if os.path.basename(target) == f"{generation:010d}" and "manifest" in os.fspath(target):
            os._exit(9)
        original(source, target)

    with small_segments(commit_bytes=1):
        child = os.fork()
        if child == 0:
            try:
                with mock.patch("os.link", link):
                    convert(inputs(path), path)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        if follow:
            convert(inputs(path), path)


# Ids, texts, extras


@kind
def several_samples(path: Path) -> None:
    traces = [make_trace(k, tokens=3) | {"question_id": f"q{k // 3}", "sample": k % 3} for k in range(8)]
    traces[6] |= {"sample": 2**31 - 1}
    write_store(path, traces, score=lambda k: k / 8)


IDS = ["é", "質問 1", "\U0001f40d", "\ud800", "a\udfff\ud800b", "a\0b", "line\nbreak", "x" * 300, "-1", " ", "../.."]
IDS += ["e\u0301"]


@kind
def unusual_ids(path: Path) -> None:
    """Use ids that are not ASCII, have lone surrogates, or are the same in a normal form of Unicode."""
    traces = [make_trace(k) | {"question_id": name} for k, name in enumerate(IDS)]
    write_store(path, traces, group=lambda k: IDS[-k], commit_after=[6])


@kind
def unusual_texts(path: Path) -> None:
    traces = make_traces(len(IDS), tokens=2)
    for k, (trace, text) in enumerate(zip(traces, IDS, strict=True)):
        trace |= {"tokens_decoded": [text, ""], "question": text, "generated_answer_clean": text[:k]}
        trace |= {f"key {text}": text} if k % 2 else {}
    convert(write_pickle(inputs(path) / "a.pkl", traces), path)


@kind
def integer_ids(path: Path) -> None:
    traces = [t | {"question_id": k - 2} for k, t in enumerate(make_traces(4))]
    traces[3] |= {"question_id": np.int64(2**40)}
    write_store(path, traces)


@kind
def ids_made_up(path: Path) -> None:
    """Write traces without question_id; some have an id with an older name."""
    traces = make_traces(4)
    for k, trace in enumerate(traces):
        del trace["question_id"]
        trace |= {"global_example_id": 100 + k} if k % 2 else {}
    write_pickle(inputs(path) / "batch 0é.pkl", traces)
    (inputs(path) / "sub").mkdir()
    write_pickle(inputs(path) / "sub/b.pkl", traces[:1])
    convert(inputs(path), path)
    with tracestore.create(path, append=True) as writer:
        writer.append(traces[2])


@kind
def texts_present_and_absent(path: Path) -> None:
    names = ("question", "generated_answer_clean", "generated_answer", "generated_text", "tokens_decoded")
    traces = []
    for k in range(2 ** len(names)):
        trace = make_trace(k, tokens=2)
        full = trace | {name: f"{name} {k}" if k % 3 else "" for name in names[:-1]}
        traces.append({key: value for key, value in full.items() if key not in names or k >> names.index(key) & 1})
    convert(write_pickle(inputs(path) / "a.pkl", traces), path)


@kind
def prompt_lengths(path: Path) -> None:
    lengths = (None, 0, 3, 4)
    write_store(path, [t | {"prompt_length": n} for t, n in zip(make_traces(4), lengths, strict=True)])


EXTRAS: list[dict[str, Any]] = [
    {},
    {
        "logits": np.arange(6, dtype="f4").reshape(2, 3),
        "half": np.array([1.5, np.nan, -np.inf], "f2"),
        "big_endian": np.arange(3, dtype=">i4"),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "complex": np.array([1 + 2j, -3j]),
        "bool": np.array([True, False]),
        "texts": np.array(["a", "b\u00e9"]),
        "codes": np.array([b"a", b"bc"]),
        "empty": np.empty((0, 3), "<f4"),
        "scalar": np.array(2.5),
        "list": [np.arange(2, dtype="u1"), {"nested": np.array([7], "i8")}],
    },
    {"raw": b"\0\xff\x80", "no_bytes": b"", "list": [b"a", [b"b"]]},
    {"nan": float("nan"), "inf": float("inf"), "list": [-float("inf"), 1e300, -0.0, 5e-324], "float": 0.1},
    {"int": 2**63, "negative": -(2**70), "list": [2**63 - 1, -(2**63), 2**100], "zero": 0},
    {
        "numbers": {1: "a", 2.5: [None], None: b"x", False: {}},
        "dollar": {"$float": "nan", "plain": 1},
        "array": {"$array": ["<f4", [1], "AAAA"]},
        "deep": {"a": {"b": {3: {"$c": [{"d": {4: float("inf")}}]}}}},
        "bytes": {b"k": {b"": 2**64}},
    },
    {
        "$dict": "a name that looks like an encoding",
        "none": None,
        "true": True,
        "list": [[], {}, [[[]]], "", None, False],
        "tuple": (1, ("a", 2.5)),
        "scalars": [np.float32(0.1), np.int8(-3), np.bool_(True), np.str_("é"), np.float64("nan")],
        "é \U0001f40d \ud800": "\udfff",
        "": "an empty name",
    },
]


@kind
def extras(path: Path) -> None:
    write_store(path, [make_trace(k, tokens=2) | more for k, more in enumerate(EXTRAS)])


@kind
def extras_bfloat16(path: Path) -> None:
    import torch

    values = {
        "brain": torch.tensor([[1.5, -2.0, float("nan")]], dtype=torch.bfloat16),
        "scalar": torch.tensor(0.125, dtype=torch.bfloat16),
        "in_a_dict": {1: torch.ones(2, dtype=torch.bfloat16)},
        "float": torch.tensor([0.1]),
    }
    write_store(path, [make_trace(0) | values, make_trace(1)])


# Scores, labels, groups


@kind
def no_scores(path: Path) -> None:
    write_store(path, make_traces(3), group=lambda k: ["a", "", "b"][k])


@kind
def labels(path: Path) -> None:
    values = (0, 1, None, 1)
    write_store(path, make_traces(4), label=lambda k: values[k], score=lambda k: k / 4 if k != 1 else None)


@kind
def labels_of_later_sources(path: Path) -> None:
    """Add labels by sequences to traces of a graph file without them."""
    traces = make_traces(4, tokens=2)
    convert_days(path, graphs_of(traces), sequences_of(traces))


@kind
def groups(path: Path) -> None:
    names = ("é", "", "\U0001f40d", "\ud800", "x" * 99)
    scores = {f"q{k}": k / 4 for k in range(5)}
    write_scores(
        inputs(path) / "scores.csv", scores, extra=[("group", {f"q{k}": n for k, n in enumerate(names[:3] * 2)})]
    )
    convert(write_pickle(inputs(path) / "a.pkl", make_traces(5)), path, "--scores", inputs(path) / "scores.csv")
    with tracestore.create(path, append=True) as writer:
        for k, name in enumerate(names):
            writer.append(make_trace(10 + k), group=name)


@kind
def scores_of_hallucination(path: Path) -> None:
    scores = write_scores(inputs(path) / "scores.csv", {"q0": 0.75, "q2": -1e300}, "p_hallucination")
    convert(write_pickle(inputs(path) / "a.pkl", make_traces(3)), path, "--scores", scores)


def add_score(path: Path, scores: dict[str, float], *words: str) -> None:
    """Add a named score to a store."""
    command("score", path, "--scores", write_scores(inputs(path) / "judged.csv", scores), *words, check=0)


@kind
def named_scores(path: Path) -> None:
    write_store(path, make_traces(5), score=lambda k: k / 4)
    add_score(path, {"q0": 0.25, "q3": 1.0}, "--name", "Judge-2.b_x", "--version", "2", "--source", "a judge é")
    add_score(path, {"q1": 5.0}, "--name", "other", "--score-direction", "hallucination")


@kind
def default_score_changed(path: Path) -> None:
    write_store(path, make_traces(5), score=lambda k: k / 4 if k else None, commit_after=[2])
    add_score(path, {"q0": 0.25, "q3": 1.0}, "--name", "judge", "--score-direction", "hallucination", "--default")


@kind
def default_score_without_values(path: Path) -> None:
    with tracestore.create(path) as writer:
        writer.define_score("judge", direction="hallucination", default=True)
        for trace in make_traces(3):
            writer.append(trace)


@kind
def scores_of_later_commits(path: Path) -> None:
    """Write columns with different named scores in different commits."""
    with tracestore.create(path, score_direction="hallucination") as writer:
        for k, trace in enumerate(make_traces(13)):
            if k in (8, 12):
                writer.flush()
                writer.define_score(f"judge{k}", source="é", version=None)
            scores = {f"judge{n}": k / 2 for n in (8, 12) if k > n}
            writer.append(trace, score=k / 16 if k % 2 else None, scores=scores)


@kind
def scores_by_sample(path: Path) -> None:
    write_store(path, [make_trace(0, tokens=2, seed=k) | {"sample": k} for k in range(4)])
    with (inputs(path) / "scores.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["question_id", "sample", "is_correct"], ["q0", 1, 1], ["q0", 3, 0]])
    command("score", path, "--scores", inputs(path) / "scores.csv", check=0)


# Optional fields


@variants({"optional_fields_of_all_rows": {"rows": range(4)}, "optional_fields_of_some_rows": {"rows": (1, 2)}})
def optional_fields(path: Path, *, rows: Sequence[int]) -> None:
    traces = make_traces(4, tokens=lambda k: k + 1)
    for k in rows:
        traces[k] |= make_optional(k + 1, seed=k)
    write_store(path, traces)


@kind
def optional_fields_of_one_segment(path: Path) -> None:
    traces = make_traces(6, tokens=3)
    traces[4] |= make_optional(3)
    write_store(path, traces, commit_after=[1, 3], codec="zstd")


@kind
def each_optional_field_alone(path: Path) -> None:
    """Write traces with one field each, in two segments."""
    values = make_optional(4)
    traces = [make_trace(k, tokens=4) | {name: values[name]} for k, name in enumerate(values)]
    write_store(path, traces, commit_after=[5])


@kind
def one_more_token(path: Path) -> None:
    """Write traces with and without a last token that has no hidden states."""
    traces = make_traces(4, tokens=lambda k: 3 + k)
    traces[1] = with_next_token(traces[1]) | make_optional(5)
    traces[2] = with_next_token(traces[2])
    del traces[2]["tokens_decoded"]
    traces[3] |= {"answer_span": (1, 6)}
    convert(write_pickle(inputs(path) / "a.pkl", traces), path)


@kind
def top_k_of_different_sizes(path: Path) -> None:
    rng, traces = np.random.default_rng(0), make_traces(4, tokens=lambda k: 2 + k)
    for k, (trace, name) in enumerate(zip(traces, ("top_ids", "top_logprobs", "both", "none"), strict=True)):
        shape = (2 + k, 1 + 2 * k)
        if name in ("top_ids", "both"):
            trace["top_ids"] = rng.integers(-1, 9, shape)
        if name in ("top_logprobs", "both"):
            trace["top_logprobs"] = np.where(rng.random(shape) < 0.3, np.nan, -rng.random(shape))
    write_store(path, traces)


@kind
def unknown_values(path: Path) -> None:
    """Write fields whose values mean unknown, zeros and extreme values."""
    nan = float("nan")
    traces = make_traces(7, tokens=3)
    traces[0] |= {"token_logprob": [nan] * 3, "token_entropy": [None, 0.5, -0.0], "token_label": [-1, -1, -1]}
    traces[1] |= {"top_ids": [[-1, -1]] * 3, "top_logprobs": [[nan, nan]] * 3, "answer_span": (2, -1)}
    traces[2] |= {"answer_span": (-1, 3), "temperature": nan, "seed": -1, "spans": []}
    traces[3] |= {"answer_span": (-1, -1), "temperature": 0.0, "seed": 0, "spans": None}
    traces[4] |= {"answer_span": (0, 0), "temperature": 1e30, "seed": 2**63 - 1, "generated_mask": [False, True, True]}
    traces[5] |= {"special_mask": [0, 0, 0], "token_logprob": [-float("inf"), 0, nan]}
    write_store(path, traces)


@kind
def spans(path: Path) -> None:
    answer, span = "é\ud800, baseless", {"start": 0, "end": 0, "type": ""}
    more = {"text": answer[:2], "array": np.arange(2), "big": 2**64, "raw": b"\0", "keys": {1: {"$x": float("nan")}}}
    values = [[], [span], [span, {**span, "end": 2, **more}], None]
    own = {"generated_answer_clean": answer}
    traces = [make_trace(k, tokens=2) | own | {"spans": value} for k, value in enumerate(values)]
    ragtruth = {"start": 4, "end": 12, "label_type": "Baseless Info", "text": "baseless", "implicit_true": False}
    traces.append(make_trace(4, tokens=2) | own | {"labels": [ragtruth]})
    convert(write_pickle(inputs(path) / "a.pkl", traces), path)


# Provenance


FULL = {
    "model": "org/model é",
    "model_revision": "0123abc",
    "tokenizer": "org/model",
    "prompt_sha256": "0f" * 32,
    "layer_ids": [0, 1, 3],
    "hidden_states_at": "block output",
    "final_norm": False,
    "attention_kind": "softmax",
    "compute_dtype": "float32",
    "sampling": {"do_sample": True, "temperature": 0.7, "stop": ["\n", None, 1]},
    "tool": "tracestore 0.1.0",
    "positions": "16",
}


@kind
def provenance(path: Path) -> None:
    write_store(path, make_traces(3), provenance=FULL)


@kind
def several_provenances(path: Path) -> None:
    """Append sources with a known provenance, the same one again, other ones, and none."""
    for k, known in enumerate((None, FULL, {"model": "b"}, FULL, {}, Provenance(tool="t"))):
        with tracestore.create(path, append=True, provenance=known, allow_mixed_provenance=True) as writer:
            for trace in make_traces(2):
                writer.append(trace | {"question_id": f"{k} {trace['question_id']}"})


@kind
def provenance_of_folders(path: Path) -> None:
    """Convert folders with and without a provenance; one adds places to traces of another one."""
    traces = make_traces(6, tokens=2)
    values = (graphs_of(traces[:4]), sequences_of(traces[2:]), graphs_of([make_trace(9, tokens=2)]))
    folders = []
    for name, value, known in zip("abc", values, ({"model": "a"}, {"model": "b"}, None), strict=True):
        folders.append(inputs(path, name))
        write_pickle(folders[-1] / f"{name}.pkl", value)
        if known is not None:
            (folders[-1] / "provenance.json").write_text(json.dumps(known))
    convert(*folders, path, "--allow-mixed-provenance")


@kind
def merged_provenances(path: Path) -> None:
    traces = make_traces(6)
    stores = [path.parent / f"{name}.zarr" for name in "abc"]
    for k, (store, known) in enumerate(zip(stores, (FULL, None, {"model": "b"}), strict=True)):
        write_store(store, traces[2 * k : 2 * k + 2], provenance=known)
    command("merge", *stores, path, "--allow-mixed-provenance", check=0)


# Values


@variants(
    {
        "nonfinite_float16": {"dtype": "f2", "attention": "mean"},
        "nonfinite_float32_heads": {"dtype": "f4", "attention": "heads"},
    }
)
def nonfinite(path: Path, *, dtype: str, attention: str) -> None:
    """Write NaN and infinities in hidden states, in attention, in both and in none, and zeros of both signs."""
    traces = make_traces(5, tokens=3, dtype=dtype)
    traces[0]["hidden_states"][1][2, 3] = np.nan
    traces[1]["attentions"][0][1, 2, 0] = np.inf
    traces[2]["hidden_states"][0][0] = [np.inf, -np.inf, np.nan, -np.nan, 0, -0.0, 6e-8, -6e-8]
    traces[2]["attentions"][2][0, 1, 1] = np.nan
    traces[3]["attentions"][1][0, 0, 2] = np.nan  # Above the diagonal, so that the layout is square.
    write_store(path, traces, dtype="keep", attention=attention)


@kind
def nonfinite_bfloat16(path: Path) -> None:
    import torch

    traces = [as_torch(t, torch.bfloat16) for t in make_traces(2, tokens=2, dtype="f4")]
    traces[0]["hidden_states"][0][0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    write_store(path, traces, dtype="keep", attention="heads")


@kind
def nonfinite_sequences_and_edges(path: Path) -> None:
    traces = make_traces(4, tokens=3)
    graphs, sequences = graphs_of(traces), sequences_of(traces[1:])
    graphs["graphs"][0][1]["edge_attr"][0] = np.nan
    sequences["sequences"][1, 0, 0] = np.inf
    convert_days(path, graphs, sequences)


# Expected values


def as_float32(array: np.ndarray, dtype: str | None) -> np.ndarray:
    """Return a copy of an array of a trace; one of bfloat16 as float32."""
    return array.astype("<f4") if dtype == "bfloat16" else array.copy()


def expected(path: Path) -> list[dict[str, Any]]:
    """Return the values of each trace as tracestore.open reads them, with bfloat16 as float32.

    A value that a trace lacks is None; a missing score or label is NaN.
    """
    with tracestore.open(path) as store:
        return [_expected(store, trace) for trace in store]


def _expected(store: tracestore.TraceStore, trace: tracestore.Trace) -> dict[str, Any]:
    hidden, weight = store.hidden_dtype, store.attention_dtype
    dense = edges = None
    if trace.attention_layout == "edges":
        ptr, index, weights = trace.attention_packed
        weights = as_float32(weights, weight)
        edges = [(index[a:b].T.copy(), weights[a:b]) for a, b in pairwise(ptr.tolist())]
    elif trace.attention_layout is not None:
        dense = as_float32(trace.attention, weight if store.attention_mode == "heads" else "float16")
    return {
        "question_id": trace.question_id,
        "sample": trace.sample,
        "source": trace.source,
        "provenance": None if trace.provenance is None else trace.provenance.to_json(),
        "hidden_states": as_float32(trace.hidden_states, hidden) if trace.num_tokens else None,
        "last_token": as_float32(trace.last_token, hidden),
        "attention": dense,
        "edges": edges,
        "tokens": trace.tokens,
        "tokens_decoded": trace.tokens_decoded,
        **{name: trace.text(name) for name in schema.TEXT_FIELDS},
        "answer": trace.answer,
        "prompt_length": trace.prompt_length,
        "extras": trace.extras,
        "scores": trace.scores,
        "score": trace.score,
        "label": trace.label,
        "group": trace.group,
        **{name: trace.optional(name) for name in schema.OPTIONAL_FIELDS},
        "has_nonfinite": trace.has_nonfinite,
        "edges_reversed": None if edges is None else trace.has_reversed_edges,
    }


def assert_same(found: Any, value: Any, where: str) -> None:
    """Compare two values of a trace: types, dtypes of floats, shapes and bits."""
    if isinstance(value, np.ndarray):
        assert isinstance(found, np.ndarray), where
        if value.dtype.kind in "iu" and found.dtype.kind in "iu":
            assert found.shape == value.shape and (found == value).all(), where
        else:
            assert_identical(found, value, where)
    elif isinstance(value, dict):
        # Keys may be NaN, and 1 is the same key as True.
        mine, theirs = ({repr(key): v for key, v in d.items()} for d in (value, found))
        assert theirs.keys() == mine.keys(), where
        for key in mine:
            assert_same(theirs[key], mine[key], f"{where}[{key}]")
    elif isinstance(value, list | tuple):
        assert isinstance(found, list | tuple) and len(found) == len(value), where
        for k, (mine, theirs) in enumerate(zip(value, found, strict=True)):
            assert_same(theirs, mine, f"{where}[{k}]")
    elif isinstance(value, float):
        assert math.isnan(found) if math.isnan(value) else repr(float(found)) == repr(value), (where, found, value)
    else:
        assert found == value and isinstance(found, type(value)), (where, found, value)


def write_all(folder: Path) -> None:
    """Write the stores and expected values of all kinds below a folder; replace existing ones."""
    for name in ("stores", "expected"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True)
    for name, write in KINDS.items():
        with tempfile.TemporaryDirectory() as work:
            path = Path(work) / "work" / f"{name}.zarr"
            path.parent.mkdir()
            write(path)
            values = expected(path)
            shutil.copytree(path, folder / "stores" / path.name)
        (folder / "expected" / f"{name}.pkl").write_bytes(pickle.dumps(values))
        print(f"{name}: {len(values)} traces")


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
