"""Pickles: what one trace looks like inside the file."""

import numpy as np

from tests.ingest.corpus.kinds.pickles import record
from tests.ingest.corpus.registry import kind
from tests.ingest.corpus.samples import dump, make_samples, pad, pad_attention, tensor


@kind()
def layers_with_batch_of_one(folder):
    """Write layers (1, S, D) float64, as output.hidden_states of a single prompt has them."""
    samples = make_samples(3)
    dump(folder / "traces.pkl", [record(s, hidden_states=list(s.hidden[:, None].astype("f8"))) for s in samples])
    return [s.expect("id answer") for s in samples]


@kind()
def heads_with_batch_of_one(folder):
    """Write tuples of layers (1, S, D) and (1, H, S, S), tokens (1, S)."""
    samples = make_samples(3)
    rows = [
        {
            "question_id": s.question_id,
            "hidden_states": tuple(s.hidden[:, None]),
            "attentions": tuple(s.attention[:, None]),
            "input_ids": s.tokens[None],
        }
        for s in samples
    ]
    dump(folder / "traces.pkl", rows)
    return [s.expect("id attention tokens") for s in samples]


@kind()
def stacked_with_batch_of_one(folder):
    """Write a stacked array (1, L, S, D)."""
    samples = make_samples(3, layers=4)
    dump(folder / "traces.pickle", {s.question_id: {"hidden_states": s.hidden[None]} for s in samples})
    return [s.expect("id") for s in samples]


@kind()
def layers_by_number(folder):
    """Write hidden_states as a dict from layer number to an array (S, D)."""
    samples = make_samples(3)
    rows = [record(s, hidden_states=dict(enumerate(s.hidden))) for s in samples]
    dump(folder / "traces.pkl", rows)
    return [s.expect("id answer") for s in samples]


@kind()
def layers_by_chosen_number(folder):
    """Write hidden_states as a dict from chosen layer numbers, not from 0, to tensors (1, S, D)."""
    samples = make_samples(3)
    rows = [
        record(s, hidden_states={n: tensor(h)[None] for n, h in zip((8, 16, 24), s.hidden, strict=True)})
        for s in samples
    ]
    dump(folder / "traces.pkl", rows)
    return [s.expect("id answer", layers=[8, 16, 24]) for s in samples]


@kind()
def layers_as_fields(folder):
    """Write each layer as a field of its own: layer_0, layer_1, ..."""
    samples = make_samples(3)
    rows = [{"id": s.question_id, **{f"layer_{n}": h for n, h in enumerate(s.hidden)}} for s in samples]
    dump(folder / "traces.pkl", rows)
    return [s.expect("id") for s in samples]


@kind()
def layers_by_text(folder):
    """Write hidden_states as a dict with the keys "layer_10", "layer_2": numeric order is not the order of the text."""
    samples = make_samples(2)
    rows = [
        record(s, hidden_states={"layer_10": s.hidden[1], "layer_2": s.hidden[0], "layer_30": s.hidden[2]})
        for s in samples
    ]
    dump(folder / "traces.pkl", rows)
    return [s.expect("id answer", layers=[2, 10, 30]) for s in samples]


@kind()
def chosen_layers_with_ids(folder):
    """Write a stack of three chosen layers, their numbers under "layers"."""
    samples = make_samples(3)
    dump(folder / "traces.pkl", [record(s, hidden_states=s.hidden, layers=[12, 16, 20]) for s in samples])
    return [s.expect("id answer", layers=[12, 16, 20]) for s in samples]


@kind()
def chosen_layers_of_file(folder):
    """Write the numbers of the layers once, next to the list of traces."""
    samples = make_samples(3)
    dump(folder / "t.pkl", {"layer_ids": [0, 15, 31], "traces": [record(s, hidden_states=s.hidden) for s in samples]})
    return [s.expect("id answer", layers=[0, 15, 31]) for s in samples]


@kind()
def one_layer(folder):
    """Write one layer alone: hidden_states (S, D)."""
    samples = make_samples(3, layers=1)
    rows = [record(s, hidden_states=s.hidden[0], layer=14, tokens=s.tokens) for s in samples]
    dump(folder / "layer14.pkl", rows)
    return [s.expect("id answer tokens") for s in samples]


@kind()
def last_token_of_each_layer(folder):
    """Write the last token alone: a list of L vectors (D,)."""
    samples = make_samples(4)
    dump(folder / "last.pkl", [record(s, hidden_states=list(s.hidden[:, -1])) for s in samples])
    return [s.expect_last("id answer") for s in samples]


@kind()
def last_token_stacked(folder):
    """Write the last token alone: (L, D) under "last_token"."""
    samples = make_samples(4)
    dump(folder / "last.pkl", {s.question_id: {"last_token": s.hidden[:, -1], "answer": s.answer} for s in samples})
    return [s.expect_last("id answer") for s in samples]


@kind()
def last_token_with_kept_axis(folder):
    """Write the last token alone with its axis kept: layers (1, 1, D), tensors in bfloat16-safe float32."""
    samples = make_samples(3)
    rows = [record(s, hidden_states=[tensor(h[None, -1:]) for h in s.hidden]) for s in samples]
    dump(folder / "last.p", rows)
    return [s.expect_last("id answer") for s in samples]


@kind()
def semantic_entropy_probes(folder):
    """Write validation_generations.pkl of semantic entropy probes: two chosen tokens as (L, 1, D) below the answer."""
    samples = make_samples(4, ids="tc_{}")
    rows = {}
    for s in samples:
        best = {
            "response": s.answer,
            "token_log_likelihoods": [-0.1, -0.5],
            "embedding": tensor(s.hidden[-1, -1:]),
            "accuracy": s.score,
            "emb_last_tok_before_gen": tensor(s.hidden[:, -1:]),
            "emb_tok_before_eos": tensor(s.hidden[:, -2:-1]),
        }
        responses = [(f"sample {k}", [-0.2], tensor(s.hidden[-1, -1:]), 0.0) for k in range(2)]
        rows[s.question_id] = {
            "question": s.question,
            "context": None,
            "most_likely_answer": best,
            "responses": responses,
            "reference": {"answers": {"text": [s.answer]}, "id": s.question_id},
        }
    dump(folder / "validation_generations.pkl", rows)
    return [s.expect_last("id question") for s in samples]


@kind()
def tokens_first(folder):
    """Write a stack with the tokens as first axis (S, L, D); the number of tokens tells the axes apart."""
    samples = make_samples(3)
    rows = [record(s, hidden_states=s.hidden.transpose(1, 0, 2), tokens=s.tokens, num_layers=3) for s in samples]
    dump(folder / "traces.pkl", rows)
    return [s.expect("id answer tokens") for s in samples]


@kind()
def list_per_token(folder):
    """Write a list over tokens of lists over layers of vectors, as a generation loop appends them."""
    samples = make_samples(3)
    rows = [
        record(s, hidden_states=[list(s.hidden[:, k]) for k in range(len(s.tokens))], token_ids=s.tokens.tolist())
        for s in samples
    ]
    dump(folder / "traces.pkl", rows)
    return [s.expect("id answer tokens") for s in samples]


@kind()
def fortran_and_strided_arrays(folder):
    """Write arrays in Fortran order and views with steps."""
    samples = make_samples(3)
    rows = []
    for s in samples:
        wide = np.repeat(s.hidden, 2, axis=2)
        rows.append(record(s, hidden_states=[np.asfortranarray(wide[0, :, ::2]), *wide[1:, :, ::2]]))
    dump(folder / "traces.pkl", rows, protocol=5)
    return [s.expect("id answer") for s in samples]


@kind()
def big_endian_arrays(folder):
    """Write arrays in big-endian byte order."""
    samples = make_samples(2)
    dump(folder / "traces.pkl", [record(s, hidden_states=list(s.hidden.astype(">f4"))) for s in samples])
    return [s.expect("id answer") for s in samples]


@kind()
def several_answers_per_question(folder):
    """Write three samples per question under one question id, numbered by "sample"."""
    samples = make_samples(6)
    rows = [record(s) | {"question_id": f"q{i // 3}", "sample": i % 3} for i, s in enumerate(samples)]
    dump(folder / "samples.pkl", rows)
    return [s.expect("answer", question_id=f"q{i // 3}", sample=i % 3) for i, s in enumerate(samples)]


@kind()
def answers_nested_per_question(folder):
    """Write a dict per question with a list of generations, each with its own states."""
    samples = make_samples(4)
    rows = [
        {
            "question_id": f"q{i}",
            "question": samples[2 * i].question,
            "generations": [{"text": s.answer, "hidden_states": s.hidden} for s in samples[2 * i : 2 * i + 2]],
        }
        for i in range(2)
    ]
    dump(folder / "generations.pkl", rows)
    return [s.expect("answer", question_id=f"q{i // 2}", sample=i % 2) for i, s in enumerate(samples)]


@kind()
def batch_right_padded(folder):
    """Write a dict per batch: layers (B, S, D) padded on the right, attention_mask, ids; numpy."""
    samples = make_samples(4)
    batches = []
    for part in (samples[:2], samples[2:]):
        hidden, mask = pad([s.hidden for s in part], axis=1)
        batches.append(
            {
                "question_ids": [s.question_id for s in part],
                "hidden_states": list(hidden.transpose(1, 0, 2, 3)),
                "attention_mask": mask,
                "input_ids": pad([s.tokens for s in part])[0],
            }
        )
    dump(folder / "batches.pkl", batches)
    return [s.expect("id tokens") for s in samples]


@kind()
def batch_left_padded_heads(folder):
    """Write layers (B, S, D) and (B, H, S, S) padded on the left, attention_mask; one file."""
    samples = make_samples(3)
    hidden, mask = pad([s.hidden for s in samples], axis=1, side="left")
    attention = pad_attention([s.attention for s in samples], side="left")
    value = {
        "ids": [s.question_id for s in samples],
        "hidden_states": tuple(hidden.transpose(1, 0, 2, 3)),
        "attentions": tuple(attention.transpose(1, 0, 2, 3, 4)),
        "attention_mask": mask,
    }
    dump(folder / "batch.pkl", value)
    return [s.expect("id attention") for s in samples]


@kind()
def batch_with_lengths(folder):
    """Write a stack (B, L, S, D) padded on the right with "lengths"."""
    samples = make_samples(3)
    hidden, mask = pad([s.hidden for s in samples], axis=1)
    value = {"question_id": [s.question_id for s in samples], "hidden_states": hidden, "lengths": mask.sum(1)}
    dump(folder / "batch.pkl", value)
    return [s.expect("id") for s in samples]


@kind()
def batch_of_equal_lengths(folder):
    """Write a stack (B, L, S, D) without a mask: no row has padding. Labels and ids next to it."""
    samples = make_samples(3, lengths=(6,))
    value = {
        "question_ids": [s.question_id for s in samples],
        "hidden_states": np.stack([s.hidden for s in samples]),
        "labels": [int(s.score < 0.5) for s in samples],
    }
    dump(folder / "batch.pkl", value)
    return [s.expect("id label") for s in samples]


@kind()
def optional_fields_present(folder):
    """Write fields of the schema next to the arrays: prompt length, log-probabilities, entropies, temperature, seed."""
    samples = make_samples(3)
    rows = [
        record(
            s,
            prompt_length=s.prompt_length,
            tokens=s.tokens,
            token_logprob=np.linspace(-1, 0, len(s.tokens), dtype="f4"),
            temperature=0.7,
            seed=3,
        )
        for s in samples
    ]
    dump(folder / "traces.pkl", rows)
    return [s.expect("id tokens answer", prompt_length=s.prompt_length) for s in samples]


@kind(refused=True)
def hidden_sizes_differ(folder):
    """Write files of two models of different width, which cannot share a store."""
    dump(folder / "a.pkl", [record(s) for s in make_samples(2, dim=12)])
    dump(folder / "b.pkl", [record(s) for s in make_samples(2, dim=16, ids="r{}")])
    return []
