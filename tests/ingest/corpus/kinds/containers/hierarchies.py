"""Arrays whose names or groups tell trace, field, layer, step and head: npz, safetensors and HDF5."""

import json

import numpy as np

from tests.ingest.corpus.kinds.hdf5 import create, texts
from tests.ingest.corpus.registry import kind


def steps_of(sample):
    """Return (step, states (L, tokens, D)) of the prompt and of each generated token."""
    p = sample.prompt_length
    return [(0, sample.hidden[:, :p])] + [
        (n + 1, sample.hidden[:, p + n : p + n + 1]) for n in range(len(sample.tokens) - p)
    ]


def save_safetensors(path, arrays, metadata=None):
    """Write a .safetensors file."""
    from safetensors.numpy import save_file

    save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, path, metadata)


@kind("h5py", expect="id tokens")
def h5_steps_and_layers(folder, samples):
    """Write step_0/layer_0 ... (1, tokens, D) for one answer per file, the prompt in step 0; tokens next to them."""
    for s in samples:
        with create(folder / f"{s.question_id}.h5") as file:
            for n, states in steps_of(s):
                for k, h in enumerate(states):
                    file[f"step_{n}/layer_{k}"] = h[None]
            file["tokens"] = s.tokens
            file.attrs["question_id"] = s.question_id


@kind("h5py", expect="id question")
def h5_questions_with_steps(folder, samples):
    """Write q0/steps/0/hidden_states (L, 1, tokens, D) with the question as an attribute of the group."""
    with create(folder / "generation.h5") as file:
        for s in samples:
            for n, states in steps_of(s):
                file[f"{s.question_id}/steps/{n}/hidden_states"] = states[:, None]
            file[s.question_id].attrs["question"] = s.question


@kind(expect="id")
def npz_steps_per_question(folder, samples):
    """Write a compressed file with q0_step0_layer0 ... (D,): one vector per step and layer."""
    arrays = {
        f"{s.question_id}_step{j}_layer{k}": s.hidden[k, j]
        for s in samples
        for j in range(len(s.tokens))
        for k in range(3)
    }
    np.savez_compressed(folder / "states.npz", **arrays)


@kind("safetensors", expect="tokens")
def safetensors_steps_of_hidden_states(folder, samples):
    """Write a file per question: hidden_states.step_0.layer_0 ... (1, tokens, D)."""
    for s in samples:
        arrays = {f"hidden_states.step_{n}.layer_{k}": h[None] for n, st in steps_of(s) for k, h in enumerate(st)}
        save_safetensors(folder / f"{s.question_id}.safetensors", arrays | {"input_ids": s.tokens})


@kind("safetensors")
def safetensors_question_layer_output(folder, samples):
    """Write q0.layers.12.output ... of all questions, and q0.token_ids."""
    arrays = {}
    for s in samples:
        arrays |= {f"{s.question_id}.layers.{12 + k}.output": h for k, h in enumerate(s.hidden)}
        arrays[f"{s.question_id}.token_ids"] = s.tokens
    save_safetensors(folder / "dump.safetensors", arrays)
    return [s.expect("id tokens", layers=[12, 13, 14]) for s in samples]


@kind("safetensors", ids="{}", expect="question answer")
def safetensors_metadata_as_json(folder, samples):
    """Write sample.0.layer.0.hidden ... and the questions as JSON in the metadata, by the number of the sample."""
    arrays = {f"sample.{s.question_id}.layer.{k}.hidden": h for s in samples for k, h in enumerate(s.hidden)}
    meta = {s.question_id: {"question": s.question, "answer": s.answer} for s in samples}
    save_safetensors(folder / "traces.safetensors", arrays, {"samples": json.dumps(meta), "format": "pt"})


@kind("safetensors", expect="")
def safetensors_sublayers(folder, samples):
    """Write model.layers.0.self_attn, model.layers.0.mlp and model.layers.0 (the output) of one question per file."""
    for s in samples:
        arrays = {}
        for k, h in enumerate(s.hidden):
            arrays |= {f"model.layers.{k}.self_attn": h * 2, f"model.layers.{k}.mlp": h * 3, f"model.layers.{k}": h}
        save_safetensors(folder / f"{s.question_id}.safetensors", arrays)


@kind("h5py", expect="id attention")
def h5_heads_as_groups(folder, samples):
    """Write q0/hidden/layer_0 and q0/attn/layer_0/head_0 (S, S)."""
    with create(folder / "states.h5") as file:
        for s in samples:
            for k in range(3):
                file[f"{s.question_id}/hidden/layer_{k}"] = s.hidden[k]
                for h in range(2):
                    file[f"{s.question_id}/attn/layer_{k}/head_{h}"] = s.attention[k, h]


@kind("h5py", expect="question answer")
def h5_episodes_below_data(folder, samples):
    """Write data/demo_0/activations (L, S, D) with attributes, and masks of splits as lists of names."""
    with create(folder / "demo.hdf5") as file:
        for i, s in enumerate(samples):
            file[f"data/demo_{i}/activations"] = s.hidden
            group = file[f"data/demo_{i}"]
            group.attrs["question"], group.attrs["answer"] = s.question, s.answer
            group.attrs["num_samples"] = len(s.tokens)
        file["mask/train"] = np.array([b"demo_0", b"demo_1"])
        file["mask/valid"] = np.array([b"demo_2"])


@kind("h5py", count=4, expect="question label")
def h5_models_and_splits(folder, samples):
    """Write llama/train/q0/hidden_states and so on for two splits, chunked and compressed with shuffle."""
    with create(folder / "all.h5") as file:
        for i, s in enumerate(samples):
            group = file.create_group(f"llama/{'train' if i < 3 else 'test'}/{s.question_id}")
            group.create_dataset(
                "hidden_states", data=s.hidden, chunks=(1, 2, 12), compression="gzip", shuffle=True, fletcher32=True
            )
            group.create_dataset("question", data=s.question)
            group.attrs["label"] = int(s.score < 0.5)


@kind("h5py", count=6, expect_last="id label")
def h5_splits_with_stacks(folder, samples):
    """Write train/hidden_states (N, L, D), train/labels, train/ids, and the same of validation and test."""
    with create(folder / "probe.h5") as file:
        for name, part in (("train", samples[:3]), ("validation", samples[3:5]), ("test", samples[5:])):
            file[f"{name}/hidden_states"] = np.stack([s.hidden[:, -1] for s in part])
            file[f"{name}/labels"] = np.array([int(s.score < 0.5) for s in part])
            file[f"{name}/ids"] = texts(s.question_id for s in part)


@kind("h5py", expect="id label question")
def h5_compound_records(folder, samples):
    """Write hidden_states (N, L, S, D) padded, and a compound data set meta: id, length, label, question."""
    from tests.ingest.corpus.samples import pad

    hidden, mask = pad([s.hidden for s in samples], axis=1)
    fields = [("id", "S8"), ("length", "i4"), ("label", "i1"), ("question", "S40")]
    meta = [(s.question_id, m.sum(), int(s.score < 0.5), s.question) for s, m in zip(samples, mask, strict=True)]
    with create(folder / "padded.h5") as file:
        file.create_dataset("hidden_states", data=hidden, compression="lzf")
        file["meta"] = np.array(meta, dtype=fields)


@kind("h5py", expect="id tokens")
def h5_arrays_of_one_layer_by_question(folder, samples):
    """Write hidden_states/layer_0/q0 (S, D) and tokens/q0."""
    with create(folder / "store.h5") as file:
        for s in samples:
            for k, h in enumerate(s.hidden):
                file[f"hidden_states/layer_{k}/{s.question_id}"] = h
            file[f"tokens/{s.question_id}"] = s.tokens


@kind("h5py", expect="id attention answer")
def h5_fields_over_questions(folder, samples):
    """Write hidden_states/q0, attentions/q0 and answers as attributes: the field above the question."""
    with create(folder / "fields.h5") as file:
        for s in samples:
            file[f"hidden_states/{s.question_id}"] = s.hidden
            file[f"attentions/{s.question_id}"] = s.attention
            file[f"answer/{s.question_id}"] = s.answer


@kind(expect="tokens label")
def npz_short_names_of_layers(folder, samples):
    """Write a file per question: h0, h1, h2 (S, D), tok and y."""
    for s in samples:
        np.savez(
            folder / f"{s.question_id}.npz",
            **{f"h{k}": h for k, h in enumerate(s.hidden)},
            token_ids=s.tokens,
            label=int(s.score < 0.5),
        )


@kind(count=5, layers=1, expect_last="id label")
def npz_features_and_targets(folder, samples):
    """Write X (N, D) of one layer's last token, y (1: hallucinated) and ids."""
    np.savez(
        folder / "layer_16.npz",
        X=np.stack([s.hidden[0, -1] for s in samples]),
        label=np.array([int(s.score < 0.5) for s in samples]),
        ids=np.array([s.question_id for s in samples]),
    )


@kind()
def npz_prompt_and_answer(folder, samples):
    """Write prompt_hidden_states (L, P, D), answer_hidden_states (L, A, D), prompt_ids and answer_ids of one question."""
    for s in samples:
        p = s.prompt_length
        np.savez(
            folder / f"{s.question_id}.npz",
            prompt_hidden_states=s.hidden[:, :p],
            answer_hidden_states=s.hidden[:, p:],
            prompt_ids=s.tokens[:p],
            answer_ids=s.tokens[p:],
        )
    return [s.expect("tokens", prompt_length=s.prompt_length) for s in samples]
