"""Kinds that papers on probing and hallucination publish."""

import functools
import json

import numpy as np

from tests.ingest.corpus import registry
from tests.ingest.corpus.samples import (
    dump,
    expect_generated,
    expect_output,
    forward,
    generate,
    left_padded,
    make_samples,
    pad,
    pad_attention,
    prompts,
    rounded,
    save_pt,
    tensor,
    write_json,
    write_lines,
    write_table,
)
from tests.ingest.corpus.unseen_sets.notebooks_and_repositories import correctness, record, wrong

kind = functools.partial(registry.kind, register=registry.UNSEEN)


@kind(count=6, layers=4, dim=24)
def pt_lists_with_shared_affixes(folder, samples):
    """Write MODEL-hidden_states-DATASET.pt and MODEL-input_output_ids-DATASET.pt, lists in order, and the answers' CSV."""
    save_pt(folder / "mistral-7b-instruct-hidden_states-triviaqa.pt", [tensor(s.hidden, "float16") for s in samples])
    save_pt(folder / "mistral-7b-instruct-input_output_ids-triviaqa.pt", [tensor(s.tokens) for s in samples])
    verdicts = [{"correct_answer": "Paris", "automatic_correctness": int(correctness(s))} for s in samples]
    rows = [record(s, "question model_answer", **more) for s, more in zip(samples, verdicts, strict=True)]
    write_table(folder / "mistral-7b-instruct-answers-triviaqa.csv", rows)
    return [s.expect("tokens question answer", score=correctness(s)) for s in samples]


@kind("transformers")
def pkl_generate_batches_appended(folder):
    """Write a pickle.dump per left-padded batch of generate(): ids, texts, mask of the prompts, sequences, half arrays."""
    batches = []
    for n, lengths in enumerate([(7, 9, 5), (8, 10)]):
        input_ids, mask = left_padded(prompts(len(lengths), lengths, seed=n))
        output = generate(input_ids, new=6, attentions=False, attention_mask=mask)
        ids = [f"squad-{n}-{row}" for row in range(len(lengths))]
        batch = {"question_ids": ids, "questions": [f"Question of {name}?" for name in ids]}
        batch["generated_text"] = [f"Answer of {name}." for name in ids]
        batch |= {"attention_mask": mask.numpy(), "sequences": output.sequences.numpy()}
        batch["hidden_states"] = [[layer.half().numpy() for layer in step] for step in output.hidden_states]
        batches.append(batch)
        for row, name in enumerate(ids):
            texts = {"question_id": name, "question": f"Question of {name}?", "answer": f"Answer of {name}."}
            skip = int((mask[row] == 0).sum())
            yield expect_generated(output, row, skip, attention=False, **texts)
    dump(folder / "generations.pkl", *batches)


@kind("joblib", count=11, dim=20, ids="halueval_{}", expect_last="id label")
def joblib_splits_of_layer_features(folder, samples):
    """Write features of a probe: {"train": {"X": {8: (N, D), ...}, "hallucinated": (N,), "ids": [...]}, "test": ...}."""
    import joblib

    splits = {}
    for name, part in (("train", samples[:7]), ("test", samples[7:])):
        features = {layer: np.stack([s.hidden[k, -1] for s in part]) for k, layer in enumerate((8, 16, 24))}
        labels = np.array([wrong(s) for s in part])
        splits[name] = {"X": features, "hallucinated": labels, "ids": [s.question_id for s in part]}
    joblib.dump(splits, folder / "probe_features.joblib", compress=("gzip", 3))


@kind("torch")
def pt_answers_with_parallel_labels(folder):
    """Write a file per question: responses, hidden_states (a list of (L, S, D)) and is_correct with an item per answer."""
    for n in range(3):
        answers = make_samples(4, layers=3, dim=16, lengths=(11, 9, 14, 10), seed=20 + n)
        value = {
            "question_id": f"coqa_{n}",
            "question": f"What is fact number {n}?",
            "responses": [s.answer for s in answers],
            "hidden_states": [tensor(s.hidden, "float16") for s in answers],
            "is_correct": [bool(correctness(s)) for s in answers],
        }
        save_pt(folder / "sampled" / f"coqa_{n}.pt", value)
        changes = {"question_id": f"coqa_{n}", "question": f"What is fact number {n}?"}
        yield from [s.expect("answer", score=correctness(s), sample=k, **changes) for k, s in enumerate(answers)]


@kind(count=7, layers=4, dim=24, ids="nq_{}", expect="id mean tokens question label")
def xz_padded_columns_with_head_means(folder, samples):
    """Write .pkl.xz of padded float16 arrays: hidden_states (N, L, S, D), head means (N, L, S, S), mask, ids and labels."""
    hidden, mask = pad([s.hidden for s in samples], axis=1)
    value = {
        "ids": [s.question_id for s in samples],
        "prompts": [s.question for s in samples],
        "hidden_states": hidden.astype("f2"),
        "attentions": pad_attention([s.attention.mean(1) for s in samples]).astype("f2"),
        "attention_mask": mask,
        "input_ids": pad([s.tokens for s in samples])[0],
        "is_hallucination": np.array([wrong(s) for s in samples]),
    }
    dump(folder / "nq_dev_states.pkl.xz", value, protocol=5)


@kind("transformers")
def pkl_sequence_classifier_outputs(folder):
    """Write batches of a judge: uids, right-padded inputs, SequenceClassifierOutputWithPast with states and attentions."""
    import torch
    import transformers as tf

    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    special = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_labels": 3}
    config = tf.LlamaConfig(**sizes, **special, attn_implementation="eager")
    judge = tf.LlamaForSequenceClassification(config).eval()
    batches = []
    for n, lengths in enumerate([(7, 12, 9, 11, 8), (10, 6)]):
        ids, mask = pad([x[0].numpy() for x in prompts(len(lengths), lengths, seed=n)])
        inputs = {"input_ids": tensor(ids), "attention_mask": tensor(mask)}
        with torch.no_grad():
            output = judge(**inputs, output_hidden_states=True, output_attentions=True, use_cache=False)
        uids = [f"claim-{n}-{row}" for row in range(len(lengths))]
        batches.append({"uid": uids, "inputs": inputs, "outputs": output})
        for row, size in enumerate(lengths):
            tokens = ids[row, :size].tolist()
            yield expect_output(output, row, slice(size), question_id=uids[row], tokens=tokens)
    dump(folder / "judge_outputs.pkl", batches)


@kind("torch", count=10, dim=32, ids="sfq_{}")
def pt_chunks_by_row_range(folder, samples):
    """Write hidden_states_0_4.pt, hidden_states_4_8.pt ...: bfloat16 last tokens (4, L, D) of the rows of data.csv."""
    for start in range(0, 10, 4):
        chunk = samples[start : start + 4]
        last = np.stack([s.hidden[:, -1] for s in chunk])
        save_pt(folder / f"hidden_states_{start}_{start + len(chunk)}.pt", tensor(last, "bfloat16"))
    write_table(folder / "data.csv", [record(s, "id question answer", hallucination=wrong(s)) for s in samples])
    return [s.expect_last("id question answer label", last_token=rounded(s.hidden[:, -1])) for s in samples]


@kind("transformers")
def bz2_sampled_outputs_by_question(folder):
    """Write .pkl.bz2 with a dict from question id to the outputs of generate() of several sampled answers."""
    outputs = {}
    for n, ids in enumerate(prompts(3, (7, 10, 8), seed=5)):
        name = f"truthfulqa_{n}"
        outputs[name] = [generate(ids, new=5 + k, do_sample=True, temperature=0.5 + k) for k in range(2)]
        for k, output in enumerate(outputs[name]):
            output.cache = None
            yield expect_generated(output, question_id=name, sample=k)
    dump(folder / "sampled_generations.pkl.bz2", outputs)


@kind(count=5, layers=4, dim=20)
def pkl_gz_by_question_text(folder, samples):
    """Write .pkl.gz with a dict from the text of the question to response, tokens, hidden_states (L, S, D), correct."""
    value = {}
    for s in samples:
        states = {"tokens": s.words, "hidden_states": s.hidden.astype("f2")}
        value[s.question] = {"response": s.answer} | states | {"correct": int(correctness(s))}
    dump(folder / "webq_llama.pkl.gz", value)
    return [s.expect("words answer", question_id=s.question, score=correctness(s)) for s in samples]


@kind()
def npz_data_sets_with_lines(folder):
    """Write triviaqa.npz with activations (N, L, D) and layers, triviaqa.jsonl in the same order, and so for nq."""
    for seed, (name, count) in enumerate((("triviaqa", 7), ("nq", 5))):
        samples = make_samples(count, dim=16, ids=name + "_{}", seed=seed)
        last = np.stack([s.hidden[:, -1] for s in samples])
        np.savez(folder / f"{name}.npz", activations=last.astype("f2"), layers=np.array([10, 20, 30]))
        judged = [{"prediction": s.answer, "correct": bool(correctness(s))} for s in samples]
        rows = [record(s, "qid question", **more) for s, more in zip(samples, judged, strict=True)]
        write_lines(folder / f"{name}.jsonl", rows)
        yield from [s.expect_last("id question answer", score=correctness(s)) for s in samples]


@kind(count=6, layers=4, dim=24, ids="cnn_{}", lengths=(12, 9, 15, 11), expect="id mean question answer score")
def npy_padded_with_lengths_in_table(folder, samples):
    """Write hidden_states.npy (N, L, S, D), attentions.npy (N, L, S, S), and samples.csv with num_tokens and a score."""
    np.save(folder / "hidden_states.npy", pad([s.hidden for s in samples], axis=1)[0].astype("f2"))
    np.save(folder / "attentions.npy", pad_attention([s.attention.mean(1) for s in samples]).astype("f2"))
    rows = [record(s, "id question answer", num_tokens=len(s.tokens), bleurt_score=s.score) for s in samples]
    write_table(folder / "samples.csv", rows)


@kind("transformers")
def npz_and_json_per_sample(folder):
    """Write 00000.npz with hidden_states (L + 1, S, D), attentions and input_ids, and 00000.json with texts and label."""
    for n, ids in enumerate(prompts(5, (7, 11, 9, 6, 8), seed=9)):
        output = forward(ids, "gpt2")
        trace = expect_output(output, tokens=ids[0].tolist(), prompt_length=5)
        arrays = {"hidden_states": trace["hidden_states"].astype("f2"), "attentions": trace["attention"].astype("f2")}
        (folder / "samples").mkdir(exist_ok=True)
        np.savez_compressed(folder / "samples" / f"{n:05d}.npz", input_ids=ids[0].numpy(), **arrays)
        texts = {"question_id": f"popqa-{n}", "question": f"Who wrote book {n}?", "answer": f"Author {n}"}
        write_json(folder / "samples" / f"{n:05d}.json", texts | {"prompt_length": 5, "is_hallucination": n % 2 == 1})
        yield trace | texts | {"label": float(n % 2)}


@kind("h5py")
def h5_samples_below_questions(folder):
    """Write tqa_0/sample_0/hidden_states (L, S, D) and token_ids, the question, response and is_correct as attributes."""
    import h5py

    with h5py.File(folder / "generations.h5", "w") as file:
        for n in range(3):
            group = file.create_group(f"tqa_{n}")
            group.attrs["question"] = f"What is fact number {n}?"
            for k, s in enumerate(make_samples(2, layers=4, dim=24, lengths=(8, 11), seed=40 + n)):
                sub = group.create_group(f"sample_{k}")
                sub.create_dataset("hidden_states", data=s.hidden.astype("f2"), compression="gzip")
                sub["token_ids"] = s.tokens
                sub.attrs["response"] = s.answer
                sub.attrs["is_correct"] = bool(correctness(s))
                changes = {"question_id": f"tqa_{n}", "sample": k, "question": f"What is fact number {n}?"}
                yield s.expect("tokens answer", score=correctness(s), **changes)


@kind("h5py", count=6, dim=20, ids="drop_{}", lengths=(10, 14, 9, 12), expect="id question answer label")
def h5_padded_with_json_rows(folder, samples):
    """Write hidden_states (N, S, L, D) padded, attention_mask, and metadata (N,) with a JSON text per row."""
    import h5py

    hidden, mask = pad([s.hidden.swapaxes(0, 1) for s in samples])
    rows = [json.dumps(record(s, "id question answer", is_hallucination=bool(wrong(s)))) for s in samples]
    with h5py.File(folder / "drop_states.hdf5", "w") as file:
        file.create_dataset("hidden_states", data=hidden.astype("f2"), chunks=(1, *hidden.shape[1:]))
        file["attention_mask"] = mask.astype("i1")
        file.create_dataset("metadata", data=rows, dtype=h5py.string_dtype())
        file.attrs["model_name"] = "meta-llama/Llama-3.1-8B-Instruct"


@kind("h5py", count=8, layers=4, dim=16, ids="fever-{}", lengths=(7, 10, 12, 9), expect="id attention tokens label")
def h5_inputs_and_outputs(folder, samples):
    """Write inputs/input_ids, inputs/attention_mask, outputs/hidden_states/layer_0, outputs/attentions/layer_0, meta/id."""
    import h5py

    ids, mask = pad([s.tokens for s in samples], side="left")
    hidden, _ = pad([s.hidden for s in samples], axis=1, side="left")
    attention = pad_attention([s.attention for s in samples], side="left")
    with h5py.File(folder / "forward_pass.h5", "w") as file:
        file["inputs/input_ids"], file["inputs/attention_mask"] = ids, mask
        for k in range(4):
            file[f"outputs/hidden_states/layer_{k}"] = hidden[:, k]
            file[f"outputs/attentions/layer_{k}"] = attention[:, k].astype("f2")
        file.create_dataset("meta/id", data=[s.question_id for s in samples], dtype=h5py.string_dtype())
        file["meta/hallucinated"] = np.array([bool(wrong(s)) for s in samples])


@kind("safetensors", count=9, layers=4, dim=20, ids="mmlu_{}")
def st_last_token_by_layer_name(folder, samples):
    """Write layers.8.last_token ... (N, D) in one file, and questions.json, a list of objects in the same order."""
    from safetensors.torch import save_file

    tensors = {
        f"layers.{layer}.last_token": tensor(np.stack([s.hidden[k, -1] for s in samples]), "float16")
        for k, layer in enumerate((8, 12, 16, 20))
    }
    save_file(tensors, folder / "activations.safetensors")
    rows = [record(s, "id question model_answer", correct=bool(correctness(s))) for s in samples]
    write_json(folder / "questions.json", rows)
    return [s.expect_last("id question answer", score=correctness(s)) for s in samples]


@kind("safetensors", count=5, dim=24, ids="hotpot_5a8b{}")
def st_array_by_id_with_answers(folder, samples):
    """Write one file with a bfloat16 tensor (L, S, D) per question id, and answers.jsonl in another order."""
    from safetensors.torch import save_file

    save_file({s.question_id: tensor(s.hidden, "bfloat16") for s in samples}, folder / "hidden_states.safetensors")
    rows = [record(s, "id question response", hallucinated=bool(wrong(s))) for s in reversed(samples)]
    write_lines(folder / "answers.jsonl", rows)
    return [s.expect("id question answer label", hidden_states=rounded(s.hidden)) for s in samples]


@kind("safetensors", count=5, layers=3, dim=32, ids="gsm8k-{}", lengths=(14, 10, 17))
def vllm_connector_with_request_table(folder, samples):
    """Write the connector's files by request id, hidden_states (S, L, D), and generations.csv from question to request."""
    from safetensors.torch import save_file

    rows = []
    for n, s in enumerate(samples):
        request = f"cmpl-9f3c{n}e51b7a24d0c"
        tensors = {"hidden_states": tensor(s.hidden.swapaxes(0, 1), "bfloat16"), "token_ids": tensor(s.tokens)}
        (folder / "hidden_states").mkdir(exist_ok=True)
        save_file(tensors, folder / "hidden_states" / f"{request}.safetensors")
        more = {"question_id": s.question_id, "request_id": request, "is_correct": bool(correctness(s))}
        rows.append(record(s, "question answer", **more))
    write_table(folder / "generations.csv", rows)
    changes = [{"score": correctness(s), "hidden_states": rounded(s.hidden)} for s in samples]
    return [s.expect("id tokens question answer", **more) for s, more in zip(samples, changes, strict=True)]


@kind("datasets", count=7, dim=16, lengths=(10,), expect="tokens")
def saelens_cache_per_hook(folder, samples):
    """Write a saved data set of CacheActivationsRunner per hook: activations (context, D) and token_ids, rows aligned."""
    import datasets

    for k, layer in enumerate((4, 6, 8)):
        hook = f"blocks.{layer}.hook_resid_post"
        features = {
            hook: datasets.Array2D(shape=(10, 16), dtype="float32"),
            "token_ids": datasets.Sequence(datasets.Value("int32"), length=10),
        }
        columns = {hook: [s.hidden[k] for s in samples], "token_ids": [s.tokens.tolist() for s in samples]}
        data = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
        data.save_to_disk(folder / hook)


@kind("datasets", count=6, layers=1, dim=20, ids="ragtruth-{}", expect="id tokens question answer label")
def datasets_one_layer_with_structs(folder, samples):
    """Write save_to_disk with id, qa (a struct of texts), input_ids, layer, hidden_states (S, D) and is_hallucination."""
    import datasets

    rows = [
        {
            "id": s.question_id,
            "qa": {"question": s.question, "answer": s.answer},
            "input_ids": s.tokens.tolist(),
            "layer": 16,
            "hidden_states": s.hidden[0].tolist(),
            "is_hallucination": bool(wrong(s)),
        }
        for s in samples
    ]
    datasets.Dataset.from_list(rows).save_to_disk(folder / "ragtruth_layer16")


@kind("pandas", "pyarrow", count=8, dim=16, ids="med-{}", expect_last="id label")
def parquet_wide_features_per_layer(folder, samples):
    """Write layer_08.parquet ... by df.to_parquet: id, feat_0 ... feat_15 of the last token, and hallucinated."""
    import pandas as pd

    for k, layer in enumerate((8, 16, 24)):
        frame = pd.DataFrame(np.stack([s.hidden[k, -1] for s in samples])).add_prefix("feat_")
        frame.insert(0, "id", [s.question_id for s in samples])
        frame["hallucinated"] = [wrong(s) for s in samples]
        frame.to_parquet(folder / f"layer_{layer:02d}.parquet", index=False)


@kind()
def jsonl_line_per_sampled_answer(folder):
    """Write .jsonl.bz2 with question_id, sample_id, prompt, completion, tokens, states, head-averaged attention, correct."""
    rows = []
    for n in range(2):
        for k, s in enumerate(make_samples(3, layers=4, dim=10, lengths=(7, 9, 6), seed=60 + n)):
            row = {"question_id": f"asqa-{n}", "sample_id": k, "prompt": f"Fact {n}?", "completion": s.answer}
            states = {"hidden_states": s.hidden.tolist(), "attention": s.attention.mean(1).tolist()}
            rows.append(row | {"tokens": s.words} | states | {"correct": bool(correctness(s))})
            changes = {"question_id": f"asqa-{n}", "sample": k, "question": f"Fact {n}?"}
            yield s.expect("mean words answer", score=correctness(s), **changes)
    write_lines(folder / "sampled_answers.jsonl.bz2", rows)
