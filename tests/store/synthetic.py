"""Stores with an index but without arrays, to measure the costs of a million traces."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.helpers import make_traces, segment_of, write_store
from tracestore._core.kernels import crc32c
from tracestore.store.format import manifest as mf
from tracestore.store.format import paths
from tracestore.store.format.labels import ScoreField
from tracestore.store.format.ragged import encode_strings
from tracestore.store.format.zip_group import pack_group
from tracestore.store.io.files import LocalFiles
from tracestore.store.read.columns import Columns
from tracestore.store.read.index import StoreIndex


def make_index_only_store(
    path: Path, num_traces: int, num_segments: int, num_parts: int, question_id: Callable[[int], str] = "q{}".format
) -> None:
    """Write a store of traces q0, q1, ... of 30 to 70 tokens; each index part is half as long as the one before it."""
    files = LocalFiles(write_store(path, make_traces(1)))
    old = files.load_manifest(files.generations()[0])
    index = StoreIndex(files, old)
    template = index.part_arrays(0)
    weights = 2.0 ** np.arange(num_parts)[::-1]
    cuts = np.concatenate([[0], np.cumsum(weights / weights.sum() * num_traces)]).astype(int)
    per_segment = -(-num_traces // num_segments)
    parts, generation = [], old.generation
    for k in range(num_parts):
        first, end = int(cuts[k]), num_traces if k == num_parts - 1 else int(cuts[k + 1])
        n, ids = end - first, np.arange(first, end)
        empty = {name: np.zeros(int(name.endswith("_offsets")), dtype) for name, dtype in mf.PART_DTYPES.items()}
        arrays = {name: array for name, array in empty.items() if name != "key_table"}
        for name, dtype in mf.TRACE_COLUMNS.items():
            arrays[name] = np.full(n, template[name][0], dtype)
        tokens = 30 + ids * 7919 % 41
        arrays["num_tokens"] = tokens.astype("<i4")
        arrays["graph_segment"] = arrays["sequence_segment"] = (ids // per_segment).astype("<i4")
        arrays["graph_row"] = arrays["sequence_row"] = (ids % per_segment).astype("<i4")
        arrays["id"], arrays["id_offsets"] = encode_strings(map(question_id, ids.tolist()))
        first_segment = first // per_segment
        segments = (end // per_segment if k < num_parts - 1 else num_segments) - first_segment
        arrays["segment_traces"] = np.full(segments, per_segment, "<i4")
        arrays["segment_tokens"] = np.full(segments, int(tokens.sum()) // max(1, segments), "<i8")
        rows = (path / segment_of(files.root) / "rows.zip").read_bytes()
        arrays["segment_size"] = np.full(segments, len(rows), "<i8")
        arrays["segment_crc32c"] = np.full(segments, crc32c(rows), "<u4")
        names = [f"{number:08d}" for number in range(first_segment, first_segment + segments)]
        arrays["segment_name"], arrays["segment_name_offsets"] = encode_strings(names)
        data = pack_group(mf.with_key_table(arrays), {})
        generation += 1
        name = paths.small_file("index", generation, crc32c(data))
        (path / name).write_bytes(data)
        parts.append(mf.PartRef(name, len(data), crc32c(data), first, n, first_segment, segments, 0, 0))
    scores = np.linspace(0, 1, num_traces)
    values = Columns({"score": scores}, np.full(num_traces, np.nan), *encode_strings([""] * num_traces))
    data = pack_group(values.arrays(), {})
    columns = mf.ColumnsRef(
        paths.small_file("columns", generation, crc32c(data)), len(data), crc32c(data), 0, num_traces
    )
    (path / columns.path).write_bytes(data)
    attributes = replace(old.attributes, scores={"score": ScoreField()}, default_score="score")
    manifest = replace(
        old,
        attributes=attributes,
        generation=generation,
        parts=tuple(parts),
        columns=(columns,),
        num_traces=num_traces,
        num_scored=num_traces,
    )
    (path / paths.manifest(generation)).write_bytes(manifest.to_bytes())
