"""numpy files: npz, and npy with a table or next to each other."""

import numpy as np

from tests.ingest.corpus.registry import kind
from tests.ingest.corpus.samples import pad, pad_attention, write_json, write_lines, write_table


def names_of(samples):
    """Return the ids as an array of strings."""
    return np.array([s.question_id for s in samples])


@kind(expect="id attention tokens")
def npz_per_sample(folder, samples):
    """Write a file per sample: hidden_states, attentions, tokens, question_id as a 0-d string."""
    for s in samples:
        fields = {"hidden_states": s.hidden, "attentions": s.attention, "tokens": s.tokens}
        np.savez(folder / f"{s.question_id}.npz", **fields, question_id=s.question_id)


@kind(expect="tokens")
def npz_layer_arrays(folder, samples):
    """Write a compressed file per sample: layer_0, layer_1, ... (S, D), input_ids."""
    for i, s in enumerate(samples):
        layers = {f"layer_{k}": h.astype("f2") for k, h in enumerate(s.hidden)}
        np.savez_compressed(folder / f"sample_{i:03d}.npz", **layers, input_ids=s.tokens)


@kind(expect="id")
def npz_padded_with_lengths(folder, samples):
    """Write one file: hidden_states (N, L, S, D), lengths, question_ids."""
    hidden, mask = pad([s.hidden for s in samples], axis=1)
    np.savez(folder / "all.npz", hidden_states=hidden, lengths=mask.sum(1), question_ids=names_of(samples))


@kind(expect="id attention")
def npz_padded_with_mask_and_heads(folder, samples):
    """Write one file: hidden_states, attentions (N, L, H, S, S), attention_mask as bool, padded on the left."""
    hidden, mask = pad([s.hidden for s in samples], axis=1, side="left")
    attention = pad_attention([s.attention for s in samples], side="left")
    fields = {"hidden_states": hidden, "attentions": attention, "attention_mask": mask.astype(bool)}
    np.savez_compressed(folder / "batch.npz", ids=names_of(samples), **fields)


@kind(count=4, expect="id")
def npz_flat_with_offsets(folder, samples):
    """Write one file: values (sum of S, L, D), offsets (N + 1,), ids."""
    values = np.concatenate([s.hidden.transpose(1, 0, 2) for s in samples])
    offsets = np.cumsum([0, *[len(s.tokens) for s in samples]])
    np.savez(folder / "ragged.npz", hidden_states=values, offsets=offsets, question_ids=names_of(samples))


@kind(ids="tqa_{}", expect="id")
def npz_array_per_id(folder, samples):
    """Write one file with an array (L, S, D) per question id."""
    np.savez(folder / "by_id.npz", **{s.question_id: s.hidden for s in samples})


@kind(expect="id answer")
def npz_object_array(folder, samples):
    """Write one file with an object array of dicts (allow_pickle=True)."""
    rows = [{"question_id": s.question_id, "hidden_states": s.hidden, "answer": s.answer} for s in samples]
    np.savez(folder / "traces.npz", data=np.array(rows, dtype=object))


@kind(count=5, expect_last="label")
def npz_last_tokens_and_labels(folder, samples):
    """Write hidden_states (N, L, D) of the last token and labels (N,), as a file per data set."""
    last = np.stack([s.hidden[:, -1] for s in samples])
    labels = np.array([int(s.score < 0.5) for s in samples])
    np.savez_compressed(folder / "hidden_states_triviaqa.npz", hidden_states=last, labels=labels)


@kind(count=5, layers=1, ids="{}")
def npz_one_layer_activations(folder, samples):
    """Write activations (N, D) of one layer's last token, labels (1 for truthful), q_indices."""
    truthful = np.array([int(s.score > 0.5) for s in samples])
    acts = np.stack([s.hidden[0, -1] for s in samples])
    np.savez(folder / "llama3.1-8B_layer14.npz", activations=acts, truthful=truthful, q_indices=np.arange(5))
    return [s.expect_last("id", score=float(s.score > 0.5)) for s in samples]


@kind(count=2, expect="words")
def npz_float64_fortran(folder, samples):
    """Write float64 arrays in Fortran order, tokens as strings."""
    for i, s in enumerate(samples):
        hidden = np.asfortranarray(s.hidden.astype("f8"))
        np.savez(folder / f"{i}.npz", hidden_states=hidden, tokens_decoded=np.array(s.words))


@kind(count=6, expect_last="label")
def inference_time_intervention(folder, samples):
    """Write features of ITI: layer-wise (N, L, D), head-wise (N, L, H d) and labels, 1 for true, of last tokens in npy files."""
    last = np.stack([s.hidden[:, -1] for s in samples])
    name = "llama_7B_tqa_mc2"
    np.save(folder / f"{name}_labels.npy", [int(s.score >= 0.5) for s in samples])
    np.save(folder / f"{name}_layer_wise.npy", last)
    np.save(folder / f"{name}_head_wise.npy", last * 2)


@kind(count=5, layers=4, expect_last="score")
def haloscope(folder, samples):
    """Write save_for_eval/..._gene_embeddings_layer_wise.npy (N, L + 1, D) and ml_..._bleurt_score.npy (N,)."""
    path = folder / "save_for_eval" / "tqa_hal_det" / "most_likely_llama2_chat_7B_gene_embeddings_layer_wise.npy"
    path.parent.mkdir(parents=True)
    np.save(path, np.stack([s.hidden[:, -1] for s in samples]))
    np.save(folder / "ml_tqa_bleurt_score.npy", np.array([s.score for s in samples], "f4"))


@kind(expect="id question answer")
def npy_with_jsonl_by_file_name(folder, samples):
    """Write hidden_0.npy, hidden_1.npy and metadata.jsonl that names them, with question, answer and score."""
    rows = []
    for i, s in enumerate(samples):
        np.save(folder / f"hidden_{i}.npy", s.hidden)
        rows.append(
            {"question_id": s.question_id, "question": s.question, "answer": s.answer, "path": f"hidden_{i}.npy"}
        )
    write_lines(folder / "metadata.jsonl", rows)


@kind(count=4, lengths=(7,), expect="id question answer score")
def npy_with_csv_by_row(folder, samples):
    """Write hidden_states.npy (N, L, S, D) of equal lengths and metadata.csv with a row per sample in the same order."""
    np.save(folder / "hidden_states.npy", np.stack([s.hidden for s in samples]))
    rows = [
        {"question_id": s.question_id, "question": s.question, "answer": s.answer, "score": s.score} for s in samples
    ]
    write_table(folder / "metadata.csv", rows)


@kind(count=5, expect_last="id question answer")
def npy_with_jsonl_by_row(folder, samples):
    """Write last_hidden.npy (N, L, D) and samples.jsonl with a line per row."""
    np.save(folder / "last_hidden.npy", np.stack([s.hidden[:, -1] for s in samples]).astype("f2"))
    write_lines(
        folder / "samples.jsonl", [{"id": s.question_id, "prompt": s.question, "response": s.answer} for s in samples]
    )


@kind(expect="id score")
def npy_per_sample_named_by_id(folder, samples):
    """Write q0.npy, q1.npy (L, S, D) and scores.csv by the same ids."""
    for s in samples:
        np.save(folder / f"{s.question_id}.npy", s.hidden)
    write_table(folder / "scores.csv", [{"question_id": s.question_id, "score": s.score} for s in samples])


@kind(expect="id question answer attention tokens")
def npy_folder_per_sample(folder, samples):
    """Write a folder per question id with hidden_states.npy, attentions.npy, tokens.npy and meta.json."""
    for s in samples:
        base = folder / s.question_id
        base.mkdir()
        np.save(base / "hidden_states.npy", s.hidden)
        np.save(base / "attentions.npy", s.attention)
        np.save(base / "tokens.npy", s.tokens)
        write_json(base / "meta.json", {"question_id": s.question_id, "question": s.question, "answer": s.answer})


@kind(expect="id")
def npy_per_layer(folder, samples):
    """Write layer_00.npy ... (N, S, D) padded on the right, lengths.npy, ids.json."""
    hidden, mask = pad([s.hidden for s in samples], axis=1)
    for k in range(3):
        np.save(folder / f"layer_{k:02d}.npy", hidden[:, k])
    np.save(folder / "lengths.npy", mask.sum(1))
    write_json(folder / "ids.json", [s.question_id for s in samples])


@kind(expect="id tokens")
def npy_object_array_of_dicts(folder, samples):
    """Write np.save of a list of dicts: a pickle inside an npy file."""
    rows = [{"question_id": s.question_id, "hidden_states": s.hidden, "tokens": s.tokens} for s in samples]
    np.save(folder / "traces.npy", np.array(rows, dtype=object), allow_pickle=True)


@kind(expect="id")
def npy_dict_in_zero_dimensions(folder, samples):
    """Write np.save of one dict by id (an object array without dimensions)."""
    np.save(folder / "traces.npy", {s.question_id: {"hidden_states": s.hidden} for s in samples}, allow_pickle=True)


@kind(expect="id tokens")
def npy_padded_with_mask_files(folder, samples):
    """Write hidden_states.npy (N, L, S, D), attention_mask.npy, input_ids.npy, question_ids.txt."""
    hidden, mask = pad([s.hidden for s in samples], axis=1)
    np.save(folder / "hidden_states.npy", hidden)
    np.save(folder / "attention_mask.npy", mask)
    np.save(folder / "input_ids.npy", pad([s.tokens for s in samples])[0])
    (folder / "question_ids.txt").write_text("".join(f"{s.question_id}\n" for s in samples))


@kind(refused=True)
def npy_of_mean_pooled_text(folder):
    """Write sentence_embeddings.npy (N, D), averaged over tokens, next to nothing: neither layers nor tokens are left."""
    np.save(folder / "mean_pooled_scores_only.npy", np.array([0.1, 0.4, 0.3]))
    return []
