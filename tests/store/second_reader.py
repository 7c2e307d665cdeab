"""A reader of tracestore stores in zarr, numpy and google-crc32c, written from docs/format.md alone."""

import base64
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import zarr
from google_crc32c import value as crc32c
from zarr.storage import ZipStore

# Texts, with their bits of `fields`.
TEXTS = {"question": 7, "generated_answer_clean": 8, "generated_answer": 9, "generated_text": 10}
LARGE = ("hidden_states", "last_token", "attention", "edge_index", "edge_weight")
# Ragged arrays that are no optional fields.
REQUIRED = {*TEXTS, "question_id", "extras", "tokens", "tokens_decoded"}


def read_zip(path):
    """Return the arrays of the group in a ZIP archive by name."""
    with ZipStore(path, mode="r") as file:
        return {name: array[:] for name, array in zarr.open_group(file, mode="r").arrays()}


def item(group, name, k):
    """Return item k of ragged data."""
    begin, end = group[f"{name}_offsets"][k : k + 2].tolist()
    return group[name][begin:end]


def text(group, name, k):
    """Return item k of ragged strings, which may hold lone surrogates."""
    return item(group, name, k).tobytes().decode("utf-8", "surrogatepass")


def manifest(path):
    """Return the newest manifest whose checksum, that of the first line without its line end, is right."""
    for file in sorted(Path(path, "manifest").glob("[0-9]" * 10), reverse=True):
        lines = file.read_bytes().split(b"\n")
        if len(lines) > 1 and lines[1].decode() == f"{crc32c(lines[0]):08x}":
            return json.loads(lines[0])
    raise ValueError(f"{path}: no intact manifest")


def widen(values):
    """Return bfloat16, which is stored as uint16, as float32."""
    return (values.astype(np.uint32) << 16).view(np.float32)


def decode(value):
    """Return a value of extras or spans from its JSON form."""
    if isinstance(value, list):
        return [decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, content),) = value.items()
        if tag == "$array":
            dtype, shape, data = content
            data = base64.b64decode(data)
            values = widen(np.frombuffer(data, "<u2")) if dtype == "bfloat16" else np.frombuffer(data, dtype)
            return values.reshape(shape)
        if tag == "$bytes":
            return base64.b64decode(content)
        if tag in ("$float", "$int"):
            return float(content) if tag == "$float" else int(content)
        if tag == "$dict":
            return {decode(key): decode(v) for key, v in content}
    return {key: decode(v) for key, v in value.items()}


class Segment:
    """A segment: its small arrays, and where each row begins in the large ones."""

    def __init__(self, path, facts):
        """Read the small arrays; the large ones are read row by row."""
        self.rows = read_zip(path / "rows.zip")
        self.large = {name: zarr.open_array(path / name, mode="r") for name in LARGE if (path / name).exists()}
        self.num_layers, self.heads = facts["num_layers"], facts["num_heads"] if facts["attention"] == "heads" else None
        tokens, layout = self.rows["num_tokens"].astype(np.int64), self.rows["attention_layout"]
        area = np.select([layout == 1, layout == 2], [tokens * (tokens + 1) // 2, tokens * tokens], 0)
        sizes = np.stack([tokens, area * (self.heads or 1), layout == 3])
        starts = np.concatenate([np.zeros((3, 1), np.int64), np.cumsum(sizes, 1)], 1)
        self.hidden_start, self.attention_start, self.edge_start = self.num_layers * starts
        self.check_layers(dict(zip(("hidden_states", "attention"), sizes, strict=False)))

    def check_layers(self, sizes):
        """Compare each layer of each row with its checksum, if the segment has checksums of layers."""
        for name in ("hidden_states", "attention", "edge_index", "edge_weight"):
            if f"{name}_crc32c" in self.rows:
                uniform = np.repeat(sizes[name][sizes[name] > 0], self.num_layers) if name in sizes else ()
                counts = np.diff(self.rows["edge_ptr"]) if name.startswith("edge") else uniform
                layers = np.split(self.large[name][:], np.cumsum(counts)[:-1])
                for layer, expected in zip(layers, self.rows[f"{name}_crc32c"].tolist(), strict=True):
                    if crc32c(layer.tobytes()) != expected:
                        raise ValueError(f"{name}: a layer differs from its checksum")

    def read(self, name, selection):
        """Return a part of a large array, bfloat16 as float32."""
        array = self.large[name]
        bfloat16 = array.attrs.get("tracestore", {}).get("dtype") == "bfloat16"
        return widen(array[selection]) if bfloat16 else array[selection]

    def hidden_states(self, r):
        """Return the hidden states (L, S, D), or None for a row with a last token only."""
        if not self.rows["num_tokens"][r]:
            return None
        values = self.read("hidden_states", slice(*self.hidden_start[r : r + 2].tolist()))
        return values.reshape(self.num_layers, -1, values.shape[1])

    def attention(self, r):
        """Return the dense attention (L, S, S) or (L, H, S, S), or None."""
        layout, s = self.rows["attention_layout"][r], int(self.rows["num_tokens"][r])
        if layout not in (1, 2):
            return None
        values = self.read("attention", slice(*self.attention_start[r : r + 2].tolist()))
        shape = (self.num_layers, self.heads, s, s) if self.heads else (self.num_layers, s, s)
        if layout == 2:
            return values.reshape(shape)
        dense = np.zeros(shape, values.dtype)
        dense[..., *np.tril_indices(s)] = values.reshape(*shape[:-2], -1)
        return dense

    def edges(self, r):
        """Return a pair of edge_index (2, E) and weight (E,) for each layer, or None."""
        if self.rows["attention_layout"][r] != 3:
            return None
        ptr = self.rows["edge_ptr"][self.edge_start[r] : self.edge_start[r + 1] + 1].tolist()
        parts = [slice(*pair) for pair in pairwise(ptr)]
        return [(self.read("edge_index", part).T, self.read("edge_weight", part)) for part in parts]

    def last_token(self, r):
        """Return the last token (L, D), or None if the row has none."""
        k = int(self.rows["last_token_row"][r])
        return None if k < 0 else self.read("last_token", k)

    def has(self, r, bit):
        """Return whether the source of row r had a field, by its bit of `fields`."""
        return bool(self.rows["fields"][r] >> bit & 1)

    def optional(self, name, r):
        """Return the values of a ragged optional field of row r, or None."""
        values = item(self.rows, name, r) if name in self.rows else ()
        return values if len(values) else None

    def number(self, name, r):
        """Return the number of row r in an array, or None if it is absent or unknown, which is -1 or NaN."""
        value = self.rows[name][r].item() if name in self.rows else None
        return None if value is None or value != value or value == -1 else value

    def small(self, r):
        """Return texts, tokens and optional fields of row r."""
        rows = self.rows
        trace = {name: text(rows, name, r) if self.has(r, bit) else None for name, bit in TEXTS.items()}
        answers = [trace[name] for name in list(TEXTS)[1:] if trace[name] is not None]
        trace["answer"] = answers[0] if answers else None
        trace["tokens"] = item(rows, "tokens", r) if self.has(r, 4) else None
        strings = range(*rows["tokens_decoded_ptr"][r : r + 2].tolist())
        trace["tokens_decoded"] = [text(rows, "tokens_decoded", k) for k in strings] if self.has(r, 5) else None
        trace["prompt_length"] = self.number("prompt_length", r)
        extras = item(rows, "extras", r).tobytes()
        trace["extras"] = decode(json.loads(extras)) if extras else {}
        ragged = {name.removesuffix("_offsets") for name in rows if name.endswith("_offsets")} - REQUIRED
        trace |= {name: self.optional(name, r) for name in ragged}
        for name in ("top_ids", "top_logprobs"):
            values = trace.get(name)
            trace[name] = None if values is None else values.reshape(len(trace["tokens"]), -1)
        span = tuple(int(rows[name][r]) for name in ("answer_begin", "answer_end") if name in rows)
        trace["answer_span"] = span if max(span, default=-1) >= 0 else None  # One of them may be unknown.
        spans = trace.get("spans")
        trace["spans"] = None if spans is None else decode(json.loads(spans.tobytes()))
        trace["temperature"], trace["seed"] = self.number("temperature", r), self.number("seed", r)
        return trace


def read_index(path, facts):
    """Return traces, segment names, and paths and provenances of sources, of all index parts with their patches."""
    traces, segments, sources = [], [], []
    for part in facts["index"]:
        group = read_zip(path / part["path"])
        for k in range(part["num_traces"]):
            places = [(int(group[f"{p}_segment"][k]), int(group[f"{p}_row"][k])) for p in ("graph", "sequence")]
            traces.append(
                {
                    "id": text(group, "id", k),
                    "sample": int(group["sample"][k]),
                    "places": places,
                    "source": int(group["source"][k]),
                    "position": int(group["source_position"][k]),
                    "nonfinite": bool(group["nonfinite"][k]),
                }
            )
        for k in range(len(group["patch_trace"])):
            trace = traces[group["patch_trace"][k]]
            trace["places"][group["patch_group"][k]] = int(group["patch_segment"][k]), int(group["patch_row"][k])
            trace["nonfinite"] |= bool(group["patch_nonfinite"][k])
        segments += [text(group, "segment_name", k) for k in range(part["num_segments"])]
        provenances = group["source_provenance"].tolist()
        sources += [(text(group, "source_path", k), provenances[k]) for k in range(part["num_sources"])]
    return traces, segments, sources


def read_columns(path, facts):
    """Return scores by name, label and group of every trace."""
    rows = []
    for part in facts["columns"]:
        group = read_zip(path / part["path"])
        for k in range(part["num_traces"]):
            scores = {name[6:]: float(group[name][k]) for name in group if name.startswith("score_")}
            scores = {name: value for name, value in scores.items() if value == value}
            rows.append((scores, float(group["labels"][k]), text(group, "groups", k)))
    return rows


def read_store(path):
    """Return a dict for each trace, in the order of the store."""
    path, facts = Path(path), manifest(path)
    attributes = facts["attributes"]
    traces, names, sources = read_index(path, facts)
    segments = [Segment(path / "segments" / name, attributes) for name in names]
    result = []
    for trace, (scores, label, group) in zip(traces, read_columns(path, facts), strict=True):
        (g, graph_row), (s, sequence_row) = trace["places"]
        graph, sequence = segments[g] if g >= 0 else None, segments[s] if s >= 0 else None
        source, provenance = sources[trace["source"]]
        values = {
            "question_id": trace["id"],
            "sample": trace["sample"],
            "source": (source, trace["position"]),
            "provenance": attributes["provenance"][provenance] if provenance >= 0 else None,
            "hidden_states": graph and graph.hidden_states(graph_row),
            "attention": graph and graph.attention(graph_row),
            "edges": graph and graph.edges(graph_row),
            "scores": scores,
            "score": scores.get(attributes["default_score"], float("nan")),
            "label": label,
            "group": group,
            "has_nonfinite": trace["nonfinite"],
        }
        values["last_token"] = sequence.last_token(sequence_row) if sequence else values["hidden_states"][:, -1]
        values["edges_reversed"] = bool(graph.rows["edges_reversed"][graph_row]) if values["edges"] else None
        values |= graph.small(graph_row) if graph else sequence.small(sequence_row)
        result.append(values)
    return result


def key_hash(question_id, sample):
    """Return the hash of a key, whose id is bytes."""
    h = 0xCBF29CE484222325
    for byte in question_id + sample.to_bytes(4, "little", signed=True):
        h = (h ^ byte) * 0x100000001B3 % 2**64
    h ^= h >> 32
    return h * 0x9E3779B97F4A7C15 % 2**64 ^ h >> 29


def find(path, question_id, sample):
    """Return the position of a trace by the key tables of the index, -1 if it is absent."""
    key = question_id.encode("utf-8", "surrogatepass")
    h = key_hash(key, sample)
    for part in manifest(path)["index"]:
        with ZipStore(Path(path, part["path"]), mode="r") as file:
            group = zarr.open_group(file, mode="r")
            table, samples = group["key_table"][:], group["sample"]
            slot = h % max(len(table), 1)
            while len(table) and table[slot]:
                k = int(table[slot]) - 1
                if samples[k] == sample and item(group, "id", k).tobytes() == key:
                    return part["first_trace"] + k
                slot = (slot + 1) % len(table)
    return -1


def read_lens(path):
    """Return the arrays of the lens by name, or None for a store without one."""
    path, facts = Path(path), manifest(path)
    lens = facts["attributes"]["lens"]
    if lens is None:
        return None
    folder = path / "segments" / read_index(path, facts)[1][lens["segment"]]
    rows, wanted = read_zip(folder / "rows.zip"), ("final_norm_weight", "final_norm_bias", "unembedding_bias")
    found = {name: rows[name] for name in wanted if name in rows}
    unembedding = zarr.open_array(folder / "unembedding", mode="r")[:]
    return found | {"unembedding": widen(unembedding) if lens["dtype"] == "bfloat16" else unembedding}
