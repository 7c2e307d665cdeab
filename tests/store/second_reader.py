"""A reader of tracestore stores in plain zarr and numpy, written from docs/format.md alone."""

import json
from pathlib import Path

import numpy as np
import zarr


def read_store(path):
    """-> list of dicts, one a trace that has hidden states, in segment order."""
    root, traces = Path(path), []
    newest = max(p for p in (root / "manifest").iterdir() if p.name.isdigit())
    manifest = json.loads(newest.read_text().splitlines()[0])
    facts = manifest["attributes"]
    layers = facts["num_layers"]
    rows = facts["num_heads"] if facts["attention"] == "heads" else 1
    for number in range(sum(part["num_segments"] for part in manifest["index"])):
        group = zarr.open_group(root / "segments" / f"{number:08d}", mode="r")
        get = {name: group[name][:] for name in group.array_keys()}
        text = lambda name, k: get[name][get[name + "_offsets"][k] : get[name + "_offsets"][k + 1]].tobytes().decode()
        hidden_row = 0
        for k, tokens in enumerate(get["num_tokens"]):
            trace = {"question_id": text("question_id", k), "num_tokens": int(tokens)}
            if get["last_token_row"][k] >= 0:
                trace["last_token"] = get["last_token"][get["last_token_row"][k]]
            if tokens:
                states = get["hidden_states"][hidden_row : hidden_row + layers * tokens]
                trace["hidden_states"] = states.reshape(layers, tokens, -1)
                hidden_row += layers * tokens
            start, layout = get["attention_start"][k], get["attention_layout"][k]
            if layout in (1, 2):
                pairs = tokens * (tokens + 1) // 2 if layout == 1 else tokens * tokens
                flat = get["attention"][start : start + layers * rows * pairs].reshape(layers, rows, pairs)
                square = np.zeros((layers, rows, tokens, tokens), flat.dtype)
                i, j = np.tril_indices(tokens) if layout == 1 else np.divmod(np.arange(pairs), tokens)
                square[:, :, i, j] = flat
                trace["attention"] = square if facts["attention"] == "heads" else square[:, 0]
            elif layout == 3:
                ptr = get["edge_ptr"][start : start + layers + 1]
                trace["edges"] = [(get["edge_index"][a:b].T, get["edge_weight"][a:b]) for a, b in zip(ptr, ptr[1:])]
            traces.append(trace)
    return traces
