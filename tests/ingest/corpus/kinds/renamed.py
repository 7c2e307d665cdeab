"""Fields under other names than ours, in containers of every kind."""

import numpy as np

from tests.ingest.corpus.registry import kind
from tests.ingest.corpus.samples import dump, make_samples, save_pt, tensor, write_json, write_lines


def rows_of(samples, names, **more):
    """Return dicts with fields of samples. `names` maps a name in the file to an attribute of Sample."""
    return [{name: getattr(s, attribute) for name, attribute in names.items()} | more for s in samples]


@kind()
def named_hs_qid(folder):
    """Write hs, qid, attn; pickle."""
    samples = make_samples(3)
    dump(folder / "t.pkl", rows_of(samples, {"qid": "question_id", "hs": "hidden", "attn": "attention"}))
    return [s.expect("id attention") for s in samples]


@kind()
def named_hidden_id(folder):
    """Write hidden, id, prompt, response; pickle by columns."""
    samples = make_samples(3)
    names = {"id": "question_id", "hidden": "hidden", "prompt": "question", "response": "answer"}
    dump(folder / "t.pkl", {name: [getattr(s, a) for s in samples] for name, a in names.items()})
    return [s.expect("id question answer") for s in samples]


@kind()
def named_activations_example_id(folder):
    """Write activations, example_id, completion; .pt."""
    samples = make_samples(3)
    rows = rows_of(samples, {"example_id": "question_id", "completion": "answer"})
    save_pt(folder / "t.pt", [r | {"activations": tensor(s.hidden)} for r, s in zip(rows, samples, strict=True)])
    return [s.expect("id answer") for s in samples]


@kind()
def named_attention_weights_uid(folder):
    """Write uid, hidden_state, attention_weights, text of the model under model_answer."""
    samples = make_samples(3)
    names = {"uid": "question_id", "hidden_state": "hidden", "attention_weights": "attention", "model_answer": "answer"}
    dump(folder / "t.pickle", rows_of(samples, names))
    return [s.expect("id attention answer") for s in samples]


@kind()
def named_representations_sample_id(folder):
    """Write representations, sample_id, query, prediction; JSON Lines."""
    samples = make_samples(2)
    names = {"sample_id": "question_id", "query": "question", "prediction": "answer"}
    rows = [r | {"representations": s.hidden.tolist()} for r, s in zip(rows_of(samples, names), samples, strict=True)]
    write_lines(folder / "t.jsonl", rows)
    return [s.expect("id question answer") for s in samples]


@kind()
def named_residual_stream(folder):
    """Write residual_stream, idx, instruction, output (a string!), attention_maps; pickle by id."""
    samples = make_samples(3, ids="{}")
    names = {"instruction": "question", "output": "answer", "residual_stream": "hidden", "attention_maps": "attention"}
    rows = rows_of(samples, names)
    dump(folder / "t.p", [{"idx": i} | r for i, r in enumerate(rows)])
    return [s.expect("id question answer attention") for s in samples]


@kind()
def named_embeddings_input_ids(folder):
    """Write embeddings (lists of layers), input_ids (1, S), question_id; .pth."""
    samples = make_samples(3)
    rows = [
        {"question_id": s.question_id, "embeddings": list(tensor(s.hidden)), "input_ids": tensor(s.tokens[None])}
        for s in samples
    ]
    save_pt(folder / "t.pth", rows)
    return [s.expect("id tokens") for s in samples]


@kind()
def named_unusually(folder):
    """Write names that nothing suggests: internal_repr, key, reply."""
    samples = make_samples(3)
    dump(folder / "t.pkl", rows_of(samples, {"key": "question_id", "internal_repr": "hidden", "reply": "answer"}))
    return [s.expect("id") for s in samples]


@kind()
def named_by_letters(folder):
    """Write X, n, y: letters of a notebook; y is a label."""
    samples = make_samples(4)
    dump(folder / "t.pkl", [{"X": s.hidden, "n": s.question_id, "y": int(s.score < 0.5)} for s in samples])
    return [s.expect("id") for s in samples]


@kind()
def named_in_french(folder):
    """Write names outside ASCII."""
    samples = make_samples(2)
    dump(folder / "t.pkl", rows_of(samples, {"numéro": "question_id", "états": "hidden", "réponse": "answer"}))
    return [s.expect("id") for s in samples]


@kind()
def named_in_camel_case(folder):
    """Write hiddenStates, questionId, attentionWeights; JSON."""
    samples = make_samples(2)
    rows = [
        {"questionId": s.question_id, "hiddenStates": s.hidden.tolist(), "attentionWeights": s.attention.tolist()}
        for s in samples
    ]
    write_json(folder / "t.json", rows)
    return [s.expect("id attention") for s in samples]


@kind()
def named_in_capitals(folder):
    """Write HIDDEN_STATES, QUESTION_ID, Answer; pickle."""
    samples = make_samples(3)
    dump(
        folder / "t.pkl",
        rows_of(samples, {"QUESTION_ID": "question_id", "HIDDEN_STATES": "hidden", "Answer": "answer"}),
    )
    return [s.expect("id answer") for s in samples]


@kind()
def named_below_states(folder):
    """Write arrays one level down: {"meta": {...}, "states": {"hidden": ..., "attention": ...}}."""
    samples = make_samples(3)
    rows = [
        {
            "meta": {"question_id": s.question_id, "question": s.question},
            "states": {"hidden": s.hidden, "attention": s.attention},
        }
        for s in samples
    ]
    dump(folder / "t.pkl", rows)
    return [s.expect("id question attention") for s in samples]


@kind()
def named_layer_hidden_states(folder):
    """Write layer_hidden_states, doc_id, generated_text, token_ids; .pkl.bz2 by columns."""
    samples = make_samples(3)
    names = {
        "doc_id": "question_id",
        "layer_hidden_states": "hidden",
        "generated_text": "answer",
        "token_ids": "tokens",
    }
    dump(folder / "t.pkl.bz2", {name: [getattr(s, a) for s in samples] for name, a in names.items()})
    return [s.expect("id answer tokens") for s in samples]


@kind()
def named_all_hidden_states(folder):
    """Write all_hidden_states, all_attentions, prompt_id; .pt per sample."""
    samples = make_samples(3)
    for i, s in enumerate(samples):
        value = {
            "prompt_id": s.question_id,
            "all_hidden_states": tuple(tensor(s.hidden[:, None])),
            "all_attentions": tuple(tensor(s.attention[:, None])),
        }
        save_pt(folder / f"{i}.pt", value)
    return [s.expect("id attention") for s in samples]


@kind()
def named_acts_and_labels(folder):
    """Write acts (N, L, D) last tokens with statement texts; .pkl."""
    samples = make_samples(4)
    acts = np.stack([s.hidden[:, -1] for s in samples])
    dump(folder / "t.pkl", {"acts": acts, "statements": [s.question for s in samples]})
    return [s.expect_last() for s in samples]


@kind()
def two_candidates_for_hidden_states(folder):
    """Write two arrays that could be the hidden states: of the question and of the answer."""
    samples = make_samples(3)
    rows = [
        {
            "question_id": s.question_id,
            "question_states": s.hidden[:, :3],
            "answer_states": s.hidden,
            "answer": s.answer,
        }
        for s in samples
    ]
    dump(folder / "t.pkl", rows)
    return [s.expect("id answer") for s in samples]


@kind()
def id_among_other_numbers(folder):
    """Write several integers per trace; "item" is the id."""
    samples = make_samples(3, ids="10{}")
    rows = [
        {"item": int(s.question_id), "epoch": 0, "gpu": 1, "hidden_states": s.hidden, "n_tokens": len(s.tokens)}
        for s in samples
    ]
    dump(folder / "t.pkl", rows)
    return [s.expect("id") for s in samples]


@kind()
def chat_messages(folder):
    """Write the question as a list of chat messages, response as a string; .pt."""
    samples = make_samples(3)
    rows = [
        {
            "id": s.question_id,
            "messages": [{"role": "user", "content": s.question}],
            "response": s.answer,
            "hidden_states": tensor(s.hidden),
        }
        for s in samples
    ]
    save_pt(folder / "t.pt", rows)
    return [s.expect("id answer") for s in samples]
