"""Parquet, Arrow, JSON Lines, JSON and CSV."""

import base64
import json

import numpy as np

from tests.ingest.corpus.registry import kind
from tests.ingest.corpus.samples import make_samples, write_json, write_lines, write_table


def write_parquet(path, rows, schema=None):
    """Write a list of dicts as Parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)


def nested_rows(samples):
    """Return dicts with nested lists and text."""
    return [{"question_id": s.question_id, "question": s.question, "hidden_states": s.hidden.tolist()} for s in samples]


@kind("pyarrow")
def parquet_nested_lists(folder):
    """Write hidden_states as a list column of lists of lists."""
    samples = make_samples(3)
    write_parquet(folder / "traces.parquet", nested_rows(samples))
    return [s.expect("id question") for s in samples]


@kind("pyarrow")
def parquet_flat_with_shape(folder):
    """Write hidden_states flattened into a float32 list, its shape in a second column; scores too."""
    import pyarrow as pa

    samples = make_samples(3)
    rows = [
        {
            "id": s.question_id,
            "hidden_states": s.hidden.ravel().tolist(),
            "shape": list(s.hidden.shape),
            "score": s.score,
        }
        for s in samples
    ]
    fields = [("id", pa.string()), ("hidden_states", pa.list_(pa.float32())), ("shape", pa.list_(pa.int64()))]
    write_parquet(folder / "traces.parquet", rows, pa.schema([*fields, ("score", pa.float64())]))
    return [s.expect("id score") for s in samples]


@kind("pyarrow")
def parquet_last_layer_vectors(folder):
    """Write labels and hidden_state: one vector per row (last layer, last token)."""
    import pyarrow as pa

    samples = make_samples(5, layers=1)
    rows = [{"labels": float(s.score < 0.5), "hidden_state": s.hidden[0, -1].tolist()} for s in samples]
    schema = pa.schema([("labels", pa.float32()), ("hidden_state", pa.list_(pa.float32()))])
    write_parquet(folder / "layer_31.parquet", rows, schema)
    return [s.expect_last("label") for s in samples]


@kind("pyarrow")
def parquet_row_per_layer(folder):
    """Write a row per question and layer: question_id, layer, hidden_state (S, D)."""
    samples = make_samples(3)
    rows = [
        {"question_id": s.question_id, "layer": k, "hidden_state": s.hidden[k].tolist()}
        for s in samples
        for k in range(3)
    ]
    write_parquet(folder / "layers.parquet", rows)
    return [s.expect("id") for s in samples]


@kind("pyarrow")
def parquet_row_per_token(folder):
    """Write a row per token: question_id, position, token_id and a list column per layer."""
    samples = make_samples(3)
    rows = [
        {
            "question_id": s.question_id,
            "position": j,
            "token_id": int(s.tokens[j]),
            **{f"layer_{k}": s.hidden[k, j].tolist() for k in range(3)},
        }
        for s in samples
        for j in range(len(s.tokens))
    ]
    write_parquet(folder / "tokens.parquet", rows)
    return [s.expect("id tokens") for s in samples]


@kind("pyarrow")
def parquet_column_per_layer(folder):
    """Write shards with a nested column per layer: hidden_state_0, hidden_state_1, ..."""
    samples = make_samples(4)
    rows = [{"id": s.question_id, **{f"hidden_state_{k}": h.tolist() for k, h in enumerate(s.hidden)}} for s in samples]
    for i in range(2):
        write_parquet(folder / "data" / f"part-{i:05d}.parquet", rows[2 * i : 2 * i + 2])
    return [s.expect("id") for s in samples]


@kind("pyarrow")
def parquet_bytes_with_shape(folder):
    """Write hidden_states as float16 bytes, with dtype and shape columns."""
    samples = make_samples(3)
    rows = [
        {
            "qid": s.question_id,
            "hidden_states": s.hidden.astype("f2").tobytes(),
            "dtype": "float16",
            "shape": list(s.hidden.shape),
        }
        for s in samples
    ]
    write_parquet(folder / "traces.parquet", rows)
    return [s.expect("id") for s in samples]


@kind("pyarrow")
def parquet_heads_and_partitions(folder):
    """Write split=train/ and split=test/ with hidden_states, attentions and tokens."""
    samples = make_samples(3)
    for i, s in enumerate(samples):
        row = nested_rows([s])[0] | {"attentions": s.attention.tolist(), "tokens": s.tokens.tolist()}
        write_parquet(folder / f"split={'train' if i < 2 else 'test'}" / f"{i}.parquet", [row])
    return [s.expect("id question attention tokens") for s in samples]


@kind("pyarrow", "pandas")
def parquet_pandas_vectors_per_layer(folder):
    """Write df.to_parquet of last tokens: a column of vectors per layer and an index of ids."""
    import pandas as pd

    samples = make_samples(4)
    columns = {f"layer_{k}": [s.hidden[k, -1] for s in samples] for k in range(3)}
    frame = pd.DataFrame(columns, index=pd.Index([s.question_id for s in samples], name="question_id"))
    frame.to_parquet(folder / "last_tokens.parquet")
    return [s.expect_last("id") for s in samples]


@kind("datasets")
def datasets_nested_lists(folder):
    """Write datasets.Dataset.save_to_disk with nested lists."""
    from datasets import Dataset

    samples = make_samples(3)
    Dataset.from_list(nested_rows(samples)).save_to_disk(folder / "traces")
    return [s.expect("id question") for s in samples]


@kind("datasets")
def datasets_array_features(folder):
    """Write save_to_disk with Array3D features of equal lengths, several shards."""
    from datasets import Array3D, Dataset, Features, Value

    samples = make_samples(4, lengths=(6,))
    features = Features({"id": Value("string"), "hidden_states": Array3D((3, 6, 12), "float32")})
    rows = {"id": [s.question_id for s in samples], "hidden_states": [s.hidden for s in samples]}
    Dataset.from_dict(rows, features=features).save_to_disk(folder / "ds", num_shards=2)
    return [s.expect("id") for s in samples]


@kind("datasets")
def datasets_dict_of_splits(folder):
    """Write DatasetDict of train and test with a column per layer (Array2D) and an integer label."""
    from datasets import Array2D, Dataset, DatasetDict, Features, Value

    samples = make_samples(4, lengths=(7,))
    layers = {f"hidden_{k}": Array2D((7, 12), "float16") for k in range(3)}
    features = Features({"example_id": Value("string"), "label": Value("int64"), **layers})
    rows = [
        {"example_id": s.question_id, "label": int(s.score < 0.5)}
        | {f"hidden_{k}": h.astype("f2") for k, h in enumerate(s.hidden)}
        for s in samples
    ]
    parts = {"train": rows[:3], "test": rows[3:]}
    DatasetDict({n: Dataset.from_list(p, features=features) for n, p in parts.items()}).save_to_disk(folder / "dd")
    return [s.expect("id label") for s in samples]


@kind("datasets", "sae_lens", "transformer_lens", "tensordict")
def saelens_cached_activations(folder):
    """Write a data set of SAELens' CacheActivationsRunner: a hook's activations (context, D) and token_ids."""
    from types import SimpleNamespace

    import torch
    from datasets import Array2D, Features, Sequence, Value
    from sae_lens.cache_activations_runner import CacheActivationsRunner

    samples = make_samples(4, layers=1, lengths=(8,))
    hook = "blocks.1.hook_resid_post"
    columns = {hook: Array2D((8, 12), "float32"), "token_ids": Sequence(Value("int32"), length=8)}
    runner = SimpleNamespace(
        cfg=SimpleNamespace(hook_name=hook, n_seq_in_buffer=4, d_in=12), context_size=8, features=Features(columns)
    )
    acts = torch.from_numpy(np.concatenate([s.hidden[0] for s in samples]))
    tokens = torch.from_numpy(np.concatenate([s.tokens for s in samples]))
    CacheActivationsRunner._create_shard(runner, (acts, tokens)).save_to_disk(folder / "activations")
    return [s.expect("tokens") for s in samples]


@kind("pyarrow")
def arrow_ipc_file(folder):
    """Write an Arrow IPC file (Feather) with nested lists of half floats."""
    import pyarrow as pa
    import pyarrow.feather as feather

    samples = make_samples(3)
    feather.write_feather(pa.Table.from_pylist(nested_rows(samples)), folder / "traces.feather")
    return [s.expect("id question") for s in samples]


@kind("pyarrow")
def arrow_ipc_stream(folder):
    """Write an Arrow IPC stream with flat lists, lengths and the number of layers in the schema's metadata."""
    import pyarrow as pa

    samples = make_samples(3)
    columns = {
        "id": [s.question_id for s in samples],
        "tokens": [s.tokens.tolist() for s in samples],
        "hidden_states": [s.hidden.ravel().tolist() for s in samples],
        "shape": [list(s.hidden.shape) for s in samples],
    }
    table = pa.table(columns).replace_schema_metadata({"num_layers": "3"})
    with pa.OSFile(str(folder / "traces.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return [s.expect("id tokens") for s in samples]


@kind()
def jsonl_arrays(folder):
    """Write a JSON object per line with nested lists, tokens and text."""
    samples = make_samples(3)
    rows = [
        r | {"tokens": s.tokens.tolist(), "answer": s.answer}
        for r, s in zip(nested_rows(samples), samples, strict=True)
    ]
    write_lines(folder / "traces.jsonl", rows)
    return [s.expect("id question answer tokens") for s in samples]


@kind()
def jsonl_gz_layers_by_name(folder):
    """Write .jsonl.gz with {"layers": {"0": [...], "1": [...]}} and attention averaged over heads."""
    samples = make_samples(2)
    rows = [
        {
            "id": s.question_id,
            "layers": {str(k): h.tolist() for k, h in enumerate(s.hidden)},
            "attention": s.attention.mean(1).tolist(),
        }
        for s in samples
    ]
    write_lines(folder / "traces.jsonl.gz", rows)
    return [s.expect("id mean") for s in samples]


@kind()
def jsonl_last_token_vectors(folder):
    """Write ndjson with the last token of each layer."""
    samples = make_samples(4)
    rows = [{"uid": s.question_id, "last_token_hidden_states": s.hidden[:, -1].tolist()} for s in samples]
    write_lines(folder / "vectors.ndjson", rows)
    return [s.expect_last("id") for s in samples]


@kind()
def jsonl_base64(folder):
    """Write arrays as base64 of float32 bytes with dtype and shape."""
    samples = make_samples(2)
    rows = []
    for s in samples:
        data = base64.b64encode(s.hidden.tobytes()).decode()
        rows.append({"id": s.question_id, "hidden_states": {"dtype": "float32", "shape": s.hidden.shape, "data": data}})
    write_lines(folder / "traces.jsonl", rows)
    return [s.expect("id") for s in samples]


@kind()
def json_list(folder):
    """Write one JSON file with a list of objects."""
    samples = make_samples(2)
    (folder / "traces.json").write_text(json.dumps(nested_rows(samples), indent=1))
    return [s.expect("id question") for s in samples]


@kind()
def json_by_id(folder):
    """Write one JSON object by question id below "results"."""
    samples = make_samples(2)
    rows = {s.question_id: {"hidden_states": s.hidden[:, None].tolist(), "answer": s.answer} for s in samples}
    write_json(folder / "results.json", {"model": "gpt2", "results": rows})
    return [s.expect("id answer") for s in samples]


@kind()
def json_file_per_sample(folder):
    """Write a JSON file per sample in sub-folders."""
    samples = make_samples(3)
    for i, (row, s) in enumerate(zip(nested_rows(samples), samples, strict=True)):
        write_json(folder / f"batch{i // 2}" / f"{i}.json", row | {"response": s.answer})
    return [s.expect("id question answer") for s in samples]


@kind()
def saplma_csv(folder):
    """Write embeddings of SAPLMA: statement, label (1 for true) and the vector of one layer as text in a CSV cell."""
    samples = make_samples(5, layers=1)
    rows = [
        {"statement": s.question, "correct": int(s.score > 0.5), "embeddings": str(s.hidden[0, -1].tolist())}
        for s in samples
    ]
    write_table(folder / "embeddings_with_labels_cities_OPT_-1.csv", rows)
    return [s.expect_last(score=float(s.score > 0.5)) for s in samples]


@kind()
def csv_dimension_columns(folder):
    """Write a CSV per layer with dim_1 ... dim_N and an id: last tokens."""
    samples = make_samples(4)
    for k in range(3):
        rows = [
            {"id": s.question_id, **{f"dim_{d + 1}": float(v) for d, v in enumerate(s.hidden[k, -1])}} for s in samples
        ]
        write_table(folder / f"layer_{k}.csv", rows)
    return [s.expect_last("id") for s in samples]
