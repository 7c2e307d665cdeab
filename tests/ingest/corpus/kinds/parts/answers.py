"""Kinds with several answers to a question, numbered in names, lists or columns, and with sections of fields."""

import numpy as np

from tests.ingest.corpus.registry import kind
from tests.ingest.corpus.samples import dump, make_samples, pad, save_pt, tensor, write_lines, write_table

QUESTIONS, ANSWERS = 3, 2


def answers(ids="tqa_{}"):
    """Return (question id, number, sample) of each answer."""
    found = []
    for i in range(QUESTIONS):
        samples = make_samples(ANSWERS, layers=4, dim=20, lengths=(8, 11), seed=70 + i)
        found += [(ids.format(i), k, sample) for k, sample in enumerate(samples)]
    return found


def expected(found, fields="tokens answer"):
    """Return the expected traces of answers."""
    return [s.expect(fields, question_id=name, sample=k) for name, k, s in found]


@kind()
def pkl_lists_of_answers_by_id(folder):
    """Write a dict from question id to a list of answers with states and tokens."""
    value = {}
    for name, _, s in answers():
        value.setdefault(name, []).append({"hidden_states": s.hidden, "tokens": s.tokens, "answer": s.answer})
    dump(folder / "sampled.pkl", value)
    return expected(answers())


@kind()
def npz_answers_in_names(folder):
    """Write tqa_0/sample_0/hidden_states and so on in one file."""
    arrays = {}
    for name, k, s in answers():
        arrays[f"{name}/sample_{k}/hidden_states"], arrays[f"{name}/sample_{k}/tokens"] = s.hidden, s.tokens
        arrays[f"{name}/sample_{k}/answer"] = s.answer
    np.savez(folder / "sampled.npz", **arrays)
    return expected(answers())


@kind("torch")
def pt_folder_per_question(folder):
    """Write tqa_0/response_1.pt with a dict without ids."""
    for name, k, s in answers():
        value = {"hidden_states": tensor(s.hidden), "tokens": tensor(s.tokens), "answer": s.answer}
        save_pt(folder / name / f"response_{k}.pt", value)
    return expected(answers())


@kind()
def npy_answers_in_table(folder):
    """Write a file per answer, and samples.csv with file, question_id and sample_idx."""
    rows = []
    for name, k, s in answers():
        np.save(folder / f"{name}_{k}.npy", s.hidden)
        rows.append({"file": f"{name}_{k}.npy", "question_id": name, "sample_idx": k, "answer": s.answer})
    write_table(folder / "samples.csv", rows)
    return expected(answers(), "answer")


@kind()
def jsonl_answers_by_sample_id(folder):
    """Write a line per answer with question_id and sample_id, all first answers before all second ones."""
    rows = [
        {"question_id": name, "sample_id": k, "hidden_states": s.hidden.tolist(), "answer": s.answer}
        for name, k, s in sorted(answers(), key=lambda item: item[1])
    ]
    write_lines(folder / "sampled.jsonl", rows)
    return expected(answers(), "answer")


@kind(count=8, layers=4, dim=16, lengths=(7, 10, 12, 9), expect="id tokens")
def npz_sections(folder, samples):
    """Write inputs/input_ids, inputs/attention_mask, outputs/hidden_states (N, L, S, D) and meta/id."""
    ids, mask = pad([s.tokens for s in samples])
    arrays = {"inputs/input_ids": ids, "inputs/attention_mask": mask}
    arrays["outputs/hidden_states"] = pad([s.hidden for s in samples], axis=1)[0]
    np.savez(folder / "pass.npz", **arrays, **{"meta/id": [s.question_id for s in samples]})


@kind(count=10, layers=4, dim=16, expect_last="id answer")
def npy_ranges_of_rows(folder, samples):
    """Write acts_0_4.npy, acts_4_8.npy, ... with last tokens (4, L, D) of the rows of data.csv."""
    for begin in range(0, 10, 4):
        part = samples[begin : begin + 4]
        np.save(folder / f"acts_{begin}_{begin + len(part)}.npy", np.stack([s.hidden[:, -1] for s in part]))
    write_table(folder / "data.csv", [{"id": s.question_id, "answer": s.answer} for s in samples])


@kind("torch", count=6, layers=4, dim=16, expect="tokens")
def pt_fields_between_names(folder, samples):
    """Write llama-hidden_states-nq.pt and llama-token_ids-nq.pt, lists in one order."""
    save_pt(folder / "llama-hidden_states-nq.pt", [tensor(s.hidden) for s in samples])
    save_pt(folder / "llama-token_ids-nq.pt", [tensor(s.tokens) for s in samples])


@kind(refused=True, count=6, layers=4, dim=16, lengths=(7, 10, 12, 9))
def npz_padded_without_lengths(folder, samples):
    """Write padded states (N, L, S, D) and ids, and nothing that states the padding."""
    hidden = pad([s.hidden for s in samples], axis=1)[0]
    np.savez(folder / "padded.npz", hidden_states=hidden, ids=[s.question_id for s in samples])
    return []
