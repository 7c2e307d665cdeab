"""Pickles: what one trace looks like inside the file."""

import numpy as np

from tests.ingest.corpus.kinds.pickles import record
from tests.ingest.corpus.registry import kind
from tests.ingest.corpus.samples import dump, make_samples, pad, pad_attention, tensor


@kind(expect="id answer", rows="traces.pkl")
def layers_with_batch_of_one(s):
    """Write layers (1, S, D) float64, as output.hidden_states of a single prompt has them."""
    return record(s, hidden_states=list(s.hidden[:, None].astype("f8")))


@kind(expect="id attention tokens", rows="traces.pkl")
def heads_with_batch_of_one(s):
    """Write tuples of layers (1, S, D) and (1, H, S, S), tokens (1, S)."""
    return {
        "question_id": s.question_id,
        "hidden_states": tuple(s.hidden[:, None]),
        "attentions": tuple(s.attention[:, None]),
        "input_ids": s.tokens[None],
    }


@kind(layers=4, expect="id")
def stacked_with_batch_of_one(folder, samples):
    """Write a stacked array (1, L, S, D)."""
    dump(folder / "traces.pickle", {s.question_id: {"hidden_states": s.hidden[None]} for s in samples})


@kind(expect="id answer", rows="traces.pkl")
def layers_by_number(s):
    """Write hidden_states as a dict from layer number to an array (S, D)."""
    return record(s, hidden_states=dict(enumerate(s.hidden)))


@kind()
def layers_by_chosen_number(folder, samples):
    """Write hidden_states as a dict from chosen layer numbers, not from 0, to tensors (1, S, D)."""
    rows = [
        record(s, hidden_states={n: tensor(h)[None] for n, h in zip((8, 16, 24), s.hidden, strict=True)})
        for s in samples
    ]
    dump(folder / "traces.pkl", rows)
    return [s.expect("id answer", layers=[8, 16, 24]) for s in samples]


@kind(expect="id", rows="traces.pkl")
def layers_as_fields(s):
    """Write each layer as a field of its own: layer_0, layer_1, ..."""
    return {"id": s.question_id, **{f"layer_{n}": h for n, h in enumerate(s.hidden)}}


@kind(count=2)
def layers_by_text(folder, samples):
    """Write hidden_states as a dict with the keys "layer_10", "layer_2": numeric order is not the order of the text."""
    rows = [
        record(s, hidden_states={"layer_10": s.hidden[1], "layer_2": s.hidden[0], "layer_30": s.hidden[2]})
        for s in samples
    ]
    dump(folder / "traces.pkl", rows)
    return [s.expect("id answer", layers=[2, 10, 30]) for s in samples]


@kind()
def chosen_layers_with_ids(folder, samples):
    """Write a stack of three chosen layers, their numbers under "layers"."""
    dump(folder / "traces.pkl", [record(s, hidden_states=s.hidden, layers=[12, 16, 20]) for s in samples])
    return [s.expect("id answer", layers=[12, 16, 20]) for s in samples]


@kind()
def chosen_layers_of_file(folder, samples):
    """Write the numbers of the layers once, next to the list of traces."""
    dump(folder / "t.pkl", {"layer_ids": [0, 15, 31], "traces": [record(s, hidden_states=s.hidden) for s in samples]})
    return [s.expect("id answer", layers=[0, 15, 31]) for s in samples]


@kind(layers=1, expect="id answer tokens", rows="layer14.pkl")
def one_layer(s):
    """Write one layer alone: hidden_states (S, D)."""
    return record(s, hidden_states=s.hidden[0], layer=14, tokens=s.tokens)


@kind(count=4, expect_last="id answer", rows="last.pkl")
def last_token_of_each_layer(s):
    """Write the last token alone: a list of L vectors (D,)."""
    return record(s, hidden_states=list(s.hidden[:, -1]))


@kind(count=4, expect_last="id answer")
def last_token_stacked(folder, samples):
    """Write the last token alone: (L, D) under "last_token"."""
    dump(folder / "last.pkl", {s.question_id: {"last_token": s.hidden[:, -1], "answer": s.answer} for s in samples})


@kind(expect_last="id answer")
def last_token_with_kept_axis(folder, samples):
    """Write the last token alone with its axis kept: layers (1, 1, D), tensors in bfloat16-safe float32."""
    rows = [record(s, hidden_states=[tensor(h[None, -1:]) for h in s.hidden]) for s in samples]
    dump(folder / "last.p", rows)


@kind(count=4, ids="tc_{}", expect_last="id question")
def semantic_entropy_probes(folder, samples):
    """Write validation_generations.pkl of semantic entropy probes: two chosen tokens as (L, 1, D) below the answer."""
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


@kind(expect="id answer tokens", rows="traces.pkl")
def tokens_first(s):
    """Write a stack with the tokens as first axis (S, L, D); the number of tokens tells the axes apart."""
    return record(s, hidden_states=s.hidden.transpose(1, 0, 2), tokens=s.tokens, num_layers=3)


@kind(expect="id answer tokens", rows="traces.pkl")
def list_per_token(s):
    """Write a list over tokens of lists over layers of vectors, as a generation loop appends them."""
    return record(s, hidden_states=[list(s.hidden[:, k]) for k in range(len(s.tokens))], token_ids=s.tokens.tolist())


@kind(expect="id answer")
def fortran_and_strided_arrays(folder, samples):
    """Write arrays in Fortran order and views with steps."""
    rows = []
    for s in samples:
        wide = np.repeat(s.hidden, 2, axis=2)
        rows.append(record(s, hidden_states=[np.asfortranarray(wide[0, :, ::2]), *wide[1:, :, ::2]]))
    dump(folder / "traces.pkl", rows, protocol=5)


@kind(count=2, expect="id answer", rows="traces.pkl")
def big_endian_arrays(s):
    """Write arrays in big-endian byte order."""
    return record(s, hidden_states=list(s.hidden.astype(">f4")))


@kind(count=6)
def several_answers_per_question(folder, samples):
    """Write three samples per question under one question id, numbered by "sample"."""
    rows = [record(s) | {"question_id": f"q{i // 3}", "sample": i % 3} for i, s in enumerate(samples)]
    dump(folder / "samples.pkl", rows)
    return [s.expect("answer", question_id=f"q{i // 3}", sample=i % 3) for i, s in enumerate(samples)]


@kind(count=4)
def answers_nested_per_question(folder, samples):
    """Write a dict per question with a list of generations, each with its own states."""
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


@kind(count=4, expect="id tokens")
def batch_right_padded(folder, samples):
    """Write a dict per batch: layers (B, S, D) padded on the right, attention_mask, ids; numpy."""
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


@kind(expect="id attention")
def batch_left_padded_heads(folder, samples):
    """Write layers (B, S, D) and (B, H, S, S) padded on the left, attention_mask; one file."""
    hidden, mask = pad([s.hidden for s in samples], axis=1, side="left")
    attention = pad_attention([s.attention for s in samples], side="left")
    value = {
        "ids": [s.question_id for s in samples],
        "hidden_states": tuple(hidden.transpose(1, 0, 2, 3)),
        "attentions": tuple(attention.transpose(1, 0, 2, 3, 4)),
        "attention_mask": mask,
    }
    dump(folder / "batch.pkl", value)


@kind(expect="id")
def batch_with_lengths(folder, samples):
    """Write a stack (B, L, S, D) padded on the right with "lengths"."""
    hidden, mask = pad([s.hidden for s in samples], axis=1)
    value = {"question_id": [s.question_id for s in samples], "hidden_states": hidden, "lengths": mask.sum(1)}
    dump(folder / "batch.pkl", value)


@kind(lengths=(6,), expect="id label")
def batch_of_equal_lengths(folder, samples):
    """Write a stack (B, L, S, D) without a mask: no row has padding. Labels and ids next to it."""
    value = {
        "question_ids": [s.question_id for s in samples],
        "hidden_states": np.stack([s.hidden for s in samples]),
        "labels": [int(s.score < 0.5) for s in samples],
    }
    dump(folder / "batch.pkl", value)


@kind()
def optional_fields_present(folder, samples):
    """Write fields of the schema next to the arrays: prompt length, log-probabilities, entropies, temperature, seed."""
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
