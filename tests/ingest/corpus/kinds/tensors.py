"""safetensors files: servers, data for speculative decoding, and plain dumps."""

import numpy as np

from tests.ingest.corpus.registry import kind
from tests.ingest.corpus.samples import pad, rounded, tensor, write_json, write_lines


def save(path, tensors, metadata=None):
    """Write tensors or arrays with the safetensors library."""
    from safetensors.numpy import save_file as save_arrays
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    is_numpy = all(isinstance(t, np.ndarray) for t in tensors.values())
    values = {name: np.ascontiguousarray(t) if is_numpy else t.contiguous() for name, t in tensors.items()}
    (save_arrays if is_numpy else save_file)(values, path, metadata)


def vllm_tensors(sample):
    """Return what ExampleHiddenStatesConnector of vLLM saves: (S, L, D) bfloat16 and the token ids of the request."""
    states = tensor(sample.hidden.transpose(1, 0, 2), "bfloat16")
    return {"hidden_states": states, "token_ids": tensor(sample.tokens)}


@kind("safetensors", layers=4, dim=16)
def vllm_connector(folder, samples):
    """Write a file per request of vLLM's ExampleHiddenStatesConnector, named by the request id."""
    for i, s in enumerate(samples):
        save(folder / f"{i}-8f3c{i}a.safetensors", vllm_tensors(s))
    return [s.expect("tokens", hidden_states=rounded(s.hidden)) for s in samples]


@kind("safetensors", layers=4, dim=16)
def vllm_connector_with_lines(folder, samples):
    """Write the connector's files and a JSON line per request: id, prompt, text, hidden_states_path."""
    rows = []
    for i, s in enumerate(samples):
        save(folder / "states" / f"cmpl-{i}.safetensors", vllm_tensors(s))
        path = f"states/cmpl-{i}.safetensors"
        rows.append(
            {"question_id": s.question_id, "prompt": s.question, "output": s.answer, "hidden_states_path": path}
        )
    write_lines(folder / "requests.jsonl", rows)
    return [s.expect("id tokens question answer", hidden_states=rounded(s.hidden)) for s in samples]


@kind("safetensors", "zstandard", layers=2, dim=16)
def vllm_connector_zstd(folder, samples):
    """Write files of vLLM's online connector, compressed with zstd: .safetensors.zst."""
    import zstandard
    from safetensors.torch import save as to_bytes

    for i, s in enumerate(samples):
        data = to_bytes({name: t.contiguous() for name, t in vllm_tensors(s).items()})
        (folder / f"req-{i}.safetensors.zst").write_bytes(zstandard.ZstdCompressor(level=3).compress(data))
    return [s.expect("tokens", hidden_states=rounded(s.hidden)) for s in samples]


@kind("safetensors", count=4, layers=4, dim=16)
def vllm_last_token_mode(folder, samples):
    """Write a changed connector that keeps the last token alone: (1, L, D), with all token ids."""
    for i, s in enumerate(samples):
        fields = vllm_tensors(s)
        save(folder / f"{i}.safetensors", fields | {"hidden_states": fields["hidden_states"][-1:]})
    return [s.expect_last(last_token=rounded(s.hidden[:, -1])) for s in samples]


@kind("safetensors", layers=4, dim=16)
def speculators_offline(folder, samples):
    """Write hs_0.safetensors of speculators' offline data generation, with the layer ids in a JSON file."""
    for i, s in enumerate(samples):
        save(folder / "hidden_states" / f"hs_{i}.safetensors", vllm_tensors(s))
    write_json(folder / "config.json", {"target_layer_ids": [2, 16, 29, 32], "verifier": "meta-llama/Llama-3.1-8B"})
    return [s.expect("tokens", hidden_states=rounded(s.hidden)) for s in samples]


@kind("safetensors", expect="id attention question")
def st_hidden_states(folder, samples):
    """Write hidden_states (L, S, D) and attentions in a file per sample, id and question in the header's metadata."""
    for i, s in enumerate(samples):
        metadata = {"question_id": s.question_id, "question": s.question}
        save(folder / f"{i}.safetensors", {"hidden_states": s.hidden, "attentions": s.attention}, metadata)


@kind("safetensors", expect="tokens")
def st_layer_keys(folder, samples):
    """Write layer_0, layer_1, ... (S, D) and input_ids in a file per sample."""
    for i, s in enumerate(samples):
        layers = {f"layer_{k}": h for k, h in enumerate(s.hidden)}
        save(folder / f"sample_{i}.safetensors", layers | {"input_ids": s.tokens})


@kind("safetensors", expect="id attention")
def st_dotted_names(folder, samples):
    """Write one file for all: "q0.hidden_states", "q0.attentions"."""
    fields = {}
    for s in samples:
        fields |= {f"{s.question_id}.hidden_states": s.hidden, f"{s.question_id}.attentions": s.attention}
    save(folder / "traces.safetensors", fields)


@kind("safetensors", ids="tqa_{}", expect="id")
def st_slashes_and_layers(folder, samples):
    """Write one file for all: "tqa_0/layer_0", (1, S, D) float16."""
    fields = {f"{s.question_id}/layer_{k}": h[None].astype("f2") for s in samples for k, h in enumerate(s.hidden)}
    save(folder / "traces.safetensors", fields)


@kind("safetensors", count=4, expect="")
def st_batches_with_mask(folder, samples):
    """Write hidden_states (B, L, S, D) and attention_mask per batch, ids in ids.json by file."""
    ids = {}
    for i in range(2):
        part = samples[2 * i : 2 * i + 2]
        hidden, mask = pad([s.hidden for s in part], axis=1)
        save(folder / f"batch_{i:05d}.safetensors", {"hidden_states": hidden, "attention_mask": mask})
        ids[f"batch_{i:05d}.safetensors"] = [s.question_id for s in part]
    write_json(folder / "ids.json", ids)


@kind("safetensors", count=4, expect="tokens")
def st_flat_with_cumulative_lengths(folder, samples):
    """Write hidden_states (sum of S, L, D), input_ids and cu_seqlens (N + 1,), as variable-length attention packs them."""
    fields = {
        "hidden_states": np.concatenate([s.hidden.transpose(1, 0, 2) for s in samples]),
        "input_ids": np.concatenate([s.tokens for s in samples]),
        "cu_seqlens": np.cumsum([0, *[len(s.tokens) for s in samples]]).astype("i4"),
    }
    save(folder / "packed.safetensors", fields)


@kind("safetensors", count=4, layers=1, expect="id")
def st_shards_with_row_ranges(folder, samples):
    """Write shard_0000.safetensors with activations (tokens, D) of one layer, and metadata.jsonl of row ranges."""
    rows = []
    for k in range(2):
        part, start = samples[2 * k : 2 * k + 2], 0
        save(folder / f"shard_{k:04d}.safetensors", {"activations": np.concatenate([s.hidden[0] for s in part])})
        for s in part:
            end = start + len(s.tokens)
            shard = f"shard_{k:04d}.safetensors"
            rows.append({"id": s.question_id, "shard": shard, "row_start": start, "row_end": end})
            start = end
    write_lines(folder / "metadata.jsonl", rows)
    write_json(folder / "manifest.json", {"num_shards": 2, "hidden_dim": 12})


@kind("safetensors", count=5, expect_last="label")
def st_last_tokens_and_labels(folder, samples):
    """Write last_token (N, L, D) and labels (N,)."""
    last, labels = np.stack([s.hidden[:, -1] for s in samples]), np.array([int(s.score < 0.5) for s in samples])
    save(folder / "train.safetensors", {"last_token": last, "labels": labels})


@kind("safetensors")
def st_hook_names(folder, samples):
    """Write "blocks.0.hook_resid_post" (1, S, D) bfloat16 in a file per prompt, tokens next to it."""
    for i, s in enumerate(samples):
        states = {f"blocks.{k}.hook_resid_post": tensor(h[None], "bfloat16") for k, h in enumerate(s.hidden)}
        save(folder / f"prompt{i}.safetensors", states | {"tokens": tensor(s.tokens[None])})
    return [s.expect("tokens", hidden_states=rounded(s.hidden)) for s in samples]


@kind("safetensors", count=4, expect_last="id")
def st_activations_with_example_ids(folder, samples):
    """Write activations (N, L, D) of last tokens, NAME.example_ids.jsonl and NAME.meta.json with the layers."""
    save(folder / "run1_qa_resid.safetensors", {"activations": np.stack([s.hidden[:, -1] for s in samples])})
    write_lines(folder / "run1_qa_resid.example_ids.jsonl", [{"example_id": s.question_id} for s in samples])
    write_json(folder / "run1_qa_resid.meta.json", {"component": "resid", "layers": [4, 8, 12], "token": "last"})
