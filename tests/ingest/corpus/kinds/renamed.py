"""Fields under other names than ours, in containers of every kind."""

import numpy as np

from tests.ingest.corpus.registry import kind
from tests.ingest.corpus.samples import dump, save_pt, tensor, write_lines


def rows_of(samples, names, **more):
    """Return dicts with fields of samples. `names` maps a name in the file to an attribute of Sample."""
    return [{name: getattr(s, attribute) for name, attribute in names.items()} | more for s in samples]


@kind(expect="id attention")
def named_hs_qid(folder, samples):
    """Write hs, qid, attn; pickle."""
    dump(folder / "t.pkl", rows_of(samples, {"qid": "question_id", "hs": "hidden", "attn": "attention"}))


@kind(expect="id question answer")
def named_hidden_id(folder, samples):
    """Write hidden, id, prompt, response; pickle by columns."""
    names = {"id": "question_id", "hidden": "hidden", "prompt": "question", "response": "answer"}
    dump(folder / "t.pkl", {name: [getattr(s, a) for s in samples] for name, a in names.items()})


@kind(expect="id answer")
def named_activations_example_id(folder, samples):
    """Write activations, example_id, completion; .pt."""
    rows = rows_of(samples, {"example_id": "question_id", "completion": "answer"})
    save_pt(folder / "t.pt", [r | {"activations": tensor(s.hidden)} for r, s in zip(rows, samples, strict=True)])


@kind(expect="id attention answer")
def named_attention_weights_uid(folder, samples):
    """Write uid, hidden_state, attention_weights, text of the model under model_answer."""
    names = {"uid": "question_id", "hidden_state": "hidden", "attention_weights": "attention", "model_answer": "answer"}
    dump(folder / "t.pickle", rows_of(samples, names))


@kind(count=2, expect="id question answer")
def named_representations_sample_id(folder, samples):
    """Write representations, sample_id, query, prediction; JSON Lines."""
    names = {"sample_id": "question_id", "query": "question", "prediction": "answer"}
    rows = [r | {"representations": s.hidden.tolist()} for r, s in zip(rows_of(samples, names), samples, strict=True)]
    write_lines(folder / "t.jsonl", rows)


@kind(ids="{}", expect="id question answer attention")
def named_residual_stream(folder, samples):
    """Write residual_stream, idx, instruction, output (a string!), attention_maps; pickle by id."""
    names = {"instruction": "question", "output": "answer", "residual_stream": "hidden", "attention_maps": "attention"}
    rows = rows_of(samples, names)
    dump(folder / "t.p", [{"idx": i} | r for i, r in enumerate(rows)])


@kind(expect="id tokens", rows="t.pth")
def named_embeddings_input_ids(s):
    """Write embeddings (lists of layers), input_ids (1, S), question_id; .pth."""
    return {"question_id": s.question_id, "embeddings": list(tensor(s.hidden)), "input_ids": tensor(s.tokens[None])}


@kind(expect="id")
def named_unusually(folder, samples):
    """Write names that nothing suggests: internal_repr, key, reply."""
    dump(folder / "t.pkl", rows_of(samples, {"key": "question_id", "internal_repr": "hidden", "reply": "answer"}))


@kind(count=4, expect="id", rows="t.pkl")
def named_by_letters(s):
    """Write X, n, y: letters of a notebook; y is a label."""
    return {"X": s.hidden, "n": s.question_id, "y": int(s.score < 0.5)}


@kind(count=2, expect="id")
def named_in_french(folder, samples):
    """Write names outside ASCII."""
    dump(folder / "t.pkl", rows_of(samples, {"numéro": "question_id", "états": "hidden", "réponse": "answer"}))


@kind(count=2, expect="id attention", rows="t.json")
def named_in_camel_case(s):
    """Write hiddenStates, questionId, attentionWeights; JSON."""
    return {"questionId": s.question_id, "hiddenStates": s.hidden.tolist(), "attentionWeights": s.attention.tolist()}


@kind(expect="id answer")
def named_in_capitals(folder, samples):
    """Write HIDDEN_STATES, QUESTION_ID, Answer; pickle."""
    dump(
        folder / "t.pkl",
        rows_of(samples, {"QUESTION_ID": "question_id", "HIDDEN_STATES": "hidden", "Answer": "answer"}),
    )


@kind(expect="id question attention", rows="t.pkl")
def named_below_states(s):
    """Write arrays one level down: {"meta": {...}, "states": {"hidden": ..., "attention": ...}}."""
    return {
        "meta": {"question_id": s.question_id, "question": s.question},
        "states": {"hidden": s.hidden, "attention": s.attention},
    }


@kind(expect="id answer tokens")
def named_layer_hidden_states(folder, samples):
    """Write layer_hidden_states, doc_id, generated_text, token_ids; .pkl.bz2 by columns."""
    names = {
        "doc_id": "question_id",
        "layer_hidden_states": "hidden",
        "generated_text": "answer",
        "token_ids": "tokens",
    }
    dump(folder / "t.pkl.bz2", {name: [getattr(s, a) for s in samples] for name, a in names.items()})


@kind(expect="id attention")
def named_all_hidden_states(folder, samples):
    """Write all_hidden_states, all_attentions, prompt_id; .pt per sample."""
    for i, s in enumerate(samples):
        value = {
            "prompt_id": s.question_id,
            "all_hidden_states": tuple(tensor(s.hidden[:, None])),
            "all_attentions": tuple(tensor(s.attention[:, None])),
        }
        save_pt(folder / f"{i}.pt", value)


@kind(count=4, expect_last="")
def named_acts_and_labels(folder, samples):
    """Write acts (N, L, D) last tokens with statement texts; .pkl."""
    acts = np.stack([s.hidden[:, -1] for s in samples])
    dump(folder / "t.pkl", {"acts": acts, "statements": [s.question for s in samples]})


@kind(expect="id answer", rows="t.pkl")
def two_candidates_for_hidden_states(s):
    """Write two arrays that could be the hidden states: of the question and of the answer."""
    return {
        "question_id": s.question_id,
        "question_states": s.hidden[:, :3],
        "answer_states": s.hidden,
        "answer": s.answer,
    }


@kind(ids="10{}", expect="id", rows="t.pkl")
def id_among_other_numbers(s):
    """Write several integers per trace; "item" is the id."""
    return {"item": int(s.question_id), "epoch": 0, "gpu": 1, "hidden_states": s.hidden, "n_tokens": len(s.tokens)}


@kind(expect="id answer", rows="t.pt")
def chat_messages(s):
    """Write the question as a list of chat messages, response as a string; .pt."""
    return {
        "id": s.question_id,
        "messages": [{"role": "user", "content": s.question}],
        "response": s.answer,
        "hidden_states": tensor(s.hidden),
    }
