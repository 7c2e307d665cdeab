"""Kinds with states from hooks and `generate()`, sampled answers, and tables of labels next to arrays."""

import contextlib
import datetime
import functools
from collections import defaultdict

import numpy as np

from tests.ingest.corpus import registry
from tests.ingest.corpus.samples import (
    dump,
    expect_generated,
    generate,
    pad,
    prompts,
    rounded,
    save_pt,
    tensor,
    tiny_model,
    write_json,
    write_lines,
    write_table,
)

FIVE = {"count": 5, "layers": 3, "dim": 16, "lengths": (6, 9, 7, 8, 10)}
SEVEN = {"count": 7, "layers": 2, "dim": 16, "lengths": (6, 9, 5, 8, 10, 11, 13)}
kind = functools.partial(registry.kind, register=registry.UNSEEN)


@contextlib.contextmanager
def hooks(layers):
    """Collect the outputs (1, S, D) of chosen decoder layers by the name of the module, one list per layer."""
    captured, handles = defaultdict(list), []

    def keep(name, module, inputs, output):
        captured[name].append((output[0] if isinstance(output, tuple) else output).detach().cpu())

    for name in (f"model.layers.{layer}" for layer in layers):
        handles.append(tiny_model("llama").get_submodule(name).register_forward_hook(functools.partial(keep, name)))
    yield captured
    for handle in handles:
        handle.remove()


def correct(sample):
    """Return whether the answer of a sample counts as correct."""
    return sample.score >= 0.5


def texts_of(sample, names="id question answer"):
    """Return id, question and answer of a sample under three names."""
    return dict(zip(names.split(), (sample.question_id, sample.question, sample.answer), strict=True))


@kind("transformers")
def pt_forward_hooks_of_two_layers(folder):
    """Write one .pt of forward hooks: a list of (1, S, D) per module name, with the prompts and labels in order."""
    import torch

    ids = prompts(5, (8, 9, 7, 10, 12), seed=71)
    texts = [f"Who wrote book number {i}?" for i in range(5)]
    labels = [0, 1, 1, 0, 1]
    with hooks([0, 2]) as activations, torch.no_grad():
        for row in ids:
            tiny_model("llama")(input_ids=row)
    data = {"model": "llama-tiny", "activations": dict(activations), "prompts": texts, "is_hallucination": labels}
    save_pt(folder / "activations.pt", data)
    hidden = [np.stack([layer[i][0].numpy() for layer in activations.values()]) for i in range(5)]
    shared = {"question_id": None}
    return [shared | {"hidden_states": hidden[i], "question": texts[i], "label": float(labels[i])} for i in range(5)]


@kind("transformers")
def pkl_gz_hooks_while_generating(folder):
    """Write a compressed pickle by question id: hooks of `generate()`, joined to (S, D) float16 per layer number."""
    import torch

    data = {}
    for i, ids in enumerate(prompts(5, (8, 9, 7, 10, 12), seed=72)):
        with hooks(range(3)) as captured:
            output = generate(ids, new=6, attentions=False, suppress_tokens=[0, 1])
        layers = {k: torch.cat(steps, 1)[0].half().numpy() for k, steps in enumerate(captured.values())}
        shared = {"question": f"When was bridge {i} built?", "prompt_length": ids.shape[1]}
        sequence, answer = output.sequences[0].tolist(), f"In the year 19{i}0."
        row = {"generated_text": answer, "sequences": sequence, "hidden_states": layers, "is_correct": i % 2 == 0}
        data[f"nq_{100 + 7 * i}"] = shared | row | {"finished": datetime.datetime(2025, 3, 1, 12, i)}
        expected = {"tokens": sequence[:-1], "sequence": sequence, "answer": answer, "score": float(i % 2 == 0)}
        hidden = np.stack(list(layers.values())).astype("f4")
        yield {"question_id": f"nq_{100 + 7 * i}", "hidden_states": hidden} | shared | expected
    dump(folder / "generations.pkl.gz", data)


@kind("transformers")
def pt_generated_answers_with_labels(folder):
    """Write a .pt list of dicts with texts, a label, and sequences, hidden states and attentions of `generate()`."""
    rows = []
    for i, ids in enumerate(prompts(5, (8, 9, 7, 10, 12), seed=73)):
        output = generate(ids, new=6, suppress_tokens=[0, 1])
        texts = {"id": f"tqa-{i:04}", "question": f"Which river flows by city {i}?", "answer": f"River {i}."}
        states = {"sequences": output.sequences, "hidden_states": output.hidden_states}
        rows.append(texts | states | {"attentions": output.attentions, "is_hallucination": i in (1, 2)})
        expected = {"question_id": texts["id"], "question": texts["question"], "answer": texts["answer"]}
        yield expect_generated(output, label=float(i in (1, 2)), **expected)
    save_pt(folder / "outputs" / "triviaqa_outputs.pt", rows)


@kind("transformers")
def pkl_five_sampled_sequences_per_question(folder):
    """Write a pickle per question: `generate(num_return_sequences=5)` of GPT-2 with its texts and their labels."""
    for i, ids in enumerate(prompts(3, (8, 9, 7), seed=74)):
        options = {"do_sample": True, "num_return_sequences": 5, "suppress_tokens": [0, 1]}
        output = generate(ids, 6, "gpt2", attentions=False, **options)
        row = {
            "question_id": f"sciq_{31 + i}",
            "question": f"What is element {i}?",
            "responses": [f"It is metal {k}." for k in range(5)],
            "correct": [(i + k) % 3 == 0 for k in range(5)],
            "sequences": output.sequences.numpy(),
            "hidden_states": tuple(tuple(layer.numpy() for layer in step) for step in output.hidden_states),
        }
        dump(folder / f"question_{i}.pkl", row)
        for k in range(5):
            texts = {"question_id": row["question_id"], "question": row["question"], "answer": row["responses"][k]}
            texts |= {"sample": k, "score": float(row["correct"][k])}
            yield expect_generated(output, k, attention=False, **texts)


@kind("joblib", count=4, layers=3, dim=16, ids="coqa_{}", seed=75, expect="id question answer tokens score")
def joblib_answer_tokens_before_layers(folder, samples):
    """Write a compressed joblib list: (T, L, D) float16 of the answer's T tokens, their ids, and ROUGE-L."""
    import joblib

    states = lambda s: s.hidden.transpose(1, 0, 2).astype("f2")  # noqa: E731
    rows = [
        texts_of(s, "qid question generated_answer")
        | {"generated_ids": s.tokens.tolist(), "hidden_states": states(s), "rougeL": s.score}
        for s in samples
    ]
    joblib.dump(rows, folder / "coqa_features.joblib", compress=3)


@kind(count=6, layers=4, dim=16, lengths=(7, 9, 5, 8, 10, 11), seed=76, rows="sampled_answers.pkl.bz2")
def bz2_rows_of_sampled_answers(samples):
    """Write a bz2 pickle with a row per sampled answer: question_id, sample_idx, log-probabilities, list of layers."""
    for i, s in enumerate(samples):
        ids = {"question_id": f"webq-{i // 2}", "sample_idx": i % 2}
        texts = {"question": f"What is fact number {i // 2}?", "answer": s.answer}
        states = {"token_ids": s.tokens, "token_logprobs": -np.abs(s.hidden[0, :, 0]), "hidden_states": [*s.hidden]}
        row = ids | texts | states | {"temperature": 0.7, "correct": correct(s)}
        changes = {"question_id": ids["question_id"], "sample": i % 2, "question": texts["question"]}
        yield row, s.expect("tokens answer", score=float(correct(s)), **changes)


@kind(count=7, layers=3, dim=16, ids="halueval-{}", seed=77, expect_last="id label")
def pt_last_tokens_by_split_with_config(folder, samples):
    """Write one .pt for a probe: train and test with last tokens (N, L, D), ids and a boolean label, and a config."""
    data = {"config": {"model": "mistral-7b", "layers": [8, 16, 24], "seed": 42}}
    for split, part in {"train": samples[:5], "test": samples[5:]}.items():
        data[split] = {
            "ids": [s.question_id for s in part],
            "last_token_states": tensor(np.stack([s.hidden[:, -1] for s in part]), "float16"),
            "hallucinated": tensor(np.array([not correct(s) for s in part])),
        }
    save_pt(folder / "probe_data.pt", data)


@kind(count=5, layers=3, dim=16, lengths=(6, 9, 7, 8, 10), seed=78)
def pt_residual_stream_and_pattern_per_prompt(folder, samples):
    """Write a .pt per prompt with TransformerLens names: resid_post (L, S, D) bfloat16, pattern, str_tokens."""
    for i, s in enumerate(samples):
        states = {"resid_post": tensor(s.hidden, "bfloat16"), "pattern": tensor(s.attention)}
        save_pt(folder / f"prompt_{i:02}.pt", {"prompt": s.question, "str_tokens": s.words, **states})
    return [s.expect("attention words question", hidden_states=rounded(s.hidden), question_id=None) for s in samples]


@kind(**SEVEN, ids="boolq_{}", seed=79)
def pkl_batches_of_chosen_layers_and_results(folder, samples):
    """Write pickles of padded batches (B, L, S, D) of layers 8 and 16 with a mask, and results.csv with labels by id."""
    for number, part in enumerate((samples[:4], samples[4:])):
        hidden, mask = pad([s.hidden for s in part], axis=1)
        inputs = {"input_ids": pad([s.tokens for s in part])[0], "attention_mask": mask}
        batch = {"ids": [s.question_id for s in part], "hidden_states": hidden.astype("f2"), "layers": [8, 16]}
        dump(folder / f"batch_{number:03}.pkl", batch | inputs)
    write_table(folder / "results.csv", [texts_of(s) | {"correct": correct(s)} for s in samples])
    return [s.expect("id tokens question answer", score=float(correct(s))) for s in samples]


@kind(count=12, layers=3, dim=16, ids="mmlu_{}", seed=80)
def npy_last_tokens_of_splits_with_metadata(folder, samples):
    """Write folders of splits: an .npy (N, D) of last tokens per layer, and metadata.csv with a row per question."""
    for split, part in {"train": samples[:7], "test": samples[7:]}.items():
        (folder / split).mkdir()
        for k, layer in enumerate((8, 16, 24)):
            np.save(folder / split / f"last_token_layer{layer:02}.npy", np.stack([s.hidden[k, -1] for s in part]))
        rows = [texts_of(s, "question_id question answer") | {"correct": int(correct(s))} for s in part]
        write_table(folder / split / "metadata.csv", rows)
    return [s.expect_last("id question answer", score=float(correct(s))) for s in samples]


@kind(count=4, layers=3, dim=16, ids="truthfulqa-{}", seed=81, expect="id mean tokens question answer label")
def npz_by_id_with_annotations(folder, samples):
    """Write an .npz per question with head means of attention, and annotations.csv with labels in words."""
    (folder / "activations").mkdir()
    for s in samples:
        states = {"hidden_states": s.hidden.astype("f2"), "attentions": s.attention.mean(1), "input_ids": s.tokens}
        np.savez_compressed(folder / "activations" / f"{s.question_id}.npz", **states)
    label = lambda s: {"annotator": "AB", "label": "correct" if correct(s) else "hallucinated"}  # noqa: E731
    write_table(folder / "annotations.csv", [texts_of(s, "question_id question response") | label(s) for s in samples])


@kind("pandas", **FIVE, ids="squad_{}", seed=82, expect="id question answer score")
def npy_padded_with_sorted_table(folder, samples):
    """Write one padded .npy (N, L, S, D) and a CSV sorted by score, with the row and token count of each question."""
    import pandas as pd

    np.save(folder / "hidden_states.npy", pad([s.hidden for s in samples], axis=1)[0])
    texts = [texts_of(s, "question_id question generated_answer") for s in samples]
    numbers = [{"row": i, "num_tokens": len(s.tokens), "rouge_l": s.score} for i, s in enumerate(samples)]
    table = pd.DataFrame([a | b for a, b in zip(texts, numbers, strict=True)])
    table.sort_values("rouge_l", ascending=False).to_csv(folder / "samples.csv", index=False)


@kind("h5py", count=5, layers=3, dim=16, ids="popqa-{}", lengths=(6, 9, 7, 8, 10), seed=83, expect="id tokens label")
def h5_left_padded_layers_with_labels(folder, samples):
    """Write HDF5 with a left-padded dataset (N, S, D) for each of three layers, mask, token ids, ids and labels."""
    import h5py

    with h5py.File(folder / "popqa_hidden.h5", "w") as file:
        file.attrs["model"] = "meta-llama/Llama-3.1-8B"
        for k, layer in enumerate((4, 12, 28)):
            hidden, mask = pad([s.hidden[k] for s in samples], side="left")
            file.create_dataset(f"layer_{layer}", data=hidden.astype("f2"), compression="gzip")
        file["attention_mask"] = mask
        file["input_ids"] = pad([s.tokens for s in samples], side="left")[0]
        file["question_id"] = [s.question_id for s in samples]
        file["hallucination"] = np.array([not correct(s) for s in samples], "i1")


@kind("h5py", **FIVE, ids="trivia_{}", seed=84, expect="id question answer attention score")
def h5_group_per_sample_with_bleurt(folder, samples):
    """Write HDF5 with a group per sample: states and attention of all heads, texts as attributes, a scalar score."""
    import h5py

    with h5py.File(folder / "traces.hdf5", "w") as file:
        for i, s in enumerate(samples):
            group = file.create_group(f"sample_{i:04}")
            group.attrs.update(texts_of(s))
            group.create_dataset("hidden_states", data=s.hidden, compression="gzip")
            group.create_dataset("attentions", data=s.attention, compression="gzip")
            group["bleurt"] = s.score


@kind("h5py", count=20, layers=3, dim=16, seed=85)
def h5_last_tokens_of_sampled_answers(folder, samples):
    """Write HDF5 of K sampled answers: last tokens (N, K, L, D), texts and labels (N, K), and N ids and questions."""
    import h5py

    rows = [samples[4 * n : 4 * n + 4] for n in range(5)]
    with h5py.File(folder / "sampled.h5", "w") as file:
        file["last_token_hidden_states"] = np.array([[s.hidden[:, -1] for s in row] for row in rows])
        file["last_token_hidden_states"].attrs["layers"] = [4, 12, 20]
        file["question_ids"] = [f"hotpot_{n}" for n in range(5)]
        file["questions"] = [row[0].question for row in rows]
        file["answers"] = np.array([[s.answer for s in row] for row in rows], dtype=object)
        file["correct"] = np.array([[correct(s) for s in row] for row in rows])
    for n, row in enumerate(rows):
        shared = {"question_id": f"hotpot_{n}", "question": row[0].question}
        yield from [s.expect_last("answer", sample=k, score=float(correct(s)), **shared) for k, s in enumerate(row)]


@kind("safetensors", count=5, layers=4, dim=16, ids="gsm8k_{}", lengths=(6, 9, 7, 8, 10), seed=86)
def st_per_question_with_header_and_labels(folder, samples):
    """Write a safetensors file per question: layer_00 to layer_03 and token ids, texts in the header; labels.csv."""
    from safetensors.torch import save_file

    (folder / "hidden").mkdir()
    for s in samples:
        tensors = {f"layer_{k:02}": tensor(s.hidden[k], "float16") for k in range(4)}
        path, header = folder / "hidden" / f"{s.question_id}.safetensors", texts_of(s, "question_id question answer")
        save_file(tensors | {"token_ids": tensor(s.tokens)}, path, metadata=header)
    write_table(folder / "labels.csv", [{"question_id": s.question_id, "is_correct": correct(s)} for s in samples])
    return [s.expect("id question answer tokens", score=float(correct(s))) for s in samples]


@kind("safetensors", **SEVEN, ids="{}", seed=87, expect="id tokens question")
def st_flat_tokens_of_two_layers_for_autoencoder(folder, samples):
    """Write safetensors shards of all tokens (T, D) of layers 6 and 13 with prompt_ids (T,), and prompts.json."""
    from safetensors.numpy import save_file

    for number, part in enumerate((samples[:4], samples[4:])):
        shard = {f"layer_{n}": np.concatenate([s.hidden[k] for s in part]) for k, n in enumerate((6, 13))}
        shard["token_ids"] = np.concatenate([s.tokens for s in part])
        shard["prompt_ids"] = np.concatenate([np.full(len(s.tokens), int(s.question_id)) for s in part])
        save_file(shard, folder / f"shard_{number}.safetensors")
    write_json(folder / "prompts.json", [{"prompt_id": i, "question": s.question} for i, s in enumerate(samples)])


@kind("safetensors", count=5, layers=3, dim=16, ids="faithdial-{}", lengths=(6, 9, 7, 8, 10), seed=88)
def st_tensor_per_id_with_label_lines(folder, samples):
    """Write one safetensors file with a bfloat16 tensor (L, S, D) under each id, and labels.jsonl with the texts."""
    from safetensors.torch import save_file

    save_file({s.question_id: tensor(s.hidden, "bfloat16") for s in samples}, folder / "activations.safetensors")
    rows = [texts_of(s, "id question response") | {"hallucination": int(not correct(s))} for s in samples]
    write_lines(folder / "labels.jsonl", rows)
    return [s.expect("id question answer label", hidden_states=rounded(s.hidden)) for s in samples]


@kind("datasets", count=5, layers=1, dim=16, ids="56be4db0acb800140050{}", lengths=(6, 9, 7, 8, 10), seed=89)
def datasets_squad_with_last_layer(folder, samples):
    """Write a saved Hugging Face data set of SQuAD columns, the generated answer, exact match and one layer (S, D)."""
    import datasets

    squad = {"title": "France", "context": "Paris is the capital.", "answers": {"text": ["Paris"], "answer_start": [0]}}
    rows = []
    for s in samples:
        states = {"input_ids": s.tokens.tolist(), "hidden_state": s.hidden[0].tolist()}
        rows.append(squad | texts_of(s, "id question generated_answer") | states | {"exact_match": float(correct(s))})
    datasets.Dataset.from_list(rows).save_to_disk(folder / "squad_hidden")
    return [s.expect("id question answer tokens", score=float(correct(s))) for s in samples]


@kind("pandas", "pyarrow", count=12, layers=1, dim=16, seed=90)
def parquet_vector_per_sampled_answer(folder, samples):
    """Write Parquet with a row per sampled answer: question_id, sample_id, texts, last-token vector, label."""
    import pandas as pd

    rows = []
    for i, s in enumerate(samples):
        shared = {"question_id": f"bioasq_{i // 4}", "question": f"What is fact number {i // 4}?"}
        answer = {"sample_id": i % 4, "response": s.answer, "log_likelihood": -1.5 - i}
        rows.append(shared | answer | {"last_token_embedding": s.hidden[0, -1], "correct": correct(s)})
        yield s.expect_last("answer", sample=i % 4, score=float(correct(s)), **shared)
    pd.DataFrame(rows).to_parquet(folder / "samples.parquet")


@kind("pyarrow", count=7, layers=2, dim=16, ids="p{}", lengths=(6, 9, 5, 8, 10, 11, 13), seed=91)
def parquet_shards_of_layers_with_scores(folder, samples):
    """Write Parquet shards with token texts and nested lists of layers 2 and 5, and a CSV of hallucination scores."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for number, part in enumerate((samples[:4], samples[4:])):
        columns = {"prompt_id": [s.question_id for s in part], "tokens": [s.words for s in part]}
        columns |= {f"layer_{n}": [s.hidden[k].tolist() for s in part] for k, n in enumerate((2, 5))}
        pq.write_table(pa.table(columns), folder / f"part-{number:05}.parquet")
    scores = [round(1 - s.score, 2) for s in samples]
    rows = [{"prompt_id": s.question_id, "hallucination_score": x} for s, x in zip(samples, scores, strict=True)]
    write_table(folder / "scores.csv", rows)
    return [s.expect("id words", score=x, direction="hallucination") for s, x in zip(samples, scores, strict=True)]


@kind(count=5, layers=3, dim=16, ids="nq-open-{}", lengths=(6, 9, 7, 8, 10), seed=92)
def jsonl_predictions_with_npy_paths(folder, samples):
    """Write predictions.jsonl with texts, exact match and the paths of .npy files of states and attention."""
    (folder / "features").mkdir()
    rows = []
    for i, s in enumerate(samples):
        paths = {"hidden_states": f"features/{i:04}_hidden.npy", "attention": f"features/{i:04}_attn.npy"}
        np.save(folder / paths["hidden_states"], s.hidden)
        np.save(folder / paths["attention"], s.attention.astype("f2"))
        texts = {"id": s.question_id, "question": s.question, "gold_answers": ["Paris"], "prediction": s.answer}
        rows.append(texts | paths | {"exact_match": int(correct(s))})
    write_lines(folder / "predictions.jsonl", rows)
    return [s.expect("id question answer attention", score=float(correct(s))) for s in samples]
