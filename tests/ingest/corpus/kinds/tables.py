"""Parquet, Arrow, JSON Lines, JSON and CSV."""

import base64
import json

import numpy as np

from tests.ingest.corpus.registry import kind
from tests.ingest.corpus.samples import write_json, write_lines, write_parquet, write_table


def nested_rows(samples):
    """Return dicts with nested lists and text."""
    return [{"question_id": s.question_id, "question": s.question, "hidden_states": s.hidden.tolist()} for s in samples]


@kind("pyarrow", expect="id question")
def parquet_nested_lists(folder, samples):
    """Write hidden_states as a list column of lists of lists."""
    write_parquet(folder / "traces.parquet", nested_rows(samples))


@kind("pyarrow", expect="id score")
def parquet_flat_with_shape(folder, samples):
    """Write hidden_states flattened into a float32 list, its shape in a second column; scores too."""
    import pyarrow as pa

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


@kind("pyarrow", count=5, layers=1, expect_last="label")
def parquet_last_layer_vectors(folder, samples):
    """Write labels and hidden_state: one vector per row (last layer, last token)."""
    import pyarrow as pa

    rows = [{"labels": float(s.score < 0.5), "hidden_state": s.hidden[0, -1].tolist()} for s in samples]
    schema = pa.schema([("labels", pa.float32()), ("hidden_state", pa.list_(pa.float32()))])
    write_parquet(folder / "layer_31.parquet", rows, schema)


@kind("pyarrow", expect="id")
def parquet_row_per_layer(folder, samples):
    """Write a row per question and layer: question_id, layer, hidden_state (S, D)."""
    rows = [
        {"question_id": s.question_id, "layer": k, "hidden_state": s.hidden[k].tolist()}
        for s in samples
        for k in range(3)
    ]
    write_parquet(folder / "layers.parquet", rows)


@kind("pyarrow", expect="id tokens")
def parquet_row_per_token(folder, samples):
    """Write a row per token: question_id, position, token_id and a list column per layer."""
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


@kind("pyarrow", count=4, expect="id")
def parquet_column_per_layer(folder, samples):
    """Write shards with a nested column per layer: hidden_state_0, hidden_state_1, ..."""
    rows = [{"id": s.question_id, **{f"hidden_state_{k}": h.tolist() for k, h in enumerate(s.hidden)}} for s in samples]
    for i in range(2):
        write_parquet(folder / "data" / f"part-{i:05d}.parquet", rows[2 * i : 2 * i + 2])


@kind("pyarrow", expect="id", rows="traces.parquet")
def parquet_bytes_with_shape(s):
    """Write hidden_states as float16 bytes, with dtype and shape columns."""
    return {
        "qid": s.question_id,
        "hidden_states": s.hidden.astype("f2").tobytes(),
        "dtype": "float16",
        "shape": list(s.hidden.shape),
    }


@kind("pyarrow", expect="id question attention tokens")
def parquet_heads_and_partitions(folder, samples):
    """Write split=train/ and split=test/ with hidden_states, attentions and tokens."""
    for i, s in enumerate(samples):
        row = nested_rows([s])[0] | {"attentions": s.attention.tolist(), "tokens": s.tokens.tolist()}
        write_parquet(folder / f"split={'train' if i < 2 else 'test'}" / f"{i}.parquet", [row])


@kind("pyarrow", "pandas", count=4, expect_last="id")
def parquet_pandas_vectors_per_layer(folder, samples):
    """Write df.to_parquet of last tokens: a column of vectors per layer and an index of ids."""
    import pandas as pd

    columns = {f"layer_{k}": [s.hidden[k, -1] for s in samples] for k in range(3)}
    frame = pd.DataFrame(columns, index=pd.Index([s.question_id for s in samples], name="question_id"))
    frame.to_parquet(folder / "last_tokens.parquet")


@kind("datasets", expect="id question")
def datasets_nested_lists(folder, samples):
    """Write datasets.Dataset.save_to_disk with nested lists."""
    from datasets import Dataset

    Dataset.from_list(nested_rows(samples)).save_to_disk(folder / "traces")


@kind("datasets", count=4, lengths=(6,), expect="id")
def datasets_array_features(folder, samples):
    """Write save_to_disk with Array3D features of equal lengths, several shards."""
    from datasets import Array3D, Dataset, Features, Value

    features = Features({"id": Value("string"), "hidden_states": Array3D((3, 6, 12), "float32")})
    rows = {"id": [s.question_id for s in samples], "hidden_states": [s.hidden for s in samples]}
    Dataset.from_dict(rows, features=features).save_to_disk(folder / "ds", num_shards=2)


@kind("datasets", count=4, lengths=(7,), expect="id label")
def datasets_dict_of_splits(folder, samples):
    """Write DatasetDict of train and test with a column per layer (Array2D) and an integer label."""
    from datasets import Array2D, Dataset, DatasetDict, Features, Value

    layers = {f"hidden_{k}": Array2D((7, 12), "float16") for k in range(3)}
    features = Features({"example_id": Value("string"), "label": Value("int64"), **layers})
    rows = [
        {"example_id": s.question_id, "label": int(s.score < 0.5)}
        | {f"hidden_{k}": h.astype("f2") for k, h in enumerate(s.hidden)}
        for s in samples
    ]
    parts = {"train": rows[:3], "test": rows[3:]}
    DatasetDict({n: Dataset.from_list(p, features=features) for n, p in parts.items()}).save_to_disk(folder / "dd")


@kind("datasets", "sae_lens", "transformer_lens", "tensordict", count=4, layers=1, lengths=(8,), expect="tokens")
def saelens_cached_activations(folder, samples):
    """Write a data set of SAELens' CacheActivationsRunner: a hook's activations (context, D) and token_ids."""
    from types import SimpleNamespace

    import torch
    from datasets import Array2D, Features, Sequence, Value
    from sae_lens.cache_activations_runner import CacheActivationsRunner

    hook = "blocks.1.hook_resid_post"
    columns = {hook: Array2D((8, 12), "float32"), "token_ids": Sequence(Value("int32"), length=8)}
    runner = SimpleNamespace(
        cfg=SimpleNamespace(hook_name=hook, n_seq_in_buffer=4, d_in=12), context_size=8, features=Features(columns)
    )
    acts = torch.from_numpy(np.concatenate([s.hidden[0] for s in samples]))
    tokens = torch.from_numpy(np.concatenate([s.tokens for s in samples]))
    CacheActivationsRunner._create_shard(runner, (acts, tokens)).save_to_disk(folder / "activations")


@kind("pyarrow", expect="id question")
def arrow_ipc_file(folder, samples):
    """Write an Arrow IPC file (Feather) with nested lists of half floats."""
    import pyarrow as pa
    import pyarrow.feather as feather

    feather.write_feather(pa.Table.from_pylist(nested_rows(samples)), folder / "traces.feather")


@kind("pyarrow", expect="id tokens")
def arrow_ipc_stream(folder, samples):
    """Write an Arrow IPC stream with flat lists, lengths and the number of layers in the schema's metadata."""
    import pyarrow as pa

    columns = {
        "id": [s.question_id for s in samples],
        "tokens": [s.tokens.tolist() for s in samples],
        "hidden_states": [s.hidden.ravel().tolist() for s in samples],
        "shape": [list(s.hidden.shape) for s in samples],
    }
    table = pa.table(columns).replace_schema_metadata({"num_layers": "3"})
    with pa.OSFile(str(folder / "traces.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


@kind(expect="id question answer tokens")
def jsonl_arrays(folder, samples):
    """Write a JSON object per line with nested lists, tokens and text."""
    rows = [
        r | {"tokens": s.tokens.tolist(), "answer": s.answer}
        for r, s in zip(nested_rows(samples), samples, strict=True)
    ]
    write_lines(folder / "traces.jsonl", rows)


@kind(count=2, expect="id mean", rows="traces.jsonl.gz")
def jsonl_gz_layers_by_name(s):
    """Write .jsonl.gz with {"layers": {"0": [...], "1": [...]}} and attention averaged over heads."""
    return {
        "id": s.question_id,
        "layers": {str(k): h.tolist() for k, h in enumerate(s.hidden)},
        "attention": s.attention.mean(1).tolist(),
    }


@kind(count=4, expect_last="id")
def jsonl_last_token_vectors(folder, samples):
    """Write ndjson with the last token of each layer."""
    rows = [{"uid": s.question_id, "last_token_hidden_states": s.hidden[:, -1].tolist()} for s in samples]
    write_lines(folder / "vectors.ndjson", rows)


@kind(count=2, expect="id")
def jsonl_base64(folder, samples):
    """Write arrays as base64 of float32 bytes with dtype and shape."""
    rows = []
    for s in samples:
        data = base64.b64encode(s.hidden.tobytes()).decode()
        rows.append({"id": s.question_id, "hidden_states": {"dtype": "float32", "shape": s.hidden.shape, "data": data}})
    write_lines(folder / "traces.jsonl", rows)


@kind(count=2, expect="id question")
def json_list(folder, samples):
    """Write one JSON file with a list of objects."""
    (folder / "traces.json").write_text(json.dumps(nested_rows(samples), indent=1))


@kind(count=2, expect="id answer")
def json_by_id(folder, samples):
    """Write one JSON object by question id below "results"."""
    rows = {s.question_id: {"hidden_states": s.hidden[:, None].tolist(), "answer": s.answer} for s in samples}
    write_json(folder / "results.json", {"model": "gpt2", "results": rows})


@kind(expect="id question answer")
def json_file_per_sample(folder, samples):
    """Write a JSON file per sample in sub-folders."""
    for i, (row, s) in enumerate(zip(nested_rows(samples), samples, strict=True)):
        write_json(folder / f"batch{i // 2}" / f"{i}.json", row | {"response": s.answer})


@kind(count=5, layers=1)
def saplma_csv(folder, samples):
    """Write embeddings of SAPLMA: statement, label (1 for true) and the vector of one layer as text in a CSV cell."""
    rows = [
        {"statement": s.question, "correct": int(s.score > 0.5), "embeddings": str(s.hidden[0, -1].tolist())}
        for s in samples
    ]
    write_table(folder / "embeddings_with_labels_cities_OPT_-1.csv", rows)
    return [s.expect_last(score=float(s.score > 0.5)) for s in samples]


@kind(count=4, expect_last="id")
def csv_dimension_columns(folder, samples):
    """Write a CSV per layer with dim_1 ... dim_N and an id: last tokens."""
    for k in range(3):
        rows = [
            {"id": s.question_id, **{f"dim_{d + 1}": float(v) for d, v in enumerate(s.hidden[k, -1])}} for s in samples
        ]
        write_table(folder / f"layer_{k}.csv", rows)
