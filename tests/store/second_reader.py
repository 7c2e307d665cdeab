"""A reader of tracestore stores in plain zarr and numpy, written from docs/format.md alone."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import zarr

RAGGED = ["tokens", "token_logprob", "token_entropy", "top_ids", "top_logprobs", "generated_mask", "special_mask"]
RAGGED += ["token_label", "spans"]
PER_ROW = ["answer_begin", "answer_end", "temperature", "seed"]


def read_store(path):
    """Return one dict per row of each segment, in order."""
    root, traces = Path(path), []
    newest = max(p for p in (root / "manifest").iterdir() if p.name.isdigit())
    manifest = json.loads(newest.read_text().splitlines()[0])
    facts = manifest["attributes"]
    layers, rows = facts["num_layers"], facts["num_heads"] if facts["attention"] == "heads" else 1
    for part in manifest["index"]:
        with zarr.storage.ZipStore(root / part["path"], mode="r") as file:
            index = {name: array[:] for name, array in zarr.open_group(file, mode="r").arrays()}
        names = [index["segment_name"][a:b].tobytes().decode() for a, b in pairwise(index["segment_name_offsets"])]
        for name in names:
            traces += read_segment(root / "segments" / name, layers, rows, facts["attention"] == "heads")
    return traces


def read_segment(folder, layers, rows, has_heads):
    """Return one dict per row of a segment."""
    arrays = ("hidden_states", "last_token", "attention", "edge_index", "edge_weight")
    get = {name: zarr.open_array(folder / name, mode="r")[:] for name in arrays if (folder / name).exists()}
    traces = []
    with zarr.storage.ZipStore(folder / "rows.zip", mode="r") as file:
        get |= {name: array[:] for name, array in zarr.open_group(file, mode="r").arrays()}
    hidden_row = start = edge_layer = 0
    for k, tokens in enumerate(get["num_tokens"].tolist()):
        a, b = get["question_id_offsets"][k : k + 2]
        trace = {"question_id": get["question_id"][a:b].tobytes().decode(), "num_tokens": int(tokens)}
        count = np.diff(get["tokens_offsets"][k : k + 2])[0]
        for name in RAGGED:
            a, b = get[f"{name}_offsets"][k : k + 2] if name in get else (0, 0)
            if b > a:
                values = get[name][a:b]
                trace[name] = json.loads(values.tobytes()) if name == "spans" else values
                if name in ("top_ids", "top_logprobs"):
                    trace[name] = values.reshape(count, -1)
        trace |= {name: get[name][k] for name in PER_ROW if name in get}
        if get["last_token_row"][k] >= 0:
            trace["last_token"] = get["last_token"][get["last_token_row"][k]]
        if tokens:
            states = get["hidden_states"][hidden_row : hidden_row + layers * tokens]
            trace["hidden_states"] = states.reshape(layers, tokens, -1)
            hidden_row += layers * tokens
        if (layout := get["attention_layout"][k]) in (1, 2):
            i, j = np.tril_indices(tokens) if layout == 1 else np.indices((tokens, tokens)).reshape(2, -1)
            flat = get["attention"][start : start + layers * rows * len(i)].reshape(layers, rows, len(i))
            square = np.zeros((layers, rows, tokens, tokens), flat.dtype)
            square[:, :, i, j] = flat
            trace["attention"] = square if has_heads else square[:, 0]
            start += flat.size
        elif layout == 3:
            ptr = get["edge_ptr"][edge_layer : edge_layer + layers + 1]
            edge_layer += layers
            trace["edges"] = [(get["edge_index"][a:b].T, get["edge_weight"][a:b]) for a, b in pairwise(ptr)]
        traces.append(trace)
    return traces


def read_provenance(path):
    """Return the provenance of each trace as a dict, or None where it is unknown."""
    root = Path(path)
    newest = max(p for p in (root / "manifest").iterdir() if p.name.isdigit())
    manifest, sources, owners = json.loads(newest.read_text().splitlines()[0]), [], []
    for part in manifest["index"]:
        with zarr.storage.ZipStore(root / part["path"], mode="r") as file:
            group = zarr.open_group(file, mode="r")
            sources += group["source_provenance"][:].tolist()
            owners += group["source"][:].tolist()
    known = [*manifest["attributes"]["provenance"], None]
    return [known[sources[source]] for source in owners]
