"""Kinds of published code bases, as students adapt them."""

import functools

import numpy as np

from tests.ingest.corpus import registry
from tests.ingest.corpus.samples import (
    dump,
    forward,
    make_samples,
    open_binary,
    pad,
    prompts,
    save_pt,
    states_of,
    tensor,
    write_json,
    write_lines,
    write_table,
)
from tests.ingest.corpus.unseen_sets.notebooks_and_repositories import correctness, record, wrong

kind = functools.partial(registry.kind, register=registry.UNSEEN)
LAYERS = (8, 16, 24)


def last_tokens(samples):
    """Return the last tokens of samples, (N, L, D) float32."""
    return np.stack([s.hidden[:, -1] for s in samples])


@kind(count=5, layers=4, ids="triviaqa_{}", expect="id question answer tokens score")
def semantic_uncertainty_generations(folder, samples):
    """Write a pickle of semantic uncertainty: most_likely_generation_ids and its states, question_id in a list of one."""
    rows = []
    for s in samples:
        # The DataLoader of a batch of one wraps each id in a list.
        row = {"prompt": tensor(np.arange(11)), "question_id": [s.question_id], "question": s.question}
        row |= {"generated_texts": [f"{s.answer} ({k})" for k in range(10)], "rougeL_to_target": s.score}
        row |= {"most_likely_generation": s.answer, "most_likely_generation_ids": tensor(s.tokens)}
        row["most_likely_generation_hidden_states"] = [tensor(h[None], "float16") for h in s.hidden]
        rows.append(row)
    dump(folder / "sequences" / "run_1b2c3d" / "opt-125m_generations.pkl", rows)


@kind(count=5)
def lm_polygraph_manager(folder, samples):
    """Write UEManager.save of LM-Polygraph: stats as columns, gen_metrics and estimations under (level, name)."""
    stats = {"input_texts": [s.question for s in samples], "target_texts": [f"Reference {i}" for i in range(5)]}
    stats |= {"greedy_texts": [s.answer for s in samples], "greedy_tokens": [s.tokens.tolist() for s in samples]}
    manager = {
        "gen_metrics": {("sequence", "Accuracy"): [correctness(s) for s in samples]},
        "estimations": {("sequence", "MaximumSequenceProbability"): [12.5 - i for i in range(5)]},
        "metrics": {("sequence", "MaximumSequenceProbability", "Accuracy", "prr"): 0.31},
        "stats": stats | {"hidden_states": [s.hidden for s in samples]},
    }
    save_pt(folder / "workdir" / "triviaqa" / "manager_seed1.pt", manager)
    return [s.expect("question answer tokens", score=correctness(s)) for s in samples]


@kind(count=8, layers=4)
def know_more_than_they_show(folder, samples):
    """Write MODEL-answers-DATASET.csv, MODEL-input_output_ids-DATASET.pt and MODEL-hidden_states-DATASET.pt (lists)."""
    base = folder / "output"
    for name, part in (("triviaqa", samples[:5]), ("triviaqa_test", samples[5:])):
        rows = [record(s, "question model_answer", automatic_correctness=int(correctness(s))) for s in part]
        write_table(base / f"mistral-7b-answers-{name}.csv", rows)
        save_pt(base / f"mistral-7b-input_output_ids-{name}.pt", [tensor(s.tokens) for s in part])
        save_pt(base / f"mistral-7b-hidden_states-{name}.pt", [tensor(s.hidden, "float16") for s in part])
    return [s.expect("question answer tokens", score=correctness(s)) for s in samples]


@kind("transformers", count=5, ids="sciq-{}")
def trainer_prediction_output(folder, samples):
    """Write a pickle of Trainer.predict: (logits, states (N, S, D) per layer) and label_ids padded with -100; rows."""
    from transformers.trainer_utils import PredictionOutput

    inputs = prompts(5, lengths=(6, 9, 5, 7, 8))
    outputs = [forward(ids) for ids in inputs]
    states = [states_of(o.hidden_states) for o in outputs]
    # Evaluation with a batch size of one: the Trainer pads when it joins the batches.
    hidden = tuple(pad([s[k] for s in states], fill=-100)[0] for k in range(len(states[0])))
    logits, _ = pad([o.logits[0].numpy() for o in outputs], fill=-100)
    labels, _ = pad([ids[0].numpy() for ids in inputs], fill=-100)
    dump(folder / "predictions.pkl", PredictionOutput((logits, hidden), labels, {"test_loss": 4.17}))
    write_lines(folder / "test.jsonl", [record(s, "id question", is_correct=bool(correctness(s))) for s in samples])
    return [
        s.expect("id question", hidden_states=h, has_embeddings=True, score=correctness(s))
        for s, h in zip(samples, states, strict=True)
    ]


@kind(count=4, ids="dev_{}", expect="id question answer tokens label")
def pt_gz_layer_files_of_a_split(folder, samples):
    """Write dev/layer_8_activations.pt.gz ... (N, S, D), input_ids.pt.gz and attention_mask.pt.gz, dev.jsonl in order."""
    import torch

    tokens, mask = pad([s.tokens for s in samples])
    tensors = {"input_ids": tensor(tokens), "attention_mask": tensor(mask)}
    for k, layer in enumerate(LAYERS):
        tensors[f"layer_{layer}_activations"] = tensor(pad([s.hidden[k] for s in samples])[0], "float16")
    (folder / "activations" / "dev").mkdir(parents=True)
    for name, value in tensors.items():
        with open_binary(folder / "activations" / "dev" / f"{name}.pt.gz") as file:
            torch.save(value, file)
    write_lines(folder / "dev.jsonl", [record(s, "id question response", is_hallucination=wrong(s)) for s in samples])


@kind("joblib", count=12, layers=4, expect_last="id label")
def joblib_train_test_split(folder, samples):
    """Write the result of scikit-learn's split with joblib: X_train (N, L, D), X_test, y_train, y_test, ids_train ..."""
    import joblib

    data = {}
    for split, part in (("train", samples[:7]), ("test", samples[7:])):
        data[f"X_{split}"] = last_tokens(part)
        data[f"y_{split}"] = np.array([wrong(s) for s in part])
        data[f"ids_{split}"] = np.array([s.question_id for s in part])
    joblib.dump(data, folder / "probe_data.joblib", compress=("gzip", 3))


@kind(count=5, layers=4, heads=3)
def lookback_lens_with_states(folder, samples):
    """Write Lookback Lens with states: data_index, lookback_ratio (L, H, A), model_completion; annotations in JSON Lines."""
    rows, notes = [], []
    for i, s in enumerate(samples):
        s.question_id = str(4 * i + 3)
        answer_length = len(s.tokens) - s.prompt_length
        row = {"data_index": 4 * i + 3, "full_input_text": s.question, "model_completion": s.answer}
        row["model_completion_ids"] = tensor(s.tokens[-answer_length:])
        row["lookback_ratio"] = tensor(np.full((4, 3, answer_length), 0.25 + i / 10, "f4"))
        rows.append(row | {"hidden_states": tensor(s.hidden), "attentions": tensor(s.attention)})
        notes.append({"index": 4 * i + 3, "dataset": "nq", "response": s.answer, "is_factual": s.score >= 0.5})
    save_pt(folder / "lookback-ratio-nq-7b.pt", rows)
    write_lines(folder / "anno-nq-7b.jsonl", notes[::-1])
    return [s.expect("id attention answer", score=correctness(s)) for s in samples]


@kind(count=12, layers=4, ids="stmt{}", expect_last="id label")
def elk_hiddens_by_split(folder, samples):
    """Write train_hiddens.pt, a list over layers of (N, D), train_hallucinated.pt and train_ids.json; validation too."""
    for split, part in (("train", samples[:7]), ("validation", samples[7:])):
        hiddens = last_tokens(part).swapaxes(0, 1)
        save_pt(folder / f"{split}_hiddens.pt", [tensor(layer, "float16") for layer in hiddens])
        save_pt(folder / f"{split}_hallucinated.pt", tensor(np.array([s.score < 0.5 for s in part])))
        write_json(folder / f"{split}_ids.json", [s.question_id for s in part])


@kind(count=4, layers=4)
def causal_trace_cases(folder, samples):
    """Write ROME's knowledge_0.npz ... with scores (S, L), input_ids, input_tokens, answer, and added hidden_states."""
    (folder / "cases").mkdir()
    for i, s in enumerate(samples):
        result = {"scores": np.full((len(s.tokens), 4), 0.05 * i, "f4"), "low_score": 0.01 + i / 100}
        result |= {"high_score": 0.8 - i / 100, "input_ids": s.tokens, "input_tokens": s.words, "answer": s.answer}
        result |= {"subject_range": (1, 3), "correct_prediction": s.score >= 0.5, "hidden_states": s.hidden}
        np.savez(folder / "cases" / f"knowledge_{i}.npz", **result)
    return [s.expect("tokens words answer", score=correctness(s)) for s in samples]


@kind("transformers", count=7, layers=4, dim=16, ids="boolq-{}")
def ccs_states_with_layers_last(folder, samples):
    """Write CCS' hidden_states__model_name_... .npy (N, D, L), correct__... .npy, questions in a CSV, the config."""
    from transformers import GPT2Config

    arguments = "model_name_gpt2__dataset_name_boolq__split_validation__all_layers_True__token_idx_-1"
    np.save(folder / f"hidden_states__{arguments}.npy", last_tokens(samples).transpose(0, 2, 1).astype("f2"))
    np.save(folder / f"correct__{arguments}.npy", np.array([int(correctness(s)) for s in samples]))
    write_table(folder / "boolq_validation.csv", [record(s, "question_id question") for s in samples])
    GPT2Config(n_embd=16, n_layer=4, n_head=2).to_json_file(folder / "config.json")
    return [s.expect_last("id question", score=correctness(s)) for s in samples]


@kind(count=4, ids="val-en-{}", expect="id question answer words mean")
def mushroom_lines_and_npz(folder, samples):
    """Write Mu-SHROOM's lines with model_output_tokens, and an npz of states and one of attention by the same ids."""
    rows = []
    for s in samples:
        row = {"id": s.question_id, "lang": "EN", "model_input": s.question, "model_output_text": s.answer}
        row |= {"model_output_tokens": s.words, "model_output_logits": [-1.5] * len(s.words)}
        rows.append(row | {"model_id": "tiiuae/falcon-7b-instruct"})
    write_lines(folder / "mushroom.en-val.v2.jsonl", rows)
    np.savez_compressed(folder / "hidden_states.en-val.npz", **{s.question_id: s.hidden for s in samples})
    np.savez_compressed(folder / "attentions.en-val.npz", **{s.question_id: s.attention.mean(1) for s in samples})


@kind(count=5, ids="{}")
def lm_eval_samples_and_npy(folder, samples):
    """Write samples_nq_open_DATE.jsonl of lm-evaluation-harness, its results, and hidden_states/nq_open/DOC_ID.npy."""
    rows = []
    for i, s in enumerate(samples):
        target = [f"Reference {i}"]
        row = {"doc_id": i, "doc": {"question": s.question, "answer": target}, "target": target}
        row["arguments"] = [[f"Q: {s.question}\nA:", {"until": ["\n"], "do_sample": False}]]
        rows.append(row | {"resps": [[s.answer]], "filtered_resps": [s.answer], "exact_match": correctness(s)})
    write_lines(folder / "gpt2" / "samples_nq_open_2025-03-02T11-20-33.jsonl", rows)
    results = {"nq_open": {"alias": "nq_open", "exact_match,remove_whitespace": 0.6}}
    write_json(folder / "gpt2" / "results_2025-03-02T11-20-33.json", {"results": results, "n-shot": {"nq_open": 5}})
    (folder / "hidden_states" / "nq_open").mkdir(parents=True)
    for s in samples:
        np.save(folder / "hidden_states" / "nq_open" / f"{s.question_id}.npy", s.hidden)
    return [s.expect("id question", score=correctness(s)) for s in samples]


@kind("pandas", "tables", count=7, expect_last="id label")
def pandas_hdf_store(folder, samples):
    """Write df.to_hdf with the keys layer_8, layer_16, layer_24: a row per question id; labels as a Series."""
    import pandas as pd

    ids, path = [s.question_id for s in samples], folder / "activations.h5"
    for k, layer in enumerate(LAYERS):
        pd.DataFrame(last_tokens(samples)[:, k], index=ids).to_hdf(path, key=f"layer_{layer}")
    pd.Series([wrong(s) for s in samples], index=ids).to_hdf(path, key="is_hallucination")


@kind("h5py", count=9, expect_last="question label")
def h5_factoscope_features(folder, samples):
    """Write correct_data.h5 and hallucinated_data.h5: hidden_states (N, L, D), ranks (N, L), topk (N, L, 10), prompts."""
    import h5py

    (folder / "features").mkdir()
    for verdict, name in enumerate(("correct", "hallucinated")):
        part = [s for s in samples if wrong(s) == verdict]
        with h5py.File(folder / "features" / f"{name}_data.h5", "w") as file:
            file.create_dataset("hidden_states", data=last_tokens(part), compression="gzip")
            file["final_output_ranks"] = np.full((len(part), 3), 17)
            file["topk_tokens"] = np.tile(np.arange(10), (len(part), 3, 1))
            file["prompts"] = [s.question for s in part]


@kind("h5py")
def h5_sampled_generations(folder):
    """Write q0/generations/0 ... with hidden_states (L, S, D), token_ids; text and rougeL as attributes of each."""
    import h5py

    with h5py.File(folder / "sampled_answers.hdf5", "w") as file:
        file.attrs["model"] = "llama-2-7b-chat"
        for i in range(2):
            question = file.create_group(f"coqa_{i}")
            question.attrs["question"] = f"Who came number {i}?"
            for k, s in enumerate(make_samples(4, seed=20 + i)):
                group = question.create_group(f"generations/{k}")
                group.create_dataset("hidden_states", data=s.hidden.astype("f2"), compression="lzf")
                group["token_ids"] = s.tokens.astype("i4")
                group.attrs["text"] = s.answer
                group.attrs["rougeL"] = s.score
                changes = {"question_id": f"coqa_{i}", "sample": k, "question": f"Who came number {i}?"}
                yield s.expect("answer tokens score", **changes)


@kind("safetensors", count=5, layers=4, expect="id answer attention tokens")
def st_ragtruth_responses(folder, samples):
    """Write RAGTruth's response.jsonl and source_info.jsonl, and states/RESPONSE_ID.safetensors with heads and tokens."""
    from safetensors.torch import save_file

    responses, sources = [], []
    (folder / "states").mkdir()
    for i, s in enumerate(samples):
        s.question_id, source = str(11800 + 3 * i), str(15590 + i)
        spans = [{"start": 3, "end": 9, "text": s.answer[3:9], "label_type": "Evident Conflict"}] * wrong(s)
        more = {"source_id": source, "model": "llama-2-7b-chat", "temperature": 0.7, "labels": spans, "split": "test"}
        responses.append(record(s, "id response", quality="good", **more))
        sources.append({"source_id": source, "task_type": "QA", "source": "MARCO", "prompt": s.question})
        tensors = {"hidden_states": s.hidden, "attentions": s.attention, "input_ids": s.tokens}
        save_file({k: tensor(v) for k, v in tensors.items()}, folder / "states" / f"{s.question_id}.safetensors")
    write_lines(folder / "response.jsonl", responses)
    write_lines(folder / "source_info.jsonl", sources)


@kind("safetensors", layers=4, ids="fact-{}")
def st_full_residual_stream(folder, samples):
    """Write TransformerLens' blocks.0.hook_resid_pre ... and the last block's hook_resid_post, with attn.hook_pattern."""
    from safetensors.torch import save_file

    for s in samples:
        names = [f"blocks.{k}.hook_resid_pre" for k in range(3)] + ["blocks.2.hook_resid_post"]
        tensors = {name: tensor(h[None]) for name, h in zip(names, s.hidden, strict=True)}
        for k in range(3):
            tensors[f"blocks.{k}.attn.hook_pattern"] = tensor(s.attention[k + 1][None])
        tensors["tokens"] = tensor(s.tokens[None])
        metadata = {"model_name": "gpt2-small", "prompt": s.question}
        save_file(tensors, folder / f"{s.question_id}.safetensors", metadata=metadata)
    return [s.expect("id tokens question", attention=s.attention[1:], has_embeddings=True) for s in samples]


@kind("safetensors")
def st_data_sets_in_one_file(folder):
    """Write cities.layer_8 (N, D) ... and the same of larger_than in one file; cities.csv and larger_than.csv in order."""
    from safetensors.torch import save_file

    tensors = {}
    for name, count, seed in (("cities", 7, 30), ("larger_than", 4, 31)):
        samples = make_samples(count, ids=name + "_{}", seed=seed)
        for k, layer in enumerate(LAYERS):
            tensors[f"{name}.layer_{layer}"] = tensor(last_tokens(samples)[:, k], "float16")
        rows = [record(s, "id question", hallucination=wrong(s)) for s in samples]
        write_table(folder / "datasets" / f"{name}.csv", rows)
        yield from [s.expect_last("id question label") for s in samples]
    save_file(tensors, folder / "last_token_activations.safetensors")


@kind("datasets", "transformers", count=5, ids="tqa-{}")
def arrow_cache_of_map(folder, samples):
    """Write Dataset.map(run_model, cache_file_name="with_states.arrow") of GPT-2: states (L, S, D), mean attention."""
    from datasets import Dataset

    outputs = [forward(ids, "gpt2") for ids in prompts(5, lengths=(6, 9, 5, 7, 8))]
    states = [states_of(o.hidden_states) for o in outputs]
    attention = [np.stack([a[0].mean(0).numpy() for a in o.attentions]) for o in outputs]

    def run_model(row, i):
        return {"hidden_states": states[i].tolist(), "attentions": attention[i].tolist(), "best_answer": row["answer"]}

    data = Dataset.from_list([record(s, "id question answer", is_correct=s.score >= 0.5) for s in samples])
    data.map(run_model, with_indices=True, remove_columns=["answer"], cache_file_name=str(folder / "with_states.arrow"))
    return [
        s.expect("id question answer", hidden_states=h, has_embeddings=True, attention=a, score=correctness(s))
        for s, h, a in zip(samples, states, attention, strict=True)
    ]


@kind("pyarrow", count=7, ids="ex{}", expect_last="id question answer label")
def parquet_nested_fixed_size_lists(folder, samples):
    """Write Parquet as Polars writes its Array type: last_token_acts in fixed-size lists of fixed-size lists (L, D)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    acts = pa.FixedSizeListArray.from_arrays(pa.array(last_tokens(samples).ravel()), 12)
    columns = {"example_id": [s.question_id for s in samples], "prompt": [s.question for s in samples]}
    columns["completion"] = [s.answer for s in samples]
    columns["last_token_acts"] = pa.FixedSizeListArray.from_arrays(acts, 3)
    columns["label_hallucinated"] = [bool(wrong(s)) for s in samples]
    pq.write_table(pa.table(columns), folder / "acts.parquet", compression="zstd")


@kind("pandas", "pyarrow", count=6)
def trl_completions(folder, samples):
    """Write TRL's completions/completions_00010.parquet: step, prompt, completion, accuracy_reward, advantage, states."""
    import pandas as pd

    (folder / "completions").mkdir()
    for step, part in ((10, samples[:4]), (20, samples[4:])):
        rows = []
        for i, s in enumerate(part):
            s.question, s.answer = f"Question {step + i // 2}?", f"Completion {i} of step {step}"
            row = {"step": step, "prompt": s.question, "completion": s.answer, "completion_ids": s.tokens}
            row |= {"accuracy_reward": correctness(s), "advantage": 0.7 * (-1) ** i}
            rows.append(row | {"hidden_states": s.hidden.tolist()})
        pd.DataFrame(rows).to_parquet(folder / "completions" / f"completions_{step:05d}.parquet")
    return [s.expect("question answer tokens", score=correctness(s)) for s in samples]


@kind(count=10, expect_last="id label")
def jsonl_line_per_batch(folder, samples):
    """Write a line per batch, appended in a loop: batch_idx, question_ids, last_token_states (B, L, D), hallucinated."""
    rows = []
    for batch, start in enumerate((0, 4, 8)):
        part = samples[start : start + 4]
        row = {"batch_idx": batch, "question_ids": [s.question_id for s in part]}
        rows.append(row | {"last_token_states": last_tokens(part).tolist(), "hallucinated": [wrong(s) for s in part]})
    write_lines(folder / "extraction_log.jsonl", rows)
