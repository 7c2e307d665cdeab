"""Kinds that trainers, servers and graph libraries write."""

import functools
import json

import numpy as np

from tests.ingest.corpus import registry
from tests.ingest.corpus.samples import (
    dump,
    forward,
    generate,
    make_samples,
    pad,
    pad_attention,
    prompts,
    save_pt,
    tensor,
    write_json,
    write_lines,
    write_table,
)
from tests.ingest.corpus.unseen_sets.notebooks_and_repositories import correctness, record, wrong

kind = functools.partial(registry.kind, register=registry.UNSEEN)


@kind(count=5, layers=4)
def repe_pipeline_layers(folder, samples):
    """Write outputs of RepE's rep-reading pipeline: a dict per statement, from layer -1, -2, ... to its last token."""
    rows = []
    for s in samples:
        states = {-k: tensor(s.hidden[-k, -1], "float16") for k in range(1, 5)}
        rows.append(
            {"id": s.question_id, "statement": s.answer, "correct": bool(correctness(s)), "hidden_states": states}
        )
    dump(folder / "honesty_reps.pkl", rows)
    return [s.expect_last("id", score=correctness(s)) for s in samples]


@kind(count=5, ids="tqa_{}", expect="id question label")
def lightning_prediction_writer(folder, samples):
    """Write a BasePredictionWriter of two ranks: batches in predictions_0.pt, their rows in batch_indices_0.pt."""
    # A DistributedSampler deals the rows to the ranks in turn; the indices are [data loader][batch][row].
    for rank, batches in enumerate([[[0, 2], [4]], [[1, 3]]]):
        predictions = []
        for batch in batches:
            hidden, mask = pad([samples[i].hidden for i in batch], axis=1)
            predictions.append({"hidden_states": tensor(hidden, "float16"), "attention_mask": tensor(mask)})
        save_pt(folder / "predictions" / f"predictions_{rank}.pt", predictions)
        save_pt(folder / "predictions" / f"batch_indices_{rank}.pt", [batches])
    write_lines(folder / "dataset.jsonl", [record(s, "id question", is_hallucination=wrong(s)) for s in samples])


@kind(count=4, layers=1, expect="id label")
def pt_pad_sequence_time_first(folder, samples):
    """Write pad_sequence of one layer as an LSTM takes it, time first (longest, N, D), with lengths, ids and labels."""
    from torch.nn.utils.rnn import pad_sequence

    value = {
        "hidden_states": pad_sequence([tensor(s.hidden[0]) for s in samples]),
        "lengths": tensor(np.array([len(s.tokens) for s in samples])),
        "question_ids": [s.question_id for s in samples],
        "is_hallucination": tensor(np.array([wrong(s) for s in samples])),
    }
    save_pt(folder / "lstm_inputs.pt", value)


@kind(count=4, layers=1, expect="id tokens")
def verl_rollout_batch(folder, samples):
    """Write a rollout of verl: prompts padded left, responses padded right, joined in input_ids and hidden_states."""
    parts = [(s, slice(None, 2 + i), slice(2 + i, None)) for i, s in enumerate(samples)]
    ids, masks = [], []
    for k, side in ((1, "left"), (2, "right")):
        padded, mask = pad([part[0].tokens[part[k]] for part in parts], side=side)
        ids.append(tensor(padded))
        masks.append(mask)
    states = [pad([p[0].hidden[0, p[k]] for p in parts], side=side)[0] for k, side in ((1, "left"), (2, "right"))]
    mask = np.concatenate(masks, 1)
    batch = {"prompts": ids[0], "responses": ids[1], "response_mask": tensor(masks[1]), "attention_mask": tensor(mask)}
    batch["input_ids"] = tensor(np.concatenate(ids, 1))
    batch["position_ids"] = tensor(np.maximum(mask.cumsum(1) - 1, 0))
    batch["hidden_states"] = tensor(np.concatenate(states, 1), "float16")
    others = {"uid": np.array([s.question_id for s in samples], object), "data_source": np.array(["gsm8k"] * 4, object)}
    value = {"batch": batch, "non_tensor_batch": others, "meta_info": {"global_steps": 40}}
    save_pt(folder / "rollout_step_40.pt", value)


@kind("torch_geometric", count=5, layers=1, expect="id question label")
def pyg_processed_data(folder, samples):
    """Write processed/data.pt of PyTorch Geometric: graphs with x (S, D), edges of the attention, y, question_id."""
    from torch_geometric.data import Data, InMemoryDataset

    graphs = []
    for s in samples:
        weights = s.attention[0].mean(0)
        target, source = np.nonzero(weights > 0.05)
        edges = {
            "edge_index": tensor(np.stack([source, target])),
            "edge_attr": tensor(weights[target, source][:, None]),
        }
        label = tensor(np.array([wrong(s)]))
        graphs.append(Data(x=tensor(s.hidden[0]), y=label, question_id=s.question_id, question=s.question, **edges))
    (folder / "processed").mkdir()
    InMemoryDataset.save(graphs, folder / "processed" / "data.pt")


@kind("transformers")
def pt_beam_search(folder):
    """Write GenerateBeamDecoderOnlyOutput per question: beam_indices name the row of each step of the best answer."""
    for i, ids in enumerate(prompts(4, lengths=(6, 9, 5, 8))):
        output = generate(ids, new=5, num_beams=4)
        save_pt(folder / f"nq-{i}.pt", {k: v for k, v in output.items() if k != "cache"})
        # The states of the best answer are those of one pass over its tokens.
        once = forward(output.sequences[:, :-1])
        hidden, heads = (np.stack([x[0].numpy() for x in y]) for y in (once.hidden_states, once.attentions))
        trace = {"question_id": f"nq-{i}", "hidden_states": hidden, "attention": heads, "has_embeddings": True}
        yield trace | {"tokens": output.sequences[0, :-1].tolist(), "sequence": output.sequences[0].tolist()}


@kind(count=12)
def npz_positional_arrays_with_table(folder, samples):
    """Write np.savez(path, *arrays), whose names are arr_0 ... arr_11 (L, S, D), and metadata.csv in their order."""
    np.savez_compressed(folder / "activations.npz", *[s.hidden.astype("f2") for s in samples])
    rows = [record(s, "question_id question answer", correct=int(correctness(s))) for s in samples]
    write_table(folder / "metadata.csv", rows)
    return [s.expect("id question answer", score=correctness(s)) for s in samples]


@kind(count=5)
def npy_object_arrays_in_order(folder, samples):
    """Write a ragged object array per field: hidden_states.npy, attentions.npy, questions.npy, is_correct.npy."""
    for name, attribute in (("hidden_states", "hidden"), ("attentions", "attention")):
        ragged = np.empty(5, object)
        ragged[:] = [getattr(s, attribute) for s in samples]
        np.save(folder / f"{name}.npy", ragged)
    np.save(folder / "questions.npy", np.array([s.question for s in samples]))
    np.save(folder / "is_correct.npy", np.array([s.score >= 0.5 for s in samples]))
    return [s.expect("attention question", question_id=None, score=correctness(s)) for s in samples]


@kind(count=5, expect="id attention tokens label")
def npz_folders_by_label(folder, samples):
    """Write correct/q0.npz and hallucinated/q1.npz: the folder is the label, as torchvision's ImageFolder has it."""
    for s in samples:
        base = folder / "activations" / ("hallucinated" if wrong(s) else "correct")
        base.mkdir(parents=True, exist_ok=True)
        arrays = {"hidden_states": s.hidden, "attentions": s.attention, "token_ids": s.tokens}
        np.savez(base / f"{s.question_id}.npz", **arrays)


@kind("h5py", count=5)
def netcdf_of_xarray(folder, samples):
    """Write netCDF-4 as xarray does: (question_id, token, layer, hidden) padded with NaN; named dimensions, n_tokens."""
    import h5py

    hidden, _ = pad([s.hidden.transpose(1, 0, 2) for s in samples], fill=np.nan)
    with h5py.File(folder / "activations.nc", "w") as file:
        file["question_id"] = [s.question_id for s in samples]
        file["token"] = np.arange(hidden.shape[1])
        file["layer"] = np.array([8, 16, 24])
        file.create_dataset("hidden", data=np.zeros(12, ">f4"))
        dims = ("question_id", "token", "layer", "hidden")
        for name in dims[:3]:
            file[name].make_scale(name)
        file["hidden"].make_scale(f"This is a netCDF dimension but not a netCDF variable.{12:10}")
        states = file.create_dataset("hidden_states", data=hidden, compression="gzip")
        states.attrs["_FillValue"] = np.array([np.nan], "f4")
        file["n_tokens"] = np.array([len(s.tokens) for s in samples])
        file["correct"] = np.array([s.score >= 0.5 for s in samples], "i1")
        for name, used in (("hidden_states", dims), ("n_tokens", dims[:1]), ("correct", dims[:1])):
            for axis, dim in enumerate(used):
                file[name].dims[axis].attach_scale(file[dim])
    return [s.expect("id", score=correctness(s)) for s in samples]


@kind("h5py", count=9, expect_last="id question label")
def h5_groups_by_verdict(folder, samples):
    """Write the groups correct and hallucinated with hidden_states (N, L, D) of last tokens, question_ids and prompts."""
    import h5py

    with h5py.File(folder / "city_country.h5", "w") as file:
        for verdict, name in enumerate(("correct", "hallucinated")):
            chosen = [s for s in samples if wrong(s) == verdict]
            file[f"{name}/hidden_states"] = np.stack([s.hidden[:, -1] for s in chosen])
            file[f"{name}/question_ids"] = [s.question_id for s in chosen]
            file[f"{name}/prompts"] = [s.question for s in chosen]


@kind("h5py", count=6, expect="id mean")
def h5_group_per_batch(folder, samples):
    """Write batch_0 ... with hidden_states (L, B, S, D), attentions (L, B, S, S), attention_mask and question_ids."""
    import h5py

    with h5py.File(folder / "train_activations.h5", "w") as file:
        for n, start in enumerate((0, 4)):
            part = samples[start : start + 4]
            hidden, mask = pad([s.hidden for s in part], axis=1)
            group = file.create_group(f"batch_{n}")
            group["hidden_states"] = hidden.swapaxes(0, 1).astype("f2")
            group["attentions"] = pad_attention([s.attention.mean(1) for s in part]).swapaxes(0, 1).astype("f2")
            group["attention_mask"] = mask
            group["question_ids"] = [s.question_id for s in part]


@kind("safetensors", count=9, expect_last="id question answer label")
def st_split_and_layer_files(folder, samples):
    """Write train_layer_8.safetensors ... with last tokens (N, D) and labels (N,), and train.jsonl with ids."""
    from safetensors.torch import save_file

    for split, part in (("train", samples[:5]), ("test", samples[5:])):
        labels = tensor(np.array([wrong(s) for s in part]))
        for k, layer in enumerate((8, 16, 24)):
            states = tensor(np.stack([s.hidden[k, -1] for s in part]))
            save_file({"activations": states, "labels": labels}, folder / f"{split}_layer_{layer}.safetensors")
        write_lines(folder / f"{split}.jsonl", [record(s, "id question answer") for s in part])


@kind("safetensors", count=6, ids="hotpot_{}")
def st_length_sorted_shards(folder, samples):
    """Write shards (B, S, L, D) of a length-sorted batch loop, padded left; example_idx is the row of examples.jsonl."""
    from safetensors.torch import save_file

    order = sorted(range(6), key=lambda i: -len(samples[i].tokens))
    for shard, rows in enumerate((order[:4], order[4:])):
        hidden, mask = pad([samples[i].hidden.transpose(1, 0, 2) for i in rows], side="left")
        tokens, _ = pad([samples[i].tokens for i in rows], side="left")
        arrays = {"attention_mask": mask, "input_ids": tokens, "example_idx": np.array(rows)}
        tensors = {"hidden_states": tensor(hidden, "float16")} | {k: tensor(v) for k, v in arrays.items()}
        save_file(tensors, folder / f"hidden_states-{shard + 1:05d}-of-00002.safetensors")
    write_lines(folder / "examples.jsonl", [record(s, "id question", is_correct=bool(correctness(s))) for s in samples])
    return [s.expect("id tokens question", score=correctness(s)) for s in samples]


@kind("safetensors", count=4, ids="sciq-{}", expect="id question tokens label")
def st_flat_tokens_with_example_ids(folder, samples):
    """Write layers.8, layers.16, ... (T, D) of packed sequences; example_ids (T,) names the row of questions.csv."""
    from safetensors.torch import save_file

    lengths = [len(s.tokens) for s in samples]
    tensors = {f"layers.{8 * k + 8}": tensor(np.concatenate([s.hidden[k] for s in samples])) for k in range(3)}
    tensors["input_ids"] = tensor(np.concatenate([s.tokens for s in samples]))
    tensors["position_ids"] = tensor(np.concatenate([np.arange(n) for n in lengths]))
    tensors["example_ids"] = tensor(np.repeat(np.arange(4), lengths))
    save_file(tensors, folder / "packed_activations.safetensors")
    write_table(folder / "questions.csv", [record(s, "question_id question", hallucination=wrong(s)) for s in samples])


@kind("pyarrow", count=5, expect="id question answer")
def ray_variable_shaped_tensors(folder, samples):
    """Write Parquet of Ray Data: hidden_states as Ray's extension type, a struct of flat data and shape (L, S, D)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    storage = pa.struct([("data", pa.list_(pa.float32())), ("shape", pa.list_(pa.int64()))])
    name = {"ARROW:extension:name": "ray.data.arrow_variable_shaped_tensor", "ARROW:extension:metadata": "3"}
    fields = [pa.field(n, pa.string()) for n in ("question_id", "prompt", "generated_text")]
    schema = pa.schema([*fields, pa.field("hidden_states", storage, metadata=name)])
    for block, part in enumerate((samples[:3], samples[3:])):
        rows = [
            {
                "question_id": s.question_id,
                "prompt": s.question,
                "generated_text": s.answer,
                "hidden_states": {"data": s.hidden.ravel(), "shape": s.hidden.shape},
            }
            for s in part
        ]
        pq.write_table(pa.Table.from_pylist(rows, schema), folder / f"17_{block:06d}_000000.parquet")


@kind("pandas", "pyarrow")
def parquet_row_per_generation(folder):
    """Write a row per question_id and generation_idx: response, last_hidden_state as lists (L, D), is_correct."""
    import pandas as pd

    rows = []
    for i, s in enumerate(make_samples(10)):
        number, k = divmod(i, 5)
        s.question_id, s.question = f"triviaqa_{number}", f"Who wrote book {number}?"
        more = {"generation_idx": k, "last_hidden_state": s.hidden[:, -1].tolist(), "is_correct": bool(correctness(s))}
        rows.append(record(s, "question_id question response", **more))
        yield s.expect_last("id question answer", sample=k, score=correctness(s))
    pd.DataFrame(rows).to_parquet(folder / "generations.parquet", index=False)


@kind("pandas", count=4, expect="id question label")
def csv_per_question_and_layer(folder, samples):
    """Write hidden_states/q0_layer_8.csv ... by df.to_csv, a row per token and a column per dimension, and labels.csv."""
    import pandas as pd

    (folder / "hidden_states").mkdir()
    for s in samples:
        for layer, states in zip((8, 16, 24), s.hidden, strict=True):
            pd.DataFrame(states).to_csv(folder / "hidden_states" / f"{s.question_id}_layer_{layer}.csv", index=False)
    write_table(folder / "labels.csv", [record(s, "question_id question", hallucination=wrong(s)) for s in samples])


@kind("pyarrow", count=4)
def parquet_nested_structs(folder, samples):
    """Write Parquet of nested records: input.question, output.text, output.hidden_states (L, S, D), evaluation.correct."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = []
    for s in samples:
        output = {"text": s.answer, "token_ids": s.tokens.tolist(), "hidden_states": s.hidden.tolist()}
        evaluation = {"correct": bool(correctness(s)), "judge": "exact_match"}
        source = {"question": s.question, "dataset": "nq_open"}
        rows.append({"id": s.question_id, "input": source, "output": output, "evaluation": evaluation})
    pq.write_table(pa.Table.from_pylist(rows), folder / "run.parquet")
    return [s.expect("id question answer tokens", score=correctness(s)) for s in samples]


@kind(count=5, layers=1, expect="id question label")
def llama_cpp_embeddings(folder, samples):
    """Write a response of llama.cpp's /embedding with --pooling none: index and a vector per token; prompts.json."""
    response = [{"index": i, "embedding": s.hidden[0].tolist()} for i, s in enumerate(samples)]
    write_json(folder / "embeddings.json", response)
    write_json(folder / "prompts.json", [record(s, "id question", hallucination=wrong(s)) for s in samples])


@kind(count=4)
def json_tricks_arrays(folder, samples):
    """Write results by question id with arrays as json_tricks dumps them: __ndarray__, dtype, shape, Corder."""

    def encoded(array):
        return {"__ndarray__": array.tolist(), "dtype": str(array.dtype), "shape": list(array.shape), "Corder": True}

    results = {}
    for s in samples:
        arrays = {"hidden_states": encoded(s.hidden), "attentions": encoded(s.attention), "tokens": encoded(s.tokens)}
        results[s.question_id] = record(s, "question answer", is_correct=bool(correctness(s)), **arrays)
    settings = {"model": "llama-2-7b-chat", "temperature": 0.5, "layers": [8, 16, 24]}
    text = json.dumps({"config": settings, "results": results}, indent=2)
    (folder / "experiment.json").write_text(text, encoding="utf-8")
    return [s.expect("id question answer attention tokens", score=correctness(s)) for s in samples]


@kind(count=4, layers=4, ids="req-{}")
def kserve_inference_responses(folder, samples):
    """Write responses of Triton for an ONNX model: outputs hidden_states.0 ... with datatype, shape and flat data."""
    rows = []
    for s in samples:
        named = {f"hidden_states.{k}": h for k, h in enumerate(s.hidden)}
        named |= {f"attentions.{k}": a for k, a in enumerate(s.attention[1:])}
        outputs = [
            {"name": name, "datatype": "FP32", "shape": [1, *array.shape], "data": array.ravel().tolist()}
            for name, array in named.items()
        ]
        rows.append({"model_name": "llama_onnx", "model_version": "1", "id": s.question_id, "outputs": outputs})
    write_lines(folder / "responses.jsonl", rows)
    return [s.expect("id", attention=s.attention[1:], has_embeddings=True) for s in samples]
