"""Dumps as notebooks write them: other names of masks, ids, texts and scores, and states without a name of their own."""

from types import SimpleNamespace

import numpy as np

from tests.ingest.corpus.kinds.hdf5 import create
from tests.ingest.corpus.registry import kind
from tests.ingest.corpus.samples import (
    dump,
    expect_generated,
    generate,
    pad,
    prompts,
    save_pt,
    tensor,
    write_json,
    write_lines,
)


def wrong(sample):
    """Return 1 if the answer of a sample is a hallucination, else 0."""
    return int(sample.score < 0.5)


@kind("joblib", count=6, layers=1, expect_last="id")
def joblib_of_features_and_targets(folder, samples):
    """Write the dict of a probe: X (N, D), y, ids."""
    import joblib

    value = {"X": np.stack([s.hidden[0, -1] for s in samples]), "y": np.array([wrong(s) for s in samples])}
    joblib.dump(value | {"ids": [s.question_id for s in samples]}, folder / "probe.joblib")


@kind(layers=1, expect="id tokens", rows="outputs.pkl")
def pkl_pooling_outputs(s):
    """Write request outputs of an engine: prompt_token_ids and an object with data (S, D)."""
    return SimpleNamespace(
        request_id=s.question_id,
        prompt_token_ids=s.tokens.tolist(),
        outputs=SimpleNamespace(data=tensor(s.hidden[0])),
        finished=True,
    )


@kind("transformers", rows="generated.pkl")
def pkl_generated_ids_and_steps():
    """Write prompt, generated_text, generated_ids and all_hidden_states of generate()."""
    for i, ids in enumerate(prompts()):
        output = generate(ids, attentions=False)
        texts = {"prompt": f"Q{i}", "generated_text": f"A{i}", "generated_ids": output.sequences[0].tolist()}
        row = texts | {"all_hidden_states": output.hidden_states}
        yield row, expect_generated(output, attention=False, question=f"Q{i}", answer=f"A{i}")


@kind(count=4)
def jsonl_vector_per_layer(folder, samples):
    """Write rows of pandas with emb_layer_8, emb_layer_16 and emb_layer_24: last tokens."""
    rows = [
        {"uid": s.question_id, "correct": not wrong(s)}
        | {f"emb_layer_{layer}": s.hidden[k, -1].tolist() for k, layer in enumerate((8, 16, 24))}
        for s in samples
    ]
    write_lines(folder / "vectors.jsonl", rows)
    return [s.expect_last("id", score=float(not wrong(s))) for s in samples]


@kind(count=5, expect="id label")
def npz_batches_with_mask(folder, samples):
    """Write batch_000.npz ... with hidden (B, L, S, D) padded on the left, mask, qids and labels."""
    for b in range(3):
        part = samples[2 * b : 2 * b + 2]
        hidden, mask = pad([s.hidden for s in part], axis=1, side="left")
        columns = {"qids": [s.question_id for s in part], "labels": [wrong(s) for s in part]}
        np.savez_compressed(folder / f"batch_{b:03d}.npz", hidden=hidden.astype("f2"), mask=mask, **columns)


@kind(count=5)
def npy_with_nested_metrics(folder, samples):
    """Write last_hidden.npy (N, L, D) and records.jsonl in order, with {"eval": {"exact_match": 1.0}}."""
    np.save(folder / "last_hidden.npy", np.stack([s.hidden[:, -1] for s in samples]).astype("f2"))
    rows = [
        {"id": s.question_id, "prompt": s.question, "completion": s.answer, "eval": {"exact_match": 1.0 - wrong(s)}}
        for s in samples
    ]
    write_lines(folder / "records.jsonl", rows)
    return [s.expect_last("id question answer", score=1.0 - wrong(s)) for s in samples]


@kind("h5py", expect="id attention words question answer label")
def h5_hs_and_att_groups(folder, samples):
    """Write examples/q0/hs/layer_00 and att/layer_00, tokens as texts, and attributes of the group."""
    with create(folder / "states.hdf5") as file:
        file.attrs["model"] = "llama"
        for s in samples:
            group = file.create_group(f"examples/{s.question_id}")
            for k in range(3):
                group[f"hs/layer_{k:02d}"] = s.hidden[k]
                group[f"att/layer_{k:02d}"] = s.attention[k]
            group["tokens"] = np.array([word.encode() for word in s.words])
            group.attrs.update(question=s.question, answer=s.answer, hallucinated=wrong(s))


@kind(expect="id label")
def pt_config_layers_then_ids(folder, samples):
    """Write {"config": ..., "hidden": {"layer_12": {"q0": (S, D)}}, "labels": {"q0": 1}}."""
    hidden = {
        f"layer_{layer}": {s.question_id: tensor(s.hidden[k]) for s in samples} for k, layer in enumerate((12, 16, 20))
    }
    config = {"layers": [12, 16, 20], "model": "llama"}
    save_pt(folder / "a.pt", {"config": config, "hidden": hidden, "labels": {s.question_id: wrong(s) for s in samples}})


@kind(expect="id")
def npy_folders_of_prompt_and_answer(folder, samples):
    """Write prompt/q0.npy and answer/q0.npy: the states (L, S, D) of both."""
    for s in samples:
        for name, rows in (("prompt", slice(0, s.prompt_length)), ("answer", slice(s.prompt_length, None))):
            (folder / name).mkdir(exist_ok=True)
            np.save(folder / name / f"{s.question_id}.npy", s.hidden[:, rows])


@kind(expect="id label")
def pt_data_set_object(folder, samples):
    """Write an object with samples (a tensor per trace), labels and ids."""
    columns = {"samples": [tensor(s.hidden) for s in samples], "labels": [wrong(s) for s in samples]}
    save_pt(folder / "dataset.pt", SimpleNamespace(**columns, ids=[s.question_id for s in samples]))


@kind(expect="id tokens words")
def npz_token_major_with_texts(folder, samples):
    """Write an npz per question: activations (S, L, D), token_ids, str_tokens."""
    for s in samples:
        arrays = {"activations": s.hidden.transpose(1, 0, 2), "token_ids": s.tokens, "str_tokens": np.array(s.words)}
        np.savez(folder / f"{s.question_id}.npz", **arrays)


@kind(count=4, expect="id")
def npy_of_all_tokens_with_spans(folder, samples):
    """Write activations.npy (sum of S, L, D) and docs.json with the rows of each document as span: [begin, end]."""
    np.save(folder / "activations.npy", np.concatenate([s.hidden.transpose(1, 0, 2) for s in samples]))
    ends = np.cumsum([0, *(len(s.tokens) for s in samples)]).tolist()
    rows = [{"doc_id": s.question_id, "span": ends[k : k + 2], "text": s.question} for k, s in enumerate(samples)]
    write_json(folder / "docs.json", rows)


@kind(count=5, expect="label")
def npz_numbered_states_and_labels(folder, samples):
    """Write one npz with hidden_0, hidden_1, ... (L, S, D) and labels (N,)."""
    states = {f"hidden_{k}": s.hidden for k, s in enumerate(samples)}
    np.savez(folder / "acts.npz", **states, labels=[wrong(s) for s in samples])


@kind(count=5, expect="label")
def pt_numbered_files_and_list_of_labels(folder, samples):
    """Write hs_000.pt, hs_001.pt, ... and a list of labels in JSON."""
    for k, s in enumerate(samples):
        save_pt(folder / f"hs_{k:03d}.pt", tensor(s.hidden))
    write_json(folder / "labels.json", [wrong(s) for s in samples])


@kind(count=5, expect="id label")
def pt_folder_and_labels_by_id(folder, samples):
    """Write hidden/ID.pt and hallucination_labels.json next to the folder, {id: true or false}."""
    for s in samples:
        save_pt(folder / "hidden" / f"{s.question_id}.pt", tensor(s.hidden))
    write_json(folder / "hallucination_labels.json", {s.question_id: bool(wrong(s)) for s in samples})


@kind("h5py", count=5, expect="id label question")
def h5_arrays_by_id_with_attributes(folder, samples):
    """Write an array (L, S, D) by id, whose attributes are question and label."""
    with create(folder / "acts.h5") as file:
        for s in samples:
            file[s.question_id] = s.hidden
            file[s.question_id].attrs.update(label=wrong(s), question=s.question)


@kind(count=5, expect_last="id label")
def npy_and_columns_in_json(folder, samples):
    """Write last tokens (N, L, D) and a JSON file with settings, a list of ids and a list of labels."""
    np.save(folder / "activations.npy", np.stack([s.hidden[:, -1] for s in samples]).astype("f2"))
    columns = {"ids": [s.question_id for s in samples], "labels": [wrong(s) for s in samples]}
    write_json(folder / "meta.json", {"model": "gpt2", "layers": [1, 2, 3]} | columns)


@kind("h5py", count=5, expect="id attention score")
def h5_padded_with_scores_in_the_plural(folder, samples):
    """Write padded states (N, L, S, D) and attention with attention_mask, ids and scores, one file."""
    longest = max(len(s.tokens) for s in samples)
    states, mask = pad([s.hidden for s in samples], axis=1)
    weights = np.zeros((5, 3, 2, longest, longest), "f4")
    for k, s in enumerate(samples):
        weights[k, :, :, : len(s.tokens), : len(s.tokens)] = s.attention
    with create(folder / "dump.h5") as file:
        file.update(hidden_states=states, attention_mask=mask, attentions=weights)
        file.update(ids=[s.question_id for s in samples], scores=[s.score for s in samples])


@kind(count=5, expect="question label")
def pkl_and_labels_by_question(folder, samples):
    """Write a list of dicts with questions, and labels.csv with questions in another order and words of a judge."""
    dump(folder / "states.pkl", [{"question": s.question, "hidden_states": s.hidden} for s in samples])
    words = [f"{s.question},{'hallucinated' if wrong(s) else 'correct'}" for s in reversed(samples)]
    (folder / "labels.csv").write_text("\n".join(["question,label", *words]))
