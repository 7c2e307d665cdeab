"""Files that belong together: by the id, field or layer that their names and folders state."""

from itertools import pairwise

import numpy as np

from tests.ingest.corpus.registry import kind
from tests.ingest.corpus.samples import dump, save_pt, tensor, write_json, write_lines, write_table


def save(path, array):
    """Write an array in a .npy file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, array)


@kind("torch", expect="id attention tokens")
def pt_folder_per_field(folder, samples):
    """Write hidden/q0.pt, attention/q0.pt and tokens/q0.pt: a folder per field, a file per id."""
    for s in samples:
        save_pt(folder / "hidden" / f"{s.question_id}.pt", tensor(s.hidden))
        save_pt(folder / "attention" / f"{s.question_id}.pt", tensor(s.attention))
        save_pt(folder / "tokens" / f"{s.question_id}.pt", tensor(s.tokens))


@kind(expect="id attention tokens")
def npy_file_per_field_and_id(folder, samples):
    """Write q0_hidden.npy, q0_attn.npy and q0_tokens.npy next to each other."""
    for s in samples:
        save(folder / f"{s.question_id}_hidden.npy", s.hidden)
        save(folder / f"{s.question_id}_attn.npy", s.attention)
        save(folder / f"{s.question_id}_tokens.npy", s.tokens)


@kind("torch", expect="id")
def pt_folder_per_id_file_per_layer(folder, samples):
    """Write q0/layer_00.pt, q0/layer_01.pt, ...: a folder per id, a tensor (1, S, D) per layer."""
    for s in samples:
        for k, layer in enumerate(s.hidden):
            save_pt(folder / s.question_id / f"layer_{k:02}.pt", tensor(layer[None]))


@kind("torch", count=4, expect="id question answer")
def pt_states_by_id_and_metadata_json(folder, samples):
    """Write hidden_states.pt, a dict from id to (L, S, D), and metadata.json, a list of objects with the same ids."""
    save_pt(folder / "hidden_states.pt", {s.question_id: tensor(s.hidden, "float16") for s in samples})
    rows = [{"id": s.question_id, "question": s.question, "answer": s.answer} for s in reversed(samples)]
    write_json(folder / "metadata.json", rows)


@kind("torch", count=4, expect="id question label")
def pt_states_in_order_and_metadata_csv(folder, samples):
    """Write hidden_states.pt, a list of (L, S, D), and metadata.csv with a row per item: id, question, label."""
    save_pt(folder / "hidden_states.pt", [tensor(s.hidden) for s in samples])
    rows = [{"id": s.question_id, "question": s.question, "hallucination": int(s.score < 0.5)} for s in samples]
    write_table(folder / "metadata.csv", rows)


@kind(expect="id attention answer")
def pkl_dict_by_id_per_field(folder, samples):
    """Write hidden_states.pkl, attentions.pkl and answers.pkl: a dict by id in each."""
    dump(folder / "hidden_states.pkl", {s.question_id: list(s.hidden) for s in samples})
    dump(folder / "attentions.pkl", {s.question_id: list(s.attention) for s in samples})
    dump(folder / "answers.pkl", {s.question_id: s.answer for s in samples})


@kind(expect="id attention")
def pkl_list_per_field(folder, samples):
    """Write hidden_states.pkl, attentions.pkl and question_ids.pkl: lists in the same order."""
    dump(folder / "hidden_states.pkl", [s.hidden for s in samples])
    dump(folder / "attentions.pkl", [s.attention for s in samples])
    dump(folder / "question_ids.pkl", [s.question_id for s in samples])


@kind(expect="id")
def pkl_dict_by_id_per_layer(folder, samples):
    """Write layer_0.pkl, layer_1.pkl, ...: in each a dict from id to the states (S, D) of the layer."""
    for k in range(3):
        dump(folder / f"layer_{k}.pkl", {s.question_id: s.hidden[k] for s in samples})


@kind("torch", expect="id")
def pt_folder_per_layer(folder, samples):
    """Write layer_0/q0.pt, layer_1/q0.pt, ...: a folder per layer, a tensor (S, D) per id."""
    for s in samples:
        for k, layer in enumerate(s.hidden):
            save_pt(folder / f"layer_{k}" / f"{s.question_id}.pt", tensor(layer))


@kind(expect="id attention")
def npy_file_per_id_and_layer(folder, samples):
    """Write q0_layer0.npy, q0_layer1.npy, ... and q0_attn_layer0.npy in one folder."""
    for s in samples:
        for k, layer in enumerate(s.hidden):
            save(folder / f"{s.question_id}_layer{k}.npy", layer)
            save(folder / f"{s.question_id}_attn_layer{k}.npy", s.attention[k])


@kind("torch", expect="id attention question answer")
def pt_folder_per_id_with_meta(folder, samples):
    """Write q0/hidden_states.pt, q0/attentions.pt and q0/meta.json with question and answer."""
    for s in samples:
        save_pt(folder / s.question_id / "hidden_states.pt", tuple(map(tensor, s.hidden[:, None])))
        save_pt(folder / s.question_id / "attentions.pt", tuple(map(tensor, s.attention[:, None])))
        write_json(folder / s.question_id / "meta.json", {"question": s.question, "answer": s.answer})


@kind("torch", expect="id attention question answer")
def pt_numbered_files_per_field_and_lines(folder, samples):
    """Write states/hidden_0.pt and states/attn_0.pt, numbered like the lines of answers.jsonl above them."""
    for k, s in enumerate(samples):
        save_pt(folder / "states" / f"hidden_{k}.pt", tensor(s.hidden))
        save_pt(folder / "states" / f"attn_{k}.pt", tensor(s.attention))
    rows = [{"question_id": s.question_id, "question": s.question, "answer": s.answer} for s in samples]
    write_lines(folder / "answers.jsonl", rows)


@kind("torch", expect="id")
def pt_file_per_generated_step(folder, samples):
    """Write q0/step_0.pt, q0/step_1.pt, ...: the layers of one pass of generate() in each, (1, P, D), then (1, 1, D)."""
    for s in samples:
        bounds = [0, *range(s.prompt_length, len(s.tokens) + 1)]
        for k, (begin, end) in enumerate(pairwise(bounds)):
            layers = tuple(tensor(layer[None, begin:end]) for layer in s.hidden)
            save_pt(folder / s.question_id / f"step_{k}.pt", layers)


@kind(expect="id")
def npy_file_per_token(folder, samples):
    """Write q0/token_000.npy, ...: the vectors (L, D) of one token in each."""
    for s in samples:
        for k in range(len(s.tokens)):
            save(folder / s.question_id / f"token_{k:03}.npy", s.hidden[:, k])


@kind("torch", count=4, expect="id tokens")
def pt_shards_per_field(folder, samples):
    """Write shard_0_hidden.pt, shard_0_tokens.pt and shard_0_ids.json: lists of traces in the same order."""
    for k in range(2):
        part = samples[2 * k : 2 * k + 2]
        save_pt(folder / f"shard_{k}_hidden.pt", [tensor(s.hidden) for s in part])
        save_pt(folder / f"shard_{k}_tokens.pt", [tensor(s.tokens) for s in part])
        write_json(folder / f"shard_{k}_ids.json", [s.question_id for s in part])


@kind("torch", expect="id attention question answer")
def pt_dotted_names(folder, samples):
    """Write q0.hidden_states.pt and q0.attentions.pt with q0.json next to them."""
    for s in samples:
        save_pt(folder / f"{s.question_id}.hidden_states.pt", tensor(s.hidden))
        save_pt(folder / f"{s.question_id}.attentions.pt", tensor(s.attention))
        write_json(folder / f"{s.question_id}.json", {"question": s.question, "response": s.answer})


@kind("safetensors", "torch", expect="id attention")
def files_of_two_containers(folder, samples):
    """Write states/q0.safetensors with the layers and attention/q0.npz with the attention of the same ids."""
    from safetensors.numpy import save_file

    (folder / "states").mkdir()
    (folder / "attention").mkdir()
    for s in samples:
        save_file(
            {f"layer_{k}": layer for k, layer in enumerate(s.hidden)},
            folder / "states" / f"{s.question_id}.safetensors",
        )
        np.savez(folder / "attention" / f"{s.question_id}.npz", attentions=s.attention)


@kind()
def npy_prompt_and_response_files(folder, samples):
    """Write q0_prompt_hidden.npy (L, P, D) and q0_response_hidden.npy (L, R, D)."""
    for s in samples:
        save(folder / f"{s.question_id}_prompt_hidden.npy", s.hidden[:, : s.prompt_length])
        save(folder / f"{s.question_id}_response_hidden.npy", s.hidden[:, s.prompt_length :])
    return [s.expect("id", prompt_length=s.prompt_length) for s in samples]


@kind("torch", expect="attention question answer")
def pt_model_folders_of_fields(folder, samples):
    """Write llama/trivia/hidden/0.pt and llama/trivia/attn/0.pt, and llama/trivia/index.csv by file number."""
    base = folder / "llama" / "trivia"
    for k, s in enumerate(samples):
        save_pt(base / "hidden" / f"{k}.pt", [tensor(layer) for layer in s.hidden])
        save_pt(base / "attn" / f"{k}.pt", [tensor(layer) for layer in s.attention])
    write_table(
        base / "index.csv", [{"idx": k, "question": s.question, "answer": s.answer} for k, s in enumerate(samples)]
    )
