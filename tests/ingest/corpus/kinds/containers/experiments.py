"""Dumps of experiments: splits, classes, passes of hooks, batches, several tables, answers sampled for a question."""

import numpy as np

from tests.ingest.corpus.kinds.containers.notebooks import wrong
from tests.ingest.corpus.kinds.hdf5 import create
from tests.ingest.corpus.registry import kind
from tests.ingest.corpus.samples import (
    dump,
    generate,
    joined_states,
    make_samples,
    pad,
    prompts,
    save_pt,
    tensor,
    write_lines,
    write_table,
)

LAYERS = (8, 16, 24)


@kind(count=5, expect_last="label")
def npy_layers_of_splits(folder, samples):
    """Write train_layer_8.npy (N, D) ..., train_labels.npy, and the same for test."""
    for name, part in (("train", samples[:3]), ("test", samples[3:])):
        for k, layer in enumerate(LAYERS):
            np.save(folder / f"{name}_layer_{layer}.npy", np.stack([s.hidden[k, -1] for s in part]))
        np.save(folder / f"{name}_labels.npy", np.array([wrong(s) for s in part]))


@kind("transformers", rows="hooks.pt")
def hook_passes_of_generation():
    """Write what hooks collect in generate(): {"model.layers.0": [(1, P, D), (1, 1, D), ...]} for each question."""
    for i, ids in enumerate(prompts()):
        output = generate(ids, attentions=False)
        passes = {f"model.layers.{k}": [step[k + 1] for step in output.hidden_states] for k in range(3)}
        row = {"id": f"q{i}", "activations": passes}
        yield row, {"question_id": f"q{i}", "hidden_states": joined_states(output.hidden_states)[1:]}


@kind()
def pkl_states_of_prompt_and_response_nested(folder, samples):
    """Write {"hidden_states": {"prompt": (L, P, D), "response": (L, R, D)}} for each question."""
    rows = []
    for s in samples:
        prompt, response = np.split(s.hidden, [s.prompt_length], axis=1)
        rows.append({"id": s.question_id, "hidden_states": {"prompt": prompt, "response": response}})
    dump(folder / "a.pkl", rows)
    return [s.expect("id", prompt_length=s.prompt_length) for s in samples]


@kind(expect="id attention")
def pkl_layers_of_fields(folder, samples):
    """Write {"q0": {"layer_8": {"hidden": (S, D), "attn": (H, S, S)}}}."""
    value = {
        s.question_id: {f"layer_{n}": {"hidden": s.hidden[k], "attn": s.attention[k]} for k, n in enumerate(LAYERS)}
        for s in samples
    }
    dump(folder / "a.pkl", value)


@kind(count=4)
def pt_files_below_two_tables(folder, samples):
    """Write states/q0.pt ..., generations.jsonl and judge.csv with words, both with ids."""
    for s in samples:
        value = {"hs": tensor(s.hidden), "attn": tensor(s.attention.mean(1))}
        save_pt(folder / "states" / f"{s.question_id}.pt", value)
    rows = [{"id": s.question_id, "question": s.question, "generation": s.answer} for s in samples]
    write_lines(folder / "generations.jsonl", rows)
    words = ["incorrect" if wrong(s) else "correct" for s in samples]
    write_table(
        folder / "judge.csv", [{"id": s.question_id, "verdict": w} for s, w in zip(samples, words, strict=True)]
    )
    return [s.expect("id mean question answer", score=1.0 - wrong(s)) for s in samples]


@kind()
def pkl_most_likely_answer_and_responses(folder):
    """Write validation_generations.pkl of semantic entropy: embeddings of the most likely answer and of sampled ones."""
    value = {}
    for s in make_samples(3):
        last = tensor(s.hidden[:, -1:])
        likely = {"response": s.answer, "token_log_likelihoods": [-0.1, -0.2], "embedding": last}
        value[s.question_id] = {
            "question": s.question,
            "context": None,
            "most_likely_answer": likely | {"accuracy": 1.0 - wrong(s)},
            "responses": [("x", [-0.3], last, 0.0), ("y", [-0.5], last, 1.0)],
        }
        yield from [
            s.expect_last("id question answer", score=1.0 - wrong(s), sample=0),
            s.expect_last("id question", answer="x", sample=1),
            s.expect_last("id question", answer="y", sample=2),
        ]
    dump(folder / "validation_generations.pkl", value)


@kind(count=5, layers=1, expect="id label")
def npz_padded_tokens_of_one_layer(folder, samples):
    """Write hidden_states (N, S, D) of one layer, attention_mask (N, S), labels and question_ids."""
    hidden, mask = pad([s.hidden[0] for s in samples])
    columns = {"labels": [wrong(s) for s in samples], "question_ids": [s.question_id for s in samples]}
    np.savez(folder / "a.npz", hidden_states=hidden, attention_mask=mask, **columns)


@kind(expect="id attention tokens")
def npz_fields_before_ids(folder, samples):
    """Write hidden_states_q0, attentions_q0, input_ids_q0, hidden_states_q1 ... in one npz."""
    arrays = {}
    for s in samples:
        own = {"hidden_states": s.hidden, "attentions": s.attention, "input_ids": s.tokens}
        arrays |= {f"{name}_{s.question_id}": value for name, value in own.items()}
    np.savez(folder / "a.npz", **arrays)


@kind(count=5)
def pt_stack_and_list_of_records(folder, samples):
    """Write {"hidden": (N, L, D), "meta": [N dicts], "layers": [8, 16, 24]}."""
    meta = [{"id": s.question_id, "q": s.question, "correct": not wrong(s)} for s in samples]
    hidden = tensor(np.stack([s.hidden[:, -1] for s in samples]))
    save_pt(folder / "a.pt", {"hidden": hidden, "meta": meta, "layers": list(LAYERS)})
    return [s.expect_last("id", score=1.0 - wrong(s)) for s in samples]


@kind("h5py", count=4, expect="id")
def h5_flat_with_starts_and_ends(folder, samples):
    """Write hidden (sum of S, L, D), starts, ends and ids."""
    ends = np.cumsum([len(s.tokens) for s in samples])
    with create(folder / "a.h5") as file:
        file["hidden"] = np.concatenate([s.hidden.transpose(1, 0, 2) for s in samples])
        file["starts"], file["ends"] = np.concatenate([[0], ends[:-1]]), ends
        file["ids"] = [s.question_id for s in samples]


@kind(count=5, expect="id tokens")
def pt_list_of_batches(folder, samples):
    """Write a list of batches with hidden_states as a tuple of (B, S, D), attention_mask, input_ids and idx; the last has one."""
    rows = []
    for first in (0, 2, 4):
        part = samples[first : first + 2]
        hidden, mask = pad([s.hidden for s in part], axis=1)
        row = {"hidden_states": tuple(map(tensor, hidden.swapaxes(0, 1))), "attention_mask": tensor(mask)}
        row |= {"input_ids": tensor(pad([s.tokens for s in part])[0]), "idx": [s.question_id for s in part]}
        rows.append(row)
    save_pt(folder / "batches.pt", rows)


@kind(count=5, expect="label")
def pkl_lists_by_class(folder, samples):
    """Write {"truthful": [(L, S, D), ...], "hallucinated": [...]}."""
    lists = {
        "truthful": [s.hidden for s in samples if not wrong(s)],
        "hallucinated": [s.hidden for s in samples if wrong(s)],
    }
    dump(folder / "a.pkl", lists)
