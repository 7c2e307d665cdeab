"""Activations that hooks and interpretability libraries record: modules' names as keys."""

import numpy as np

from tests.ingest.corpus.registry import kind
from tests.ingest.corpus.samples import dump, save_pt, states_of, tensor, write_json


def hooked_model():
    """Return a random model of TransformerLens with three layers."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    sizes = {"n_layers": 3, "d_model": 16, "n_ctx": 32, "d_head": 8, "n_heads": 2, "d_vocab": 60}
    return HookedTransformer(HookedTransformerConfig(**sizes, act_fn="relu", seed=0, device="cpu"))


def cached_runs(count=3, names=None):
    """Yield (token ids (S,), activation cache) of prompts."""
    import torch

    model = hooked_model()
    for i in range(count):
        tokens = torch.arange(5 + i) + i
        with torch.no_grad():
            _, cache = model.run_with_cache(tokens[None], names_filter=names)
        yield tokens, cache


def expect_cache(cache, tokens=None, attention=True, **changes):
    """Return the expected trace of a cache: the residual stream after each block and the attention patterns."""
    trace = {"question_id": None, "hidden_states": states_of([cache[f"blocks.{k}.hook_resid_post"] for k in range(3)])}
    if attention:
        trace["attention"] = states_of([cache[f"blocks.{k}.attn.hook_pattern"] for k in range(3)])
    if tokens is not None:
        trace["tokens"] = tokens.tolist()
    return trace | changes


@kind("transformer_lens")
def transformerlens_cache(folder):
    """Write dict(cache) of HookedTransformer.run_with_cache with every activation, a file per prompt."""
    for i, (_, cache) in enumerate(cached_runs()):
        save_pt(folder / f"prompt_{i}.pt", dict(cache.cache_dict))
        yield expect_cache(cache)


@kind("transformer_lens", rows="caches.pkl")
def transformerlens_selected():
    """Write resid_post and pattern of run_with_cache with a names filter, with tokens and id, in one pickle."""
    selected = lambda name: name.endswith(("hook_resid_post", "hook_pattern"))  # noqa: E731
    for i, (tokens, cache) in enumerate(cached_runs(names=selected)):
        arrays = {name: value.numpy() for name, value in cache.items()}
        row = {"question_id": f"q{i}", "tokens": tokens.numpy(), "cache": arrays}
        yield row, expect_cache(cache, tokens, question_id=f"q{i}")


@kind("transformer_lens")
def transformerlens_without_batch(folder):
    """Write cache.remove_batch_dim(): (S, D) per block, resid_post only."""
    for i, (_, cache) in enumerate(cached_runs(names=lambda name: name.endswith("hook_resid_post"))):
        yield expect_cache(cache, attention=False)
        cache.remove_batch_dim()
        save_pt(folder / f"{i:03d}.pth", dict(cache.items()))


@kind("transformer_lens", rows="accumulated.pt")
def transformerlens_accumulated():
    """Write cache.accumulated_resid(): a stack (L + 1, 1, S, D) with its labels."""
    for i, (tokens, cache) in enumerate(cached_runs()):
        stack, labels = cache.accumulated_resid(layer=-1, incl_mid=False, return_labels=True)
        row = {"id": f"p{i}", "hidden_states": stack, "labels": labels, "tokens": tokens}
        hidden = stack[:, 0].numpy()
        yield row, {"question_id": f"p{i}", "hidden_states": hidden, "has_embeddings": True, "tokens": tokens.tolist()}


@kind(expect="")
def hook_module_names(folder, samples):
    """Write forward hooks by module name: "model.layers.0" to (1, S, D); a file per question id."""
    for s in samples:
        layers = {f"model.layers.{k}": tensor(h[None], "float16") for k, h in enumerate(s.hidden)}
        save_pt(folder / f"{s.question_id}.pt", layers)


@kind(expect="id")
def hook_gpt2_blocks(folder, samples):
    """Write module names of GPT-2, "transformer.h.0", in a dict by question id; pickle."""
    rows = {s.question_id: {f"transformer.h.{k}": h for k, h in enumerate(s.hidden)} for s in samples}
    dump(folder / "acts.pkl", rows)


@kind(expect="id")
def hook_outputs_of_layers_and_mlp(folder, samples):
    """Write residual stream, MLP and attention outputs of each layer: only the residual stream is the hidden state."""
    rows = []
    for s in samples:
        row = {"question_id": s.question_id}
        for k, h in enumerate(s.hidden):
            row[f"model.layers.{k}"] = tensor(h)
            row[f"model.layers.{k}.mlp"] = tensor(h * 2)
            row[f"model.layers.{k}.self_attn"] = tensor(h * 3)
        rows.append(row)
    save_pt(folder / "hooks.pt", rows)


@kind(count=2, expect="id", rows="trace_dict.pt")
def hook_tuple_outputs(s):
    """Write hooks that keep the layer's whole output: a tuple whose first element is the hidden state (1, S, D)."""
    return {
        "qid": s.question_id,
        "activations": {f"model.layers.{k}": (tensor(h[None]),) for k, h in enumerate(s.hidden)},
    }


@kind(expect="")
def hook_lists_per_module(folder, samples):
    """Write a list over prompts per module name, collected by hooks in a defaultdict."""
    value = {f"layers.{k}": [tensor(s.hidden[k]) for s in samples] for k in range(3)}
    save_pt(folder / "collected.pt", value)


@kind(count=2, expect="id")
def hook_layer_and_position_keys(folder, samples):
    """Write a dict by (layer, "post") tuples of (S, D), a list over samples."""
    rows = [{"id": s.question_id, "hidden": {(k, "post"): h for k, h in enumerate(s.hidden)}} for s in samples]
    dump(folder / "acts.pickle", rows)


@kind(count=4, expect_last="id")
def states_of_hallucination_cache(folder, samples):
    """Write activation_cache/model/dataset/hidden/layer_L_activations.pt (N, D) with layer_L_instance_ids.json."""
    base = folder / "activation_cache" / "Meta-Llama-3-8B" / "simpleqa" / "activation_hidden"
    for k in range(3):
        save_pt(base / f"layer{k}_activations.pt", tensor(np.stack([s.hidden[k, -1] for s in samples])))
        write_json(base / f"layer{k}_instance_ids.json", [s.question_id for s in samples])


@kind(expect="question", rows="nnsight_saves.pt")
def nnsight_saved_proxies(s):
    """Write lists over layers of saved values (1, S, D) as an nnsight loop collects them, with the prompt."""
    return {"prompt": s.question, "layer_outputs": [tensor(h[None]) for h in s.hidden]}


@kind(refused=True)
def attention_alone(folder, samples):
    """Write Look-back ratios and attention maps without hidden states: no detector can read them."""
    rows = [{"question_id": s.question_id, "lookback_ratio": s.attention[:, :, :, 0]} for s in samples]
    save_pt(folder / "lookback.pt", rows)
    return []
