"""Containers whose names, rows and groups are written in many ways."""

import csv
import gzip
import json

import numpy as np

from tests.ingest.corpus.kinds.containers.hierarchies import save_safetensors
from tests.ingest.corpus.kinds.hdf5 import create
from tests.ingest.corpus.kinds.tables import write_parquet
from tests.ingest.corpus.registry import kind
from tests.ingest.corpus.samples import make_samples, pad, write_json, write_lines, write_table


@kind("pyarrow", "safetensors")
def parquet_three_tables(folder):
    """Write states, answers jsonl, labels csv."""
    s = make_samples(4)
    write_parquet(
        folder / "hidden.parquet", [{"example_id": x.question_id, "hidden_states": x.hidden.tolist()} for x in s]
    )
    write_lines(folder / "answers.jsonl", [{"example_id": x.question_id, "answer": x.answer} for x in s[::-1]])
    write_table(folder / "labels.csv", [{"example_id": x.question_id, "label": int(x.score < 0.5)} for x in s])
    return [x.expect("id answer label") for x in s]


@kind("pyarrow", "safetensors")
def parquet_layer_names(folder):
    """Write row per (id, layer name) with text layer names."""
    s = make_samples(3)
    write_parquet(
        folder / "a.parquet",
        [
            {"id": x.question_id, "layer": f"model.layers.{k}", "activations": x.hidden[k].tolist()}
            for x in s
            for k in range(3)
        ],
    )
    return [x.expect("id") for x in s]


@kind("safetensors")
def csv_long_values(folder):
    """Write row per id,layer last token with vector as JSON text."""
    s = make_samples(4)
    write_table(
        folder / "last.csv",
        [
            {
                "qid": x.question_id,
                "layer": k,
                "vector": json.dumps(x.hidden[k, -1].tolist()),
                "label": int(x.score < 0.5),
            }
            for x in s
            for k in range(3)
        ],
    )
    return [x.expect_last("id label") for x in s]


@kind("safetensors")
def csv_gz_space_vectors(folder):
    """Write gz csv numpy str vector."""
    s = make_samples(4, layers=1)
    with gzip.open(folder / "emb.csv.gz", "wt", newline="") as f:
        w = csv.writer(f)
        w.writerow(["question_id", "embedding"])
        for x in s:
            w.writerow([x.question_id, " ".join(map(str, x.hidden[0, -1].tolist()))])
    return [x.expect_last("id") for x in s]


@kind("h5py")
def h5_splits_of_groups(folder):
    """Write train/test groups per sample with attrs."""
    s = make_samples(4)
    with create(folder / "d.h5") as f:
        for i, x in enumerate(s):
            g = f.create_group(f"{'train' if i < 2 else 'test'}/sample_{i:04d}")
            g["hidden"] = x.hidden
            g["input_ids"] = x.tokens
            g.attrs["question"] = x.question
            g.attrs["response"] = x.answer
            g.attrs["label"] = int(x.score < 0.5)
    return [x.expect("tokens question answer label", question_id=None) for x in s]


@kind("h5py")
def h5_table_plus_arrays(folder):
    """Write compound table index with offset,length & one flat array."""
    s = make_samples(3)
    lens = [len(x.tokens) for x in s]
    off = np.cumsum([0, *lens[:-1]])
    with create(folder / "d.h5") as f:
        f["activations"] = np.concatenate([x.hidden.transpose(1, 0, 2) for x in s])
        f["index"] = np.array(
            [(x.question_id, o, n) for x, o, n in zip(s, off, lens, strict=True)],
            dtype=[("id", "S10"), ("offset", "i8"), ("length", "i8")],
        )
    return [x.expect("id") for x in s]


@kind("h5py")
def h5_layer_groups_ids(folder):
    """Write layer_0/hidden (N,S,D) lengths."""
    s = make_samples(3)
    with create(folder / "d.h5") as f:
        for k in range(3):
            f[f"layers/{k}/hidden_states"] = pad([x.hidden[k] for x in s])[0]
        f["lengths"] = np.array([len(x.tokens) for x in s])
        f["question_ids"] = np.array([x.question_id.encode() for x in s])
    return [x.expect("id") for x in s]


@kind()
def npz_per_question_gen(folder):
    """Write q/prompt/layer, q/gen_0/layer."""
    s = make_samples(3)
    a = {}
    for x in s:
        p = x.prompt_length
        for k in range(3):
            a[f"{x.question_id}/prompt/layer_{k}"] = x.hidden[k, :p]
            for n in range(len(x.tokens) - p):
                a[f"{x.question_id}/gen_{n}/layer_{k}"] = x.hidden[k, p + n : p + n + 1]
    np.savez(folder / "a.npz", **a)
    return [x.expect("id") for x in s]


@kind("safetensors")
def st_bf16_stacked(folder):
    """Write safetensors batch: hidden_states.layer_k (B,S,D), attention_mask, ids in metadata."""
    s = make_samples(3)
    a = {f"hidden_states.layer_{k}": pad([x.hidden[k] for x in s])[0] for k in range(3)}
    a["attention_mask"] = pad([x.hidden[0] for x in s])[1]
    save_safetensors(folder / "b.safetensors", a, {"question_ids": json.dumps([x.question_id for x in s])})
    return [x.expect("id") for x in s]


@kind("safetensors")
def st_names_double_underscore(folder):
    """Write q0__hidden_states__3."""
    s = make_samples(3)
    a = {}
    for x in s:
        for k in range(3):
            a[f"{x.question_id}__hidden_states__{k}"] = x.hidden[k]
    save_safetensors(folder / "b.safetensors", a)
    return [x.expect("id") for x in s]


@kind("safetensors")
def st_colon(folder):
    """Write q0:layer:3."""
    s = make_samples(3)
    save_safetensors(folder / "b.safetensors", {f"{x.question_id}:layer:{k}": x.hidden[k] for x in s for k in range(3)})
    return [x.expect("id") for x in s]


@kind()
def npz_keys_hidden_layer(folder):
    """Write hidden_layer_0 , attn_layer_0."""
    s = make_samples(3)
    for x in s:
        np.savez(
            folder / f"{x.question_id}.npz",
            **{f"hidden_layer_{k}": x.hidden[k] for k in range(3)},
            **{f"attn_layer_{k}": x.attention[k] for k in range(3)},
            token_ids=x.tokens,
        )
    return [x.expect("tokens attention") for x in s]


@kind()
def npz_transformer_h(folder):
    """Write transformer.h.0 keys with resid."""
    s = make_samples(3)
    for x in s:
        np.savez(folder / f"{x.question_id}.npz", **{f"transformer.h.{k}": x.hidden[k][None] for k in range(3)})
    return [x.expect("") for x in s]


@kind("safetensors")
def npz_pooled_layers_dict(folder):
    """Write all_layers (N,L,D) float16, labels, question ids; names emb."""
    s = make_samples(5)
    np.savez_compressed(
        folder / "emb_train.npz",
        emb=np.stack([x.hidden[:, -1] for x in s]),
        labels=np.array([int(x.score < 0.5) for x in s]),
        qids=np.array([x.question_id for x in s]),
    )
    return [x.expect_last("id label") for x in s]


@kind("safetensors")
def jsonl_dict_by_layer_token(folder):
    """Write {"id","layers":{"0":[[...]]},"tokens":[str]}."""
    s = make_samples(3)
    write_lines(
        folder / "a.jsonl",
        [
            {
                "id": x.question_id,
                "layers": {f"layer_{k}": x.hidden[k].tolist() for k in range(3)},
                "tokens": x.words,
                "token_ids": x.tokens.tolist(),
            }
            for x in s
        ],
    )
    return [x.expect("id words") for x in s]


@kind("safetensors")
def jsonl_activations_list(folder):
    """Write activations: list of {layer, position, values} flat per sample."""
    s = make_samples(3)
    write_lines(
        folder / "a.jsonl",
        [
            {
                "id": x.question_id,
                "activations": [
                    {"layer": k, "position": j, "values": x.hidden[k, j].tolist()}
                    for k in range(3)
                    for j in range(len(x.tokens))
                ],
            }
            for x in s
        ],
    )
    return [x.expect("id") for x in s]


@kind("safetensors")
def jsonl_openai_embeddings_batch(folder):
    """Write batch output: custom_id, response.body.data[0].embedding."""
    s = make_samples(4, layers=1)
    write_lines(
        folder / "batch_output.jsonl",
        [
            {
                "id": f"b{i}",
                "custom_id": x.question_id,
                "response": {
                    "status_code": 200,
                    "body": {
                        "object": "list",
                        "data": [{"object": "embedding", "index": 0, "embedding": x.hidden[0, -1].tolist()}],
                        "model": "m",
                    },
                },
                "error": None,
            }
            for i, x in enumerate(s)
        ],
    )
    return [x.expect_last("") | {"question_id": None} for x in s]


@kind("safetensors")
def jsonl_tgi_details(folder):
    """Write generated_text, details.tokens with id text logprob + hidden."""
    s = make_samples(3)
    write_lines(
        folder / "a.jsonl",
        [
            {
                "id": x.question_id,
                "inputs": x.question,
                "generated_text": x.answer,
                "details": {
                    "finish_reason": "length",
                    "tokens": [
                        {
                            "id": int(t),
                            "text": w,
                            "logprob": -0.5,
                            "special": False,
                            "hidden_states": x.hidden[:, j].tolist(),
                        }
                        for j, (t, w) in enumerate(zip(x.tokens, x.words, strict=True))
                    ],
                },
            }
            for x in s
        ],
    )
    return [x.expect("id answer tokens words") for x in s]


@kind("safetensors")
def json_samples_multi_outputs(folder):
    """Write question with outputs each with hidden states."""
    s = make_samples(2)
    write_json(
        folder / "a.json",
        {
            "results": [
                {
                    "question_id": "qq",
                    "question": "Why?",
                    "outputs": [{"text": x.answer, "hidden_states": x.hidden.tolist()} for x in s],
                }
            ]
        },
    )
    return [x.expect("answer", question_id="qq", sample=i, question="Why?") for i, x in enumerate(s)]


@kind("pyarrow", "safetensors")
def feather_columns(folder):
    """Write feather with hidden_0.. fixed size lists of last token."""
    import pyarrow as pa
    import pyarrow.feather as fe

    s = make_samples(4)
    cols = {"id": [x.question_id for x in s], "label": [int(x.score < 0.5) for x in s]}
    for k in range(3):
        cols[f"hidden_{k}"] = pa.FixedSizeListArray.from_arrays(
            pa.array(np.concatenate([x.hidden[k, -1] for x in s])), 12
        )
    fe.write_feather(pa.table(cols), folder / "x.feather")
    return [x.expect_last("id label") for x in s]


@kind("pyarrow", "safetensors")
def arrow_dictionary_ids(folder):
    """Write dictionary-encoded ids, long rows per layer."""
    import pyarrow as pa

    s = make_samples(3)
    rows = [(x.question_id, k, x.hidden[k].tolist()) for x in s for k in range(3)]
    t = pa.table(
        {
            "prompt": pa.array([r[0] for r in rows]).dictionary_encode(),
            "layer": pa.array([r[1] for r in rows], pa.int8()),
            "resid": pa.array([r[2] for r in rows], pa.list_(pa.list_(pa.float32(), 12))),
        }
    )
    with pa.OSFile(str(folder / "x.arrow"), "wb") as o, pa.ipc.new_stream(o, t.schema) as w:
        w.write_table(t, max_chunksize=2)
    return [x.expect("") | {"question_id": None} for x in s]


@kind("pyarrow", "safetensors")
def npy_and_parquet_meta(folder):
    """Write hidden.npy (N,L,D) and meta.parquet by row."""
    s = make_samples(5)
    np.save(folder / "hidden_states.npy", np.stack([x.hidden[:, -1] for x in s]))
    write_parquet(
        folder / "meta.parquet",
        [{"question_id": x.question_id, "question": x.question, "label": int(x.score < 0.5)} for x in s],
    )
    return [x.expect_last("id question label") for x in s]


@kind("pyarrow")
def npy_files_named_in_parquet(folder):
    """Write arrays/0001.npy + index.parquet path."""
    s = make_samples(3)
    (folder / "arrays").mkdir()
    for i, x in enumerate(s):
        np.save(folder / "arrays" / f"{i:05d}.npy", x.hidden)
    write_parquet(
        folder / "index.parquet",
        [{"path": f"arrays/{i:05d}.npy", "question_id": x.question_id, "answer": x.answer} for i, x in enumerate(s)],
    )
    return [x.expect("id answer") for x in s]


@kind("h5py")
def h5_vlen_tokens(folder):
    """Write N groups 'hidden_states' dataset (N,) vlen & tokens vlen."""
    import h5py

    s = make_samples(3)
    with create(folder / "v.h5") as f:
        for k in range(3):
            d = f.create_dataset(f"layer_{k}", (3,), dtype=h5py.vlen_dtype(np.float32))
            for i, x in enumerate(s):
                d[i] = x.hidden[k].ravel()
        t = f.create_dataset("tokens", (3,), dtype=h5py.vlen_dtype(np.int32))
        for i, x in enumerate(s):
            t[i] = x.tokens
        f.attrs["hidden_size"] = 12
    return [x.expect("tokens") | {"question_id": None} for x in s]


@kind("h5py")
def h5_attention_per_layer_group(folder):
    """Write sample/layer_k/{hidden_state,attention}."""
    s = make_samples(3)
    with create(folder / "v.h5") as f:
        for x in s:
            for k in range(3):
                f[f"samples/{x.question_id}/layer_{k}/hidden_state"] = x.hidden[k]
                f[f"samples/{x.question_id}/layer_{k}/attention"] = x.attention[k]
    return [x.expect("id attention") for x in s]


@kind("safetensors")
def json_by_id_lists(folder):
    """Write json: {id: hidden nested}."""
    s = make_samples(3)
    write_json(folder / "x.json", {x.question_id: x.hidden.tolist() for x in s})
    return [x.expect("id") for x in s]


@kind("pyarrow", "safetensors")
def parquet_conversations(folder):
    """Write messages list of struct + hidden."""
    s = make_samples(3)
    write_parquet(
        folder / "c.parquet",
        [
            {
                "conversation_id": x.question_id,
                "messages": [{"role": "user", "content": x.question}, {"role": "assistant", "content": x.answer}],
                "hidden_states": x.hidden.tolist(),
            }
            for x in s
        ],
    )
    return [x.expect("id question answer") for x in s]


@kind("pyarrow", "safetensors")
def parquet_generic_vector(folder):
    """Write id, text, embedding list<float>, is_hallucination bool."""
    s = make_samples(4, layers=1)
    write_parquet(
        folder / "c.parquet",
        [
            {
                "id": x.question_id,
                "text": x.answer,
                "embedding": x.hidden[0, -1].tolist(),
                "is_hallucination": bool(x.score < 0.5),
            }
            for x in s
        ],
    )
    return [x.expect_last("id label") for x in s]
