"""Tables with several rows per trace, arrays in pieces of rows, and traces in several tables."""

import numpy as np

from tests.ingest.corpus.kinds.tables import write_parquet
from tests.ingest.corpus.registry import kind
from tests.ingest.corpus.samples import write_lines, write_table


def cells(samples):
    """Return (sample, layer, token, vector) of all states, by sample."""
    return [
        (s, k, j, s.hidden[k, j].tolist()) for s in samples for k in range(len(s.hidden)) for j in range(len(s.tokens))
    ]


@kind("pyarrow", ids="{}", expect="id")
def parquet_row_per_cell(folder, samples):
    """Write a row per sample_idx, layer_idx and token_idx with a vector called activation; rows are shuffled."""
    rows = [
        {"sample_idx": int(s.question_id), "layer_idx": k, "token_idx": j, "activation": v}
        for s, k, j, v in cells(samples)
    ]
    np.random.default_rng(0).shuffle(rows)
    write_parquet(folder / "activations.parquet", rows)


@kind("pyarrow", expect="id")
def parquet_sorted_by_layer(folder, samples):
    """Write all questions of layer 0, then of layer 1: prompt_id, layer_number, seq_len, states (S, D)."""
    rows = [
        {"prompt_id": s.question_id, "layer_number": k, "seq_len": len(s.tokens), "states": s.hidden[k].tolist()}
        for k in range(3)
        for s in samples
    ]
    write_parquet(folder / "states.parquet", rows)


@kind("pyarrow", ids="{}", expect="id tokens words")
def parquet_tokens_with_fixed_lists(folder, samples):
    """Write a row per token: example, tok_idx, tok (text), tok_id and l0 ... l2 as lists of fixed size."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [(s, j) for s in samples for j in range(len(s.tokens))]
    columns = {
        "example": pa.array([int(s.question_id) for s, _ in rows]),
        "tok_idx": pa.array([j for _, j in rows], pa.int32()),
        "tok": pa.array([s.words[j] for s, j in rows]),
        "tok_id": pa.array([int(s.tokens[j]) for s, j in rows]),
    }
    for k in range(3):
        values = pa.array(np.concatenate([s.hidden[k, j] for s, j in rows]).astype("f2"))
        columns[f"l{k}"] = pa.FixedSizeListArray.from_arrays(values, 12)
    pq.write_table(pa.table(columns), folder / "tokens.parquet", compression="zstd")


@kind("pyarrow", count=4, expect="id question answer label")
def parquet_states_and_labels_by_id(folder, samples):
    """Write states.parquet and labels.parquet (question, answer, is_hallucination) in another order, by question_id."""
    write_parquet(
        folder / "states.parquet", [{"question_id": s.question_id, "hidden_states": s.hidden.tolist()} for s in samples]
    )
    rows = [
        {"question_id": s.question_id, "question": s.question, "answer": s.answer, "label": int(s.score < 0.5)}
        for s in reversed(samples)
    ]
    write_parquet(folder / "labels.parquet", rows)


@kind("pyarrow")
def parquet_and_answers_in_jsonl(folder, samples):
    """Write acts.parquet (uid, hidden_states) and answers.jsonl (uid, prompt, completion, correct) in another order."""
    write_parquet(
        folder / "acts.parquet", [{"uid": s.question_id, "hidden_states": s.hidden.tolist()} for s in samples]
    )
    rows = [
        {"uid": s.question_id, "prompt": s.question, "completion": s.answer, "correct": bool(s.score > 0.5)}
        for s in samples[::-1]
    ]
    write_lines(folder / "answers.jsonl", rows)
    return [s.expect("id question answer", score=float(s.score > 0.5)) for s in samples]


@kind("pyarrow", expect="id")
def parquet_bytes_per_layer(folder, samples):
    """Write float32 bytes per layer: hidden_bytes, n_tokens, hidden_dim, dtype, layer."""
    rows = [
        {
            "id": s.question_id,
            "layer": k,
            "n_tokens": h.shape[0],
            "hidden_dim": h.shape[1],
            "dtype": "float32",
            "hidden_bytes": h.tobytes(),
        }
        for s in samples
        for k, h in enumerate(s.hidden)
    ]
    write_parquet(folder / "layers.parquet", rows)


@kind("pyarrow", expect="id tokens", rows="part-0.parquet")
def parquet_flat_with_sizes(s):
    """Write hidden_states flat with num_layers, num_tokens and hidden_size, and token_ids."""
    return {
        "id": s.question_id,
        "num_layers": 3,
        "num_tokens": len(s.tokens),
        "hidden_size": 12,
        "hidden_states": s.hidden.ravel().tolist(),
        "token_ids": s.tokens.tolist(),
    }


@kind("pyarrow", count=4)
def parquet_list_of_structs(folder, samples):
    """Write layers as a list of structs {layer, vector} of the last token."""
    rows = [
        {
            "qid": s.question_id,
            "layers": [{"layer": 8 * k, "vector": h[-1].tolist()} for k, h in enumerate(s.hidden)],
            "label": int(s.score < 0.5),
        }
        for s in samples
    ]
    write_parquet(folder / "last.parquet", rows)
    return [s.expect_last("id label", layers=[0, 8, 16]) for s in samples]


@kind("pyarrow", expect="id")
def parquet_hive_by_layer(folder, samples):
    """Write layer=0/part-0.parquet ... with id and hidden_states (S, D)."""
    for k in range(3):
        rows = [{"id": s.question_id, "hidden_states": s.hidden[k].tolist()} for s in samples]
        write_parquet(folder / f"layer={k}" / "part-0.parquet", rows)


@kind("pyarrow", expect="id answer")
def arrow_rows_per_layer_with_map(folder, samples):
    """Write an Arrow file: a row per id with a map from the name of a layer to its states, flat, and n_tokens."""
    import pyarrow as pa

    kind_of_map = pa.map_(pa.string(), pa.list_(pa.list_(pa.float32())))
    table = pa.table(
        {
            "id": [s.question_id for s in samples],
            "hidden_states": pa.array(
                [[(f"layer_{k}", h.tolist()) for k, h in enumerate(s.hidden)] for s in samples], kind_of_map
            ),
            "answer": [s.answer for s in samples],
        }
    )
    with pa.OSFile(str(folder / "states.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


@kind(expect="id")
def csv_row_per_token_and_layer(folder, samples):
    """Write a CSV with question_id, layer, token_pos and h0 ... h11, sorted by layer first."""
    rows = [
        {"question_id": s.question_id, "layer": k, "token_pos": j, **{f"h{d}": x for d, x in enumerate(v)}}
        for s, k, j, v in cells(samples)
    ]
    rows.sort(key=lambda row: row["layer"])
    write_table(folder / "states.csv", rows)


@kind(count=2, dim=8, expect="id")
def csv_row_per_number(folder, samples):
    """Write a CSV with a row per number: id, layer, token, dim, value."""
    rows = [
        {"id": s.question_id, "layer": k, "token": j, "dim": d, "value": x}
        for s, k, j, v in cells(samples)
        for d, x in enumerate(v)
    ]
    write_table(folder / "activations.csv", rows)


@kind(count=4, expect_last="id label", rows="features.csv")
def csv_columns_by_layer_and_dimension(s):
    """Write last tokens as columns layer0_dim0 ... layer2_dim11."""
    return (
        {"id": s.question_id}
        | {f"layer{k}_dim{d}": float(x) for k in range(3) for d, x in enumerate(s.hidden[k, -1])}
        | {"label": int(s.score < 0.5)}
    )


@kind("zstandard", expect="id tokens")
def jsonl_zst_row_per_step(folder, samples):
    """Write .jsonl.zst with a line per generated token: request_id, step, token_id, logprob, hidden_states (L, D)."""
    rows = [
        {"request_id": s.question_id, "step": j, "token_id": int(s.tokens[j]), "hidden_states": s.hidden[:, j].tolist()}
        for s in samples
        for j in range(len(s.tokens))
    ]
    write_lines(folder / "steps.jsonl.zst", rows)


@kind(expect="id")
def jsonl_layers_of_all_ids(folder, samples):
    """Write a line per layer with the states of all questions by id."""
    rows = [{"layer": k, "hidden_states": {s.question_id: s.hidden[k].tolist() for s in samples}} for k in range(3)]
    write_lines(folder / "layers.jsonl", rows)
