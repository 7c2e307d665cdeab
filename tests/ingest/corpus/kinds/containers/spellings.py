"""Containers whose names, rows and groups are written in many ways."""

import csv
import gzip
import json

import numpy as np

from tests.ingest.corpus.kinds.containers.hierarchies import save_safetensors
from tests.ingest.corpus.kinds.hdf5 import create
from tests.ingest.corpus.kinds.tables import write_parquet
from tests.ingest.corpus.registry import kind
from tests.ingest.corpus.samples import pad, write_json, write_lines, write_table


@kind("pyarrow", "safetensors", count=4, expect="id answer label")
def parquet_three_tables(folder, samples):
    """Write states, answers jsonl, labels csv."""
    write_parquet(
        folder / "hidden.parquet", [{"example_id": s.question_id, "hidden_states": s.hidden.tolist()} for s in samples]
    )
    write_lines(folder / "answers.jsonl", [{"example_id": s.question_id, "answer": s.answer} for s in samples[::-1]])
    write_table(folder / "labels.csv", [{"example_id": s.question_id, "label": int(s.score < 0.5)} for s in samples])


@kind("pyarrow", "safetensors", expect="id")
def parquet_layer_names(folder, samples):
    """Write row per (id, layer name) with text layer names."""
    write_parquet(
        folder / "a.parquet",
        [
            {"id": s.question_id, "layer": f"model.layers.{k}", "activations": s.hidden[k].tolist()}
            for s in samples
            for k in range(3)
        ],
    )


@kind("safetensors", count=4, expect_last="id label")
def csv_long_values(folder, samples):
    """Write row per id,layer last token with vector as JSON text."""
    write_table(
        folder / "last.csv",
        [
            {
                "qid": s.question_id,
                "layer": k,
                "vector": json.dumps(s.hidden[k, -1].tolist()),
                "label": int(s.score < 0.5),
            }
            for s in samples
            for k in range(3)
        ],
    )


@kind("safetensors", count=4, layers=1, expect_last="id")
def csv_gz_space_vectors(folder, samples):
    """Write gz csv numpy str vector."""
    with gzip.open(folder / "emb.csv.gz", "wt", newline="") as f:
        w = csv.writer(f)
        w.writerow(["question_id", "embedding"])
        for s in samples:
            w.writerow([s.question_id, " ".join(map(str, s.hidden[0, -1].tolist()))])


@kind("h5py", count=4)
def h5_splits_of_groups(folder, samples):
    """Write train/test groups per sample with attrs."""
    with create(folder / "d.h5") as f:
        for i, s in enumerate(samples):
            g = f.create_group(f"{'train' if i < 2 else 'test'}/sample_{i:04d}")
            g["hidden"] = s.hidden
            g["input_ids"] = s.tokens
            g.attrs["question"] = s.question
            g.attrs["response"] = s.answer
            g.attrs["label"] = int(s.score < 0.5)
    return [s.expect("tokens question answer label", question_id=None) for s in samples]


@kind("h5py", expect="id")
def h5_table_plus_arrays(folder, samples):
    """Write compound table index with offset,length & one flat array."""
    lens = [len(s.tokens) for s in samples]
    off = np.cumsum([0, *lens[:-1]])
    with create(folder / "d.h5") as f:
        f["activations"] = np.concatenate([s.hidden.transpose(1, 0, 2) for s in samples])
        f["index"] = np.array(
            [(s.question_id, o, n) for s, o, n in zip(samples, off, lens, strict=True)],
            dtype=[("id", "S10"), ("offset", "i8"), ("length", "i8")],
        )


@kind("h5py", expect="id")
def h5_layer_groups_ids(folder, samples):
    """Write layer_0/hidden (N,S,D) lengths."""
    with create(folder / "d.h5") as f:
        for k in range(3):
            f[f"layers/{k}/hidden_states"] = pad([s.hidden[k] for s in samples])[0]
        f["lengths"] = np.array([len(s.tokens) for s in samples])
        f["question_ids"] = np.array([s.question_id.encode() for s in samples])


@kind(expect="id")
def npz_per_question_gen(folder, samples):
    """Write q/prompt/layer, q/gen_0/layer."""
    a = {}
    for s in samples:
        p = s.prompt_length
        for k in range(3):
            a[f"{s.question_id}/prompt/layer_{k}"] = s.hidden[k, :p]
            for n in range(len(s.tokens) - p):
                a[f"{s.question_id}/gen_{n}/layer_{k}"] = s.hidden[k, p + n : p + n + 1]
    np.savez(folder / "a.npz", **a)


@kind("safetensors", expect="id")
def st_bf16_stacked(folder, samples):
    """Write safetensors batch: hidden_states.layer_k (B,S,D), attention_mask, ids in metadata."""
    a = {f"hidden_states.layer_{k}": pad([s.hidden[k] for s in samples])[0] for k in range(3)}
    a["attention_mask"] = pad([s.hidden[0] for s in samples])[1]
    save_safetensors(folder / "b.safetensors", a, {"question_ids": json.dumps([s.question_id for s in samples])})


@kind("safetensors", expect="id")
def st_names_double_underscore(folder, samples):
    """Write q0__hidden_states__3."""
    a = {}
    for s in samples:
        for k in range(3):
            a[f"{s.question_id}__hidden_states__{k}"] = s.hidden[k]
    save_safetensors(folder / "b.safetensors", a)


@kind("safetensors", expect="id")
def st_colon(folder, samples):
    """Write q0:layer:3."""
    save_safetensors(
        folder / "b.safetensors", {f"{s.question_id}:layer:{k}": s.hidden[k] for s in samples for k in range(3)}
    )


@kind(expect="tokens attention")
def npz_keys_hidden_layer(folder, samples):
    """Write hidden_layer_0 , attn_layer_0."""
    for s in samples:
        np.savez(
            folder / f"{s.question_id}.npz",
            **{f"hidden_layer_{k}": s.hidden[k] for k in range(3)},
            **{f"attn_layer_{k}": s.attention[k] for k in range(3)},
            token_ids=s.tokens,
        )


@kind(expect="")
def npz_transformer_h(folder, samples):
    """Write transformer.h.0 keys with resid."""
    for s in samples:
        np.savez(folder / f"{s.question_id}.npz", **{f"transformer.h.{k}": s.hidden[k][None] for k in range(3)})


@kind("safetensors", count=5, expect_last="id label")
def npz_pooled_layers_dict(folder, samples):
    """Write all_layers (N,L,D) float16, labels, question ids; names emb."""
    np.savez_compressed(
        folder / "emb_train.npz",
        emb=np.stack([s.hidden[:, -1] for s in samples]),
        labels=np.array([int(s.score < 0.5) for s in samples]),
        qids=np.array([s.question_id for s in samples]),
    )


@kind("safetensors", expect="id words", rows="a.jsonl")
def jsonl_dict_by_layer_token(s):
    """Write {"id","layers":{"0":[[...]]},"tokens":[str]}."""
    return {
        "id": s.question_id,
        "layers": {f"layer_{k}": s.hidden[k].tolist() for k in range(3)},
        "tokens": s.words,
        "token_ids": s.tokens.tolist(),
    }


@kind("safetensors", expect="id", rows="a.jsonl")
def jsonl_activations_list(s):
    """Write activations: list of {layer, position, values} flat per sample."""
    return {
        "id": s.question_id,
        "activations": [
            {"layer": k, "position": j, "values": s.hidden[k, j].tolist()}
            for k in range(3)
            for j in range(len(s.tokens))
        ],
    }


@kind("safetensors", count=4, layers=1)
def jsonl_openai_embeddings_batch(folder, samples):
    """Write batch output: custom_id, response.body.data[0].embedding."""
    write_lines(
        folder / "batch_output.jsonl",
        [
            {
                "id": f"b{i}",
                "custom_id": s.question_id,
                "response": {
                    "status_code": 200,
                    "body": {
                        "object": "list",
                        "data": [{"object": "embedding", "index": 0, "embedding": s.hidden[0, -1].tolist()}],
                        "model": "m",
                    },
                },
                "error": None,
            }
            for i, s in enumerate(samples)
        ],
    )
    return [s.expect_last("") | {"question_id": None} for s in samples]


@kind("safetensors", expect="id answer tokens words", rows="a.jsonl")
def jsonl_tgi_details(s):
    """Write generated_text, details.tokens with id text logprob + hidden."""
    return {
        "id": s.question_id,
        "inputs": s.question,
        "generated_text": s.answer,
        "details": {
            "finish_reason": "length",
            "tokens": [
                {"id": int(t), "text": w, "logprob": -0.5, "special": False, "hidden_states": s.hidden[:, j].tolist()}
                for j, (t, w) in enumerate(zip(s.tokens, s.words, strict=True))
            ],
        },
    }


@kind("safetensors", count=2)
def json_samples_multi_outputs(folder, samples):
    """Write question with outputs each with hidden states."""
    write_json(
        folder / "a.json",
        {
            "results": [
                {
                    "question_id": "qq",
                    "question": "Why?",
                    "outputs": [{"text": s.answer, "hidden_states": s.hidden.tolist()} for s in samples],
                }
            ]
        },
    )
    return [s.expect("answer", question_id="qq", sample=i, question="Why?") for i, s in enumerate(samples)]


@kind("pyarrow", "safetensors", count=4, expect_last="id label")
def feather_columns(folder, samples):
    """Write feather with hidden_0.. fixed size lists of last token."""
    import pyarrow as pa
    import pyarrow.feather as fe

    cols = {"id": [s.question_id for s in samples], "label": [int(s.score < 0.5) for s in samples]}
    for k in range(3):
        cols[f"hidden_{k}"] = pa.FixedSizeListArray.from_arrays(
            pa.array(np.concatenate([s.hidden[k, -1] for s in samples])), 12
        )
    fe.write_feather(pa.table(cols), folder / "x.feather")


@kind("pyarrow", "safetensors")
def arrow_dictionary_ids(folder, samples):
    """Write dictionary-encoded ids, long rows per layer."""
    import pyarrow as pa

    rows = [(s.question_id, k, s.hidden[k].tolist()) for s in samples for k in range(3)]
    t = pa.table(
        {
            "prompt": pa.array([r[0] for r in rows]).dictionary_encode(),
            "layer": pa.array([r[1] for r in rows], pa.int8()),
            "resid": pa.array([r[2] for r in rows], pa.list_(pa.list_(pa.float32(), 12))),
        }
    )
    with pa.OSFile(str(folder / "x.arrow"), "wb") as o, pa.ipc.new_stream(o, t.schema) as w:
        w.write_table(t, max_chunksize=2)
    return [s.expect("") | {"question_id": None} for s in samples]


@kind("pyarrow", "safetensors", count=5, expect_last="id question label")
def npy_and_parquet_meta(folder, samples):
    """Write hidden.npy (N,L,D) and meta.parquet by row."""
    np.save(folder / "hidden_states.npy", np.stack([s.hidden[:, -1] for s in samples]))
    write_parquet(
        folder / "meta.parquet",
        [{"question_id": s.question_id, "question": s.question, "label": int(s.score < 0.5)} for s in samples],
    )


@kind("pyarrow", expect="id answer")
def npy_files_named_in_parquet(folder, samples):
    """Write arrays/0001.npy + index.parquet path."""
    (folder / "arrays").mkdir()
    for i, s in enumerate(samples):
        np.save(folder / "arrays" / f"{i:05d}.npy", s.hidden)
    write_parquet(
        folder / "index.parquet",
        [
            {"path": f"arrays/{i:05d}.npy", "question_id": s.question_id, "answer": s.answer}
            for i, s in enumerate(samples)
        ],
    )


@kind("h5py")
def h5_vlen_tokens(folder, samples):
    """Write N groups 'hidden_states' dataset (N,) vlen & tokens vlen."""
    import h5py

    with create(folder / "v.h5") as f:
        for k in range(3):
            d = f.create_dataset(f"layer_{k}", (3,), dtype=h5py.vlen_dtype(np.float32))
            for i, s in enumerate(samples):
                d[i] = s.hidden[k].ravel()
        t = f.create_dataset("tokens", (3,), dtype=h5py.vlen_dtype(np.int32))
        for i, s in enumerate(samples):
            t[i] = s.tokens
        f.attrs["hidden_size"] = 12
    return [s.expect("tokens") | {"question_id": None} for s in samples]


@kind("h5py", expect="id attention")
def h5_attention_per_layer_group(folder, samples):
    """Write sample/layer_k/{hidden_state,attention}."""
    with create(folder / "v.h5") as f:
        for s in samples:
            for k in range(3):
                f[f"samples/{s.question_id}/layer_{k}/hidden_state"] = s.hidden[k]
                f[f"samples/{s.question_id}/layer_{k}/attention"] = s.attention[k]


@kind("safetensors", expect="id")
def json_by_id_lists(folder, samples):
    """Write json: {id: hidden nested}."""
    write_json(folder / "x.json", {s.question_id: s.hidden.tolist() for s in samples})


@kind("pyarrow", "safetensors", expect="id question answer", rows="c.parquet")
def parquet_conversations(s):
    """Write messages list of struct + hidden."""
    return {
        "conversation_id": s.question_id,
        "messages": [{"role": "user", "content": s.question}, {"role": "assistant", "content": s.answer}],
        "hidden_states": s.hidden.tolist(),
    }


@kind("pyarrow", "safetensors", count=4, layers=1, expect_last="id label", rows="c.parquet")
def parquet_generic_vector(s):
    """Write id, text, embedding list<float>, is_hallucination bool."""
    return {
        "id": s.question_id,
        "text": s.answer,
        "embedding": s.hidden[0, -1].tolist(),
        "is_hallucination": bool(s.score < 0.5),
    }
