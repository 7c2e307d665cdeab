"""Kinds whose structure differs strongly from that of the main corpus."""

import functools
import hashlib

import numpy as np

from tests.ingest.corpus import registry
from tests.ingest.corpus.samples import (
    dump,
    expect_generated,
    generate,
    joined_states,
    pad,
    prompts,
    save_pt,
    tensor,
    tiny_model,
    write_json,
    write_lines,
    write_table,
)

kind = functools.partial(registry.kind, register=registry.UNSEEN)


@kind(layers=4, expect="words")
def bert_extract_features(folder, samples):
    """Write JSON Lines of BERT's extract_features.py: tokens with the last four layers, numbered from -1 backwards."""
    rows = []
    for i, s in enumerate(samples):
        features = [
            {
                "token": s.words[j],
                "layers": [{"index": -1 - k, "values": s.hidden[3 - k, j].tolist()} for k in range(4)],
            }
            for j in range(len(s.words))
        ]
        rows.append({"linex_index": i, "features": features})
    write_lines(folder / "output.jsonl", rows)


@kind("transformers")
def t5_generate_objects(folder):
    """Write GenerateEncoderDecoderOutput of T5: the trace is that of the decoder."""
    import torch

    rows, traces = [], []
    for i, ids in enumerate(prompts()):
        torch.manual_seed(1)
        options = {"return_dict_in_generate": True, "output_hidden_states": True, "do_sample": False}
        output = tiny_model("t5").generate(ids, max_new_tokens=4, min_new_tokens=4, **options)
        rows.append({"question_id": f"q{i}", "output": output})
        steps = output.decoder_hidden_states
        hidden = np.stack([np.concatenate([s[k][0].numpy() for s in steps]) for k in range(len(steps[0]))])
        traces.append({"question_id": f"q{i}", "hidden_states": hidden, "has_embeddings": True})
    save_pt(folder / "t5.pt", rows)
    return traces


@kind(count=4, lengths=(7,), expect="id label")
def numpy_record_array(folder, samples):
    """Write an npy file of a structured dtype: id, hidden (L, S, D), label."""
    dtype = [("id", "U8"), ("hidden", "f4", (3, 7, 12)), ("label", "i4")]
    np.save(
        folder / "records.npy", np.array([(s.question_id, s.hidden, int(s.score < 0.5)) for s in samples], dtype=dtype)
    )


@kind(expect="id")
def tuple_keys(folder, samples):
    """Write a pickled dict by (question id, layer) of arrays (S, D)."""
    dump(folder / "acts.pkl", {(s.question_id, k): h for s in samples for k, h in enumerate(s.hidden)})


@kind(ids="ex-{}", expect="id")
def names_of_id_and_layer(folder, samples):
    """Write an npz whose names join id and layer: q0_layer_0."""
    np.savez(folder / "acts.npz", **{f"{s.question_id}_layer_{k}": h for s in samples for k, h in enumerate(s.hidden)})


@kind()
def folder_per_layer(folder, samples):
    """Write layer_10/q0.npy, layer_20/q0.npy ... (S, D)."""
    for k, layer in enumerate((10, 20, 30)):
        base = folder / f"layer_{layer}"
        base.mkdir()
        for s in samples:
            np.save(base / f"{s.question_id}.npy", s.hidden[k])
    return [s.expect("id", layers=[10, 20, 30]) for s in samples]


@kind(expect="id")
def file_per_sample_and_layer(folder, samples):
    """Write q0_layer0.pt, q0_layer1.pt ... tensors (S, D), with questions.json by id."""
    for s in samples:
        for k, h in enumerate(s.hidden):
            save_pt(folder / f"{s.question_id}_layer{k}.pt", tensor(h))
    write_json(folder / "questions.json", {s.question_id: s.question for s in samples})


@kind(expect="id tokens")
def records_per_token(folder, samples):
    """Write each trace as a list of token records: text, id, log-probability, vectors of all layers."""
    rows = []
    for s in samples:
        tokens = [
            {"text": s.words[j], "id": int(s.tokens[j]), "logprob": -0.5, "hidden_states": s.hidden[:, j]}
            for j in range(len(s.words))
        ]
        rows.append({"request": {"id": s.question_id, "prompt": s.question}, "completion": {"tokens": tokens}})
    dump(folder / "scenario_state.pkl", rows)


@kind("polars", expect="id")
def polars_struct_column(folder, samples):
    """Write Parquet by polars: a struct column of layers, each a list of lists."""
    import polars as pl

    rows = [
        {"question_id": s.question_id, "states": {f"layer_{k}": h.tolist() for k, h in enumerate(s.hidden)}}
        for s in samples
    ]
    pl.DataFrame(rows).write_parquet(folder / "states.parquet")


@kind(count=5, expect_last="label")
def tensor_dataset_object(folder, samples):
    """Write torch.save(TensorDataset(X, y)): last tokens (N, L, D) and labels."""
    from torch.utils.data import TensorDataset

    features = tensor(np.stack([s.hidden[:, -1] for s in samples]))
    save_pt(folder / "train.pt", TensorDataset(features, tensor(np.array([int(s.score < 0.5) for s in samples]))))


@kind(count=2, expect="id")
def long_csv(folder, samples):
    """Write a CSV in long form: a row per question, layer and token, a column per dimension."""
    rows = [
        {"question_id": s.question_id, "layer": k, "token": j}
        | {f"d{d}": float(v) for d, v in enumerate(s.hidden[k, j])}
        for s in samples
        for k in range(3)
        for j in range(len(s.tokens))
    ]
    write_table(folder / "hidden_states_long.csv", rows)


@kind(expect="attention")
def harness_tensor_states(folder, samples):
    """Write a states wrapper of lm-evaluation-harness: tensor_states/md5 of the prompt.pt, samples_task.jsonl."""
    rows = []
    for i, s in enumerate(samples):
        name = hashlib.md5(s.question.encode(), usedforsecurity=False).hexdigest()
        value = {"hidden_states": tuple(tensor(s.hidden[:, None])), "attentions": tuple(tensor(s.attention[:, None]))}
        save_pt(folder / "tensor_states" / f"{name}.pt", value)
        rows.append({"doc_id": i, "arguments": [[s.question]], "resps": [[s.answer]], "acc": s.score, "hash": name})
    write_lines(folder / "samples_triviaqa.jsonl", rows)


@kind(layers=1, expect="")
def pooling_responses(folder, samples):
    """Write responses of vLLM's pooling server (one vector per token, one layer), a JSON file per request."""
    for s in samples:
        data = [{"index": 0, "object": "pooling", "data": s.hidden[0].tolist()}]
        usage = {"prompt_tokens": len(s.tokens), "total_tokens": len(s.tokens)}
        value = {"id": f"pool-{s.question_id}", "object": "list", "model": "m", "data": data, "usage": usage}
        write_json(folder / f"pool-{s.question_id}.json", value)


@kind("scipy", expect="id mean", rows="traces.pkl")
def sparse_attention(s):
    """Write attention of each layer as a scipy CSR matrix (head mean), hidden states as arrays."""
    from scipy.sparse import csr_matrix

    return {
        "question_id": s.question_id,
        "hidden_states": list(s.hidden),
        "attentions": [csr_matrix(a) for a in s.attention.mean(1)],
    }


@kind(expect="id", rows="traces.pkl")
def prompt_and_response_states(s):
    """Write the states of the prompt and of the response in two arrays, to be joined."""
    return {
        "question_id": s.question_id,
        "prompt_hidden_states": s.hidden[:, : s.prompt_length],
        "response_hidden_states": s.hidden[:, s.prompt_length :],
    }


@kind(count=4)
def padded_batch_per_layer(folder, samples):
    """Write layer_5, layer_6, ... (N, S, D) padded, attention_mask and texts in one .pt file."""
    hidden, mask = pad([s.hidden for s in samples], axis=1)
    value = {f"layer_{5 + k}": tensor(hidden[:, k], "float16") for k in range(3)}
    value |= {"attention_mask": tensor(mask), "texts": [s.question for s in samples]}
    save_pt(folder / "activations.pt", value)
    return [s.expect(layers=[5, 6, 7]) for s in samples]


@kind("h5py", expect="tokens")
def h5_demonstrations(folder, samples):
    """Write HDF5 in the layout of demonstrations: data/demo_0/hidden_states (S, L, D), and mask/train with names."""
    import h5py

    with h5py.File(folder / "rollouts.hdf5", "w") as file:
        for i, s in enumerate(samples):
            group = file.create_group(f"data/demo_{i}")
            group["hidden_states"], group["tokens"] = s.hidden.transpose(1, 0, 2), s.tokens
            group.attrs["num_samples"] = len(s.tokens)
        file["mask/train"] = np.array([b"demo_0", b"demo_1"])


@kind("safetensors", ids="triviaqa/{}", expect="id")
def st_file_per_layer(folder, samples):
    """Write layer_00.safetensors ... with a tensor (S, D) per question id in each."""
    from safetensors.numpy import save_file

    for k in range(3):
        save_file({s.question_id: s.hidden[k].copy() for s in samples}, folder / f"layer_{k:02d}.safetensors")


@kind("h5py", "transformers")
def h5_generation_steps(folder):
    """Write HDF5 of generate(): q0/step_0/layer_0 (P, D), then (1, D) per step."""
    import h5py

    traces = []
    with h5py.File(folder / "generations.h5", "w") as file:
        for i, ids in enumerate(prompts()):
            output = generate(ids, new=3 + i, attentions=False)
            for n, step in enumerate(output.hidden_states):
                for k, h in enumerate(step):
                    file[f"q{i}/step_{n}/layer_{k}"] = h[0].numpy()
            file[f"q{i}"].attrs["answer"] = f"A {i}"
            hidden = joined_states(output.hidden_states)
            traces.append({"question_id": f"q{i}", "hidden_states": hidden, "has_embeddings": True, "answer": f"A {i}"})
    return traces


@kind("pyarrow", expect="id mean question answer")
def parquet_files_to_join(folder, samples):
    """Write hidden.parquet, attention.parquet and questions.parquet with rows in different order, joined by id."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = {
        "hidden": [{"id": s.question_id, "hidden_states": s.hidden.tolist()} for s in samples],
        "attention": [{"id": s.question_id, "attention": s.attention.mean(1).tolist()} for s in reversed(samples)],
        "questions": [{"id": s.question_id, "question": s.question, "answer": s.answer} for s in samples],
    }
    for name, rows in tables.items():
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")


@kind(expect="id attention answer")
def pickles_to_join(folder, samples):
    """Write hidden_states.pkl, attentions.pkl and answers.json, each a dict by question id."""
    dump(folder / "hidden_states.pkl", {s.question_id: s.hidden for s in samples})
    dump(folder / "attentions.pkl", {s.question_id: s.attention for s in samples})
    write_json(folder / "answers.json", {s.question_id: s.answer for s in samples})


@kind("transformers")
def npz_generation_steps(folder):
    """Write an npz per question with step_0_layer_0 (1, P, D), step_1_layer_0 (1, 1, D) ... and sequences."""
    traces = []
    for i, ids in enumerate(prompts()):
        output = generate(ids, new=3 + i, attentions=False)
        states = {f"step_{n}_layer_{k}": h.numpy() for n, s in enumerate(output.hidden_states) for k, h in enumerate(s)}
        np.savez(folder / f"gen_{i}.npz", **states, sequences=output.sequences.numpy())
        traces.append(expect_generated(output, attention=False))
    return traces
