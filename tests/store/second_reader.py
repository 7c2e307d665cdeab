"""A reader of tracestore stores in plain zarr and numpy, written from docs/format.md alone."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import zarr


def read_store(path):
    """Return one dict per row of each segment, in order."""
    root, traces = Path(path), []
    newest = max(p for p in (root / "manifest").iterdir() if p.name.isdigit())
    manifest = json.loads(newest.read_text().splitlines()[0])
    facts = manifest["attributes"]
    layers, rows = facts["num_layers"], facts["num_heads"] if facts["attention"] == "heads" else 1
    for number in range(sum(part["num_segments"] for part in manifest["index"])):
        group = zarr.open_group(root / "segments" / f"{number:08d}", mode="r")
        get, hidden_row = {name: group[name][:] for name in group.array_keys()}, 0
        for k, (tokens, start) in enumerate(zip(get["num_tokens"], get["attention_start"], strict=True)):
            a, b = get["question_id_offsets"][k : k + 2]
            trace = {"question_id": get["question_id"][a:b].tobytes().decode(), "num_tokens": int(tokens)}
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
                trace["attention"] = square if facts["attention"] == "heads" else square[:, 0]
            elif layout == 3:
                ptr = get["edge_ptr"][start : start + layers + 1]
                trace["edges"] = [(get["edge_index"][a:b].T, get["edge_weight"][a:b]) for a, b in pairwise(ptr)]
            traces.append(trace)
    return traces
