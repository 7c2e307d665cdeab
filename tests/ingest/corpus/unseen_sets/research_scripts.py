"""Kinds as scripts of researchers write them."""

import datetime
import functools

import numpy as np

from tests.ingest.corpus import registry
from tests.ingest.corpus.samples import (
    dump,
    expect_generated,
    expect_output,
    forward,
    generate,
    left_padded,
    pad,
    prompts,
    rounded,
    save_pt,
    tensor,
    write_json,
    write_lines,
    write_table,
)

FIVE = {"count": 5, "layers": 3, "lengths": (7, 10, 6, 9, 8)}
NINE = {"count": 9, "lengths": (10, 7, 13, 8, 11)}
OTHER_FIVE = FIVE | {"lengths": (6, 9, 7, 10, 8)}
kind = functools.partial(registry.kind, register=registry.UNSEEN)


def is_right(sample):
    """Return whether the answer of a sample is correct."""
    return sample.score >= 0.5


def texts(sample):
    """Return question and answer of a sample by name."""
    return {"question": sample.question, "answer": sample.answer}


def graded(sample, fields="", /, **changes):
    """Return the expected trace of a sample that was judged correct or not."""
    return sample.expect(fields, score=float(is_right(sample)), **changes)


@kind(count=5, layers=4, dim=20, ids="tqa_{}", lengths=(6, 9, 7), seed=601)
def triviaqa_probe_tensor(folder, samples):
    """Write one .pt of a linear probe: the last token at all layers (N, L, D), lists of texts, a tensor of verdicts."""
    data = {
        "model_name": "meta-llama/Llama-3.1-8B-Instruct",
        "dataset": "trivia_qa",
        "question_ids": [s.question_id for s in samples],
        "questions": [s.question for s in samples],
        "answers": [s.answer for s in samples],
        "last_token_hidden_states": tensor(np.stack([s.hidden[:, -1] for s in samples])),
        "correct": tensor(np.array([is_right(s) for s in samples])),
    }
    save_pt(folder / "triviaqa_last_token.pt", data)
    return [s.expect_last("id question answer", score=float(is_right(s))) for s in samples]


@kind(**FIVE, dim=14, ids="halueval-{}", seed=602, expect="id question answer label")
def hooked_blocks_by_question(folder, samples):
    """Write a pickle keyed by question: float16 outputs (1, S, D) of three hooked blocks under their module names."""
    data = {}
    for s in samples:
        blocks = {f"model.layers.{n}": tensor(s.hidden[k][None], "float16") for k, n in enumerate((2, 5, 10))}
        data[s.question_id] = {**texts(s), "hallucination": not is_right(s), "activations": blocks}
    dump(folder / "activations.pkl", data)


@kind(count=10, layers=4, dim=12, lengths=(6, 9, 7, 11, 8), seed=603)
def sampled_generations(folder, samples):
    """Write a pickled list of questions with two sampled generations each, hidden states as a list of (S, D) layers."""
    rows = []
    for i in range(5):
        generations = []
        for j, s in enumerate(samples[2 * i : 2 * i + 2]):
            states = [tensor(layer) for layer in s.hidden]
            generations.append({"answer": s.answer, "hidden_states": states, "is_correct": is_right(s)})
            question = f"Who wrote book {i}?"
            yield graded(s, "answer", question_id=f"nq_{i}", sample=j, question=question)
        rows.append({"id": f"nq_{i}", "question": question, "temperature": 0.7, "generations": generations})
    dump(folder / "samples_t0.7.pkl", rows)


@kind("transformers")
def greedy_generate_records(folder):
    """Write a .pt list of records with the nested hidden states and sequences of generate(), and a date of the run."""
    records = []
    for i, ids in enumerate(prompts(5, lengths=(9, 7, 12, 8, 10), seed=604)):
        output = generate(ids, new=6, attentions=False)
        known = {"question": f"Which river is number {i}?", "answer": f"River {i}.", "prompt_length": ids.shape[1]}
        created = datetime.datetime(2025, 3, 14, 9, 30, i)
        states = {"sequences": output.sequences, "hidden_states": output.hidden_states}
        records.append({"id": f"popqa-{i}", **known, **states, "accuracy": i % 2, "created": created})
        known |= {"question_id": f"popqa-{i}", "score": float(i % 2)}
        yield expect_generated(output, attention=False, **known)
    save_pt(folder / "popqa_greedy.pt", records)


@kind("joblib", count=7, layers=3, dim=18, ids="truthful_{}", lengths=(6, 9, 8), seed=605, expect_last="id label")
def sklearn_features_joblib(folder, samples):
    """Write a compressed joblib file for scikit-learn: last-token arrays (N, D) by number of layer, and flags."""
    import joblib

    data = {
        "last_token_activations": {n: np.stack([s.hidden[k, -1] for s in samples]) for k, n in enumerate((8, 16, 24))},
        "ids": [s.question_id for s in samples],
        "is_hallucination": np.array([int(not is_right(s)) for s in samples]),
    }
    joblib.dump(data, folder / "features.joblib", compress=3)


@kind(
    count=4, layers=3, dim=10, ids="ex{}", lengths=(6, 9, 5, 7), seed=606, expect="id question answer tokens mean score"
)
def appended_gzip_lists(folder, samples):
    """Write a .pkl.gz of dicts pickled behind each other: nested lists, attention averaged over heads (L, S, S)."""
    records = [
        {
            "question_id": s.question_id,
            "question": s.question,
            "response": s.answer,
            "token_ids": s.tokens.tolist(),
            "hidden_states": s.hidden.tolist(),
            "attention": s.attention.mean(1).tolist(),
            "score": s.score,
        }
        for s in samples
    ]
    dump(folder / "traces.pkl.gz", *records)


@kind("transformers")
def padded_forward_batches(folder):
    """Write one .pt a batch of forward passes with left padding: tuples of (B, S, D) and (B, H, S, S), and the mask."""
    ids = prompts(11, lengths=(7, 12, 9, 8, 10), seed=607)
    for n, start in enumerate((0, 6)):
        batch = ids[start : start + 6]
        input_ids, mask = left_padded(batch)
        output = forward(input_ids, attention_mask=mask)
        names = [f"val-{start + row:04d}" for row in range(len(batch))]
        states = {"hidden_states": output.hidden_states, "attentions": output.attentions}
        data = {"ids": names, "input_ids": input_ids, "attention_mask": mask, **states}
        save_pt(folder / f"batch_{n:03d}.pt", data)
        for row, name in enumerate(names):
            tokens = batch[row][0].tolist()
            yield expect_output(output, row, mask[row].bool().numpy(), question_id=name, tokens=tokens)


@kind("transformers")
def states_folder_with_csv(folder):
    """Write states/ID.pt with the outputs of a forward pass of GPT-2 and token strings, texts and verdicts in a CSV."""
    rows = []
    for i, ids in enumerate(prompts(5, lengths=(6, 9, 7, 10, 8), seed=608)):
        output = forward(ids, "gpt2")
        name, right = f"sciq_{31 + 7 * i}", i in (0, 3)
        words = [f"Ġword{t}" for t in ids[0].tolist()]
        data = {"tokens": words, "hidden_states": output.hidden_states, "attentions": output.attentions}
        save_pt(folder / "states" / f"{name}.pt", data)
        written = {"question": f"What, then, is unit {i}?", "answer": f"Unit {i}, of course"}
        rows.append({"id": name, **written, "correct": right})
        yield expect_output(output, question_id=name, tokens_decoded=words, score=float(right), **written)
    write_table(folder / "answers.csv", rows)


@kind(**FIVE, dim=16, heads=4, ids="ioi_{}", seed=609, expect="id tokens words attention")
def lens_cache_records(folder, samples):
    """Write a .pt list of TransformerLens caches as dicts: resid_post and patterns of each block, and string tokens."""
    records = []
    for s in samples:
        cache = {}
        for k in range(3):
            cache[f"blocks.{k}.attn.hook_pattern"] = tensor(s.attention[k][None])
            cache[f"blocks.{k}.hook_resid_post"] = tensor(s.hidden[k][None])
        tokens = {"tokens": tensor(s.tokens[None]), "str_tokens": s.words}
        records.append({"id": s.question_id, **tokens, "cache": cache})
    save_pt(folder / "ioi_cache.pt", records)


@kind(count=6, layers=4, dim=20, ids="gsm8k-{}", lengths=(8, 11, 7, 9, 10), seed=610, expect="id question answer score")
def padded_npz_with_lengths(folder, samples):
    """Write an .npz with float16 states (N, L, S, D), padded on the right, and lengths, and metadata.csv row by row."""
    hidden, _ = pad([s.hidden for s in samples], axis=1)
    lengths = np.array([s.hidden.shape[1] for s in samples])
    np.savez_compressed(folder / "hidden_states.npz", hidden_states=hidden.astype("f2"), lengths=lengths)
    rows = [{"question_id": s.question_id, **texts(s), "score": s.score} for s in samples]
    write_table(folder / "metadata.csv", rows)


@kind(count=8, layers=5, dim=24, ids="mmlu/{}", lengths=(6, 9, 7), seed=611)
def layer_files_last_token(folder, samples):
    """Write last_token/layer_N.npy (N questions, D) for five layers, and the questions in JSON Lines."""
    (folder / "last_token").mkdir()
    for k, n in enumerate((0, 4, 8, 12, 16)):
        np.save(folder / "last_token" / f"layer_{n}.npy", np.stack([s.hidden[k, -1] for s in samples]))
    rows = [{"id": s.question_id, **texts(s), "correct": is_right(s)} for s in samples]
    write_lines(folder / "questions.jsonl", rows)
    return [s.expect_last("id question answer", score=float(is_right(s))) for s in samples]


@kind(count=5, layers=3, dim=12, ids="squad{}", lengths=(6, 9, 7, 10, 8), seed=612, expect="id question tokens score")
def npz_per_sample_f1(folder, samples):
    """Write npz/sample_N.npz with an array (S, D) a layer and input_ids, and results.csv that names the files."""
    rows = []
    (folder / "npz").mkdir()
    for i, s in enumerate(samples):
        layers = {f"layer_{k}": s.hidden[k] for k in range(3)}
        np.savez(folder / "npz" / f"sample_{i}.npz", input_ids=s.tokens, **layers)
        rows.append({"file": f"sample_{i}.npz", "question_id": s.question_id, "question": s.question, "f1": s.score})
    write_table(folder / "results.csv", rows)


@kind("h5py", count=5, layers=4, dim=16, heads=2, ids="nq-{}", lengths=(6, 9, 7, 11, 8), seed=613)
def question_groups_h5(folder, samples):
    """Write HDF5 with a group a question: states, attention and tokens as data sets, texts and verdict as attributes."""
    import h5py

    with h5py.File(folder / "traces.h5", "w") as file:
        file.attrs["model"] = "Qwen/Qwen2.5-7B-Instruct"
        for s in samples:
            group = file.create_group(s.question_id)
            group.create_dataset("hidden_states", data=s.hidden, compression="gzip")
            group.create_dataset("attentions", data=s.attention.astype("f2"))
            group.create_dataset("input_ids", data=s.tokens)
            group.attrs.update({**texts(s), "correct": is_right(s)})
    return [graded(s, "id question answer tokens attention") for s in samples]


@kind("h5py", count=5, layers=1, dim=22, ids="q-{}", lengths=(6, 9, 7, 11, 8), seed=614, expect="id score")
def one_layer_h5(folder, samples):
    """Write HDF5 with the states of one layer (N, S, D), padded on the left, their mask, ids as strings and scores."""
    import h5py

    hidden, mask = pad([s.hidden[0] for s in samples], side="left")
    with h5py.File(folder / "layer16.hdf5", "w") as file:
        file.create_dataset("hidden_states", data=hidden.astype("f2"))
        file["hidden_states"].attrs["layer"] = 16
        file.create_dataset("attention_mask", data=mask)
        file.create_dataset("question_id", data=[s.question_id for s in samples], dtype=h5py.string_dtype())
        file.create_dataset("scores", data=np.array([s.score for s in samples], "f4"))


@kind("h5py", **OTHER_FIVE, dim=14, ids="fever_{}", seed=615, expect="id question answer label")
def layer_groups_h5(folder, samples):
    """Write HDF5 with a group a layer that holds a data set (S, D) a question, and hallucinations in a CSV."""
    import h5py

    with h5py.File(folder / "activations.h5", "w") as file:
        for k, n in enumerate((4, 8, 12)):
            for s in samples:
                file.create_dataset(f"layer_{n}/{s.question_id}", data=s.hidden[k])
    rows = [{"question_id": s.question_id, **texts(s), "hallucination": int(not is_right(s))} for s in samples]
    write_table(folder / "annotations.csv", rows)


@kind("safetensors", count=5, layers=4, dim=16, ids="cmpl-{}-0", lengths=(6, 9, 7, 11, 8), seed=616)
def vllm_requests_judged(folder, samples):
    """Write the files of vLLM's hidden-state connector, one a request (S, L, D) in bfloat16, and verdicts in a CSV."""
    from safetensors.torch import save_file

    (folder / "hidden_states").mkdir()
    for s in samples:
        states = tensor(s.hidden.transpose(1, 0, 2), "bfloat16")
        path = folder / "hidden_states" / f"{s.question_id}.safetensors"
        save_file({"hidden_states": states, "token_ids": tensor(s.tokens)}, path)
    write_table(folder / "judged.csv", [{"id": s.question_id, "correct": int(is_right(s))} for s in samples])
    return [graded(s, "id tokens", hidden_states=rounded(s.hidden)) for s in samples]


@kind("safetensors", **OTHER_FIVE, dim=12, heads=4, ids="hotpot_{}", seed=617, expect="id question attention label")
def tensors_named_by_question(folder, samples):
    """Write one safetensors file with ID.hidden_states and ID.attention_weights, and labels.json by question."""
    from safetensors.numpy import save_file

    tensors = {}
    for s in samples:
        tensors[f"{s.question_id}.hidden_states"] = s.hidden
        tensors[f"{s.question_id}.attention_weights"] = s.attention
    save_file(tensors, folder / "states.safetensors", metadata={"model": "google/gemma-2-2b-it"})
    labels = {s.question_id: {"question": s.question, "hallucination": not is_right(s)} for s in samples}
    write_json(folder / "labels.json", labels)


@kind("safetensors", **FIVE | NINE, dim=16, ids="xsum-{}", seed=618, expect="id tokens score")
def padded_safetensors_shards(folder, samples):
    """Write two shards of safetensors with a padded tensor (B, S, D) a layer, mask and input_ids, and an index."""
    from safetensors.torch import save_file

    rows = []
    for n, part in enumerate((samples[:4], samples[4:])):
        input_ids, mask = pad([s.tokens for s in part])
        tensors = {"input_ids": tensor(input_ids), "attention_mask": tensor(mask)}
        for k, layer in enumerate((3, 7, 11)):
            tensors[f"layer_{layer}"] = tensor(pad([s.hidden[k] for s in part])[0], "float16")
        name = f"shard_{n:03d}.safetensors"
        save_file(tensors, folder / name)
        rows += [{"id": s.question_id, "shard": name, "row": i, "score": s.score} for i, s in enumerate(part)]
    write_lines(folder / "index.jsonl", rows)


@kind("pandas", "pyarrow", count=5, layers=3, dim=12, ids="drop-{}", lengths=(6, 9, 7, 10, 8), seed=619)
def flattened_parquet(folder, samples):
    """Write Parquet with pandas: states flattened to one list a row with their shape in the next column."""
    import pandas as pd

    rows = [
        {
            "question_id": s.question_id,
            **texts(s),
            "hidden_states": s.hidden.ravel(),
            "hidden_states_shape": list(s.hidden.shape),
            "is_correct": is_right(s),
        }
        for s in samples
    ]
    pd.DataFrame(rows).to_parquet(folder / "results.parquet", index=False)
    return [graded(s, "id question answer") for s in samples]


@kind("datasets", count=5, layers=3, dim=10, ids="arc-{}", lengths=(6, 9, 7, 11, 8), seed=620)
def layer_columns_dataset(folder, samples):
    """Write a data set with save_to_disk: a column (S, D) for each of three layers, input_ids, texts and verdicts."""
    from datasets import Dataset

    rows = []
    for s in samples:
        layers = {f"hidden_states_layer_{n}": s.hidden[k].tolist() for k, n in enumerate((8, 16, 24))}
        row = {"id": s.question_id, **texts(s), "input_ids": s.tokens.tolist(), **layers}
        rows.append(row | {"correctness": int(is_right(s))})
    Dataset.from_list(rows).save_to_disk(folder / "activations")
    return [graded(s, "id question answer tokens") for s in samples]


@kind("pyarrow", count=5, layers=3, dim=8, ids="wiki_{}", lengths=(6, 9, 7, 10, 11), seed=621, expect="id words label")
def long_feather_table(folder, samples):
    """Write a Feather table with a row a question, layer and token position: token, vector and label."""
    import pyarrow as pa
    from pyarrow import feather

    places = [(s, k, j) for s in samples for k in range(3) for j in range(len(s.words))]
    columns = {
        "question_id": [s.question_id for s, _, _ in places],
        "layer": [k for _, k, _ in places],
        "position": [j for _, _, j in places],
        "token": [s.words[j] for s, _, j in places],
        "vector": pa.array([s.hidden[k, j].tolist() for s, k, j in places], pa.list_(pa.float32(), 8)),
        "is_hallucination": [int(not is_right(s)) for s, _, _ in places],
    }
    feather.write_feather(pa.table(columns), folder / "activations.feather")


@kind(count=5, layers=3, dim=16, heads=2, ids="{}", lengths=(6, 9, 7, 10, 8), seed=622)
def generations_with_npy(folder, samples):
    """Write JSON Lines with texts, tokens and paths of two .npy files a question; one answer has no score yet."""
    scores = [s.score for s in samples]
    scores[2] = None
    rows = []
    (folder / "acts").mkdir()
    for i, s in enumerate(samples):
        np.save(folder / "acts" / f"{i}_hidden.npy", s.hidden)
        np.save(folder / "acts" / f"{i}_attn.npy", s.attention.astype("f2"))
        paths = {"hidden_states": f"acts/{i}_hidden.npy", "attention": f"acts/{i}_attn.npy"}
        rows.append({"id": i, **texts(s), "tokens": s.words, "score": scores[i], **paths})
    write_lines(folder / "generations.jsonl", rows)
    return [s.expect("id question answer words attention", score=scores[i]) for i, s in enumerate(samples)]
