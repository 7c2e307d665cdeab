"""Files written by torch.save: containers, dtypes, batches, and data for training speculative decoders."""

from collections import OrderedDict

import numpy as np

from tests.ingest.corpus.registry import kind
from tests.ingest.corpus.samples import (
    pad,
    pad_attention,
    rounded,
    save_pt,
    tensor,
    write_json,
    write_lines,
    write_table,
)


def tensors_of(sample, dtype="float32"):
    """Return the layers of a sample as a list of tensors (S, D)."""
    return [tensor(h, dtype) for h in sample.hidden]


@kind(expect="id attention answer", rows="traces.pt")
def pt_list_of_dicts(s):
    """Write a list of dicts of float16 tensors in a zip file."""
    return {
        "question_id": s.question_id,
        "hidden_states": tensors_of(s, "float16"),
        "attentions": [tensor(a, "float16") for a in s.attention],
        "answer": s.answer,
    }


@kind(expect="id tokens")
def pt_legacy_by_id(folder, samples):
    """Write a dict by question id in the format before torch 1.6 (no zip file)."""
    value = {s.question_id: {"hidden_states": tensor(s.hidden), "tokens": tensor(s.tokens)} for s in samples}
    save_pt(folder / "traces.pt", value, _use_new_zipfile_serialization=False)


@kind(dim=16)
def pth_bfloat16(folder, samples):
    """Write stacked bfloat16 tensors, suffix .pth."""
    rows = [{"id": s.question_id, "hidden_states": tensor(s.hidden, "bfloat16")} for s in samples]
    save_pt(folder / "states.pth", rows)
    return [s.expect("id", hidden_states=rounded(s.hidden)) for s in samples]


@kind(count=2, expect="id")
def pt_float64_legacy(folder, samples):
    """Write float64 tensors with a batch dimension in the legacy format."""
    rows = [
        {"question_id": s.question_id, "hidden_states": [h[None] for h in tensors_of(s, "float64")]} for s in samples
    ]
    save_pt(folder / "states.pt", {"traces": rows}, _use_new_zipfile_serialization=False)


@kind(count=4, expect="")
def pt_bare_tensor_per_sample(folder, samples):
    """Write a file per sample that is one tensor (L, S, D)."""
    for i, s in enumerate(samples):
        save_pt(folder / f"sample_{i}.pt", tensor(s.hidden))


@kind(layers=4, expect="")
def pt_tuple_per_sample(folder, samples):
    """Write torch.save(outputs.hidden_states, path): a tuple of (1, S, D) in a file per question id."""
    for s in samples:
        save_pt(folder / f"{s.question_id}.pt", tuple(t[None] for t in tensors_of(s)))


@kind(count=4, expect="")
def pt_batches_with_mask(folder, samples):
    """Write batch_0.pt, batch_1.pt: half-precision layers (B, S, D) padded on the right and attention_mask, no ids."""
    for i in range(2):
        hidden, mask = pad([s.hidden for s in samples[2 * i : 2 * i + 2]], axis=1)
        layers = [tensor(h, "float16") for h in hidden.transpose(1, 0, 2, 3)]
        save_pt(folder / f"batch_{i}.pt", {"hidden_states": layers, "attention_mask": tensor(mask)})


@kind(expect="attention tokens")
def pt_left_padded_batch(folder, samples):
    """Write one batch padded on the left with input_ids, attention_mask and attentions of all heads."""
    hidden, mask = pad([s.hidden for s in samples], axis=1, side="left")
    attention = pad_attention([s.attention for s in samples], side="left")
    value = {
        "input_ids": tensor(pad([s.tokens for s in samples], side="left")[0]),
        "attention_mask": tensor(mask),
        "hidden_states": tuple(tensor(h) for h in hidden.transpose(1, 0, 2, 3)),
        "attentions": tuple(tensor(a) for a in attention.transpose(1, 0, 2, 3, 4)),
    }
    save_pt(folder / "outputs.pt", value)


@kind(expect="id")
def pt_batch_with_seq_lens(folder, samples):
    """Write a tensor (B, L, S, D) with "seq_lens" and ids."""
    hidden, mask = pad([s.hidden for s in samples], axis=1)
    ids = [s.question_id for s in samples]
    save_pt(folder / "all.pt", {"ids": ids, "hidden_states": tensor(hidden), "seq_lens": tensor(mask.sum(1))})


@kind(count=4, expect="id label")
def pt_columns(folder, samples):
    """Write lists of tensors of different lengths by field, labels as a tensor."""
    value = {
        "question_ids": [s.question_id for s in samples],
        "hidden_states": [tensor(s.hidden) for s in samples],
        "labels": tensor(np.array([float(s.score < 0.5) for s in samples])),
    }
    save_pt(folder / "dataset.pt", value)


@kind(count=2, expect="id")
def pt_parameters_and_views(folder, samples):
    """Write parameters with gradients, slices that share one storage, and transposed views."""
    import torch

    rows = []
    for s in samples:
        base = tensor(s.hidden).transpose(0, 1).contiguous()
        layers = [base[:, k] for k in range(2)] + [torch.nn.Parameter(tensor(s.hidden[2]))]
        rows.append({"question_id": s.question_id, "hidden_states": layers})
    save_pt(folder / "traces.pt", rows)


@kind(count=2)
def pt_numpy_inside(folder, samples):
    """Write torch.save of dicts that hold numpy arrays, strings and numbers."""
    rows = [{"question_id": i, "hidden_states": s.hidden, "prompt_len": s.prompt_length} for i, s in enumerate(samples)]
    save_pt(folder / "traces.pt", rows)
    return [s.expect(question_id=str(i)) for i, s in enumerate(samples)]


@kind(count=5, expect="id")
def pt_shards_in_parts(folder, samples):
    """Write numbered parts in a sub-folder, each a list of dicts, with an index in JSON next to them."""
    for k in range(3):
        part = [{"question_id": s.question_id, "hidden_states": tensor(s.hidden)} for s in samples[2 * k : 2 * k + 2]]
        save_pt(folder / "parts" / f"traces_part_{k:05d}.pt", part)
    write_json(folder / "index.json", {"num_traces": 5, "parts": [f"traces_part_{k:05d}.pt" for k in range(3)]})


@kind(count=4, expect="id tokens")
def pt_model_dataset_folders(folder, samples):
    """Write model/dataset/question_id.pt with a dict per file; the id stands in the file."""
    for i, s in enumerate(samples):
        path = folder / "llama-3-8b" / ("triviaqa" if i < 2 else "nq") / f"{s.question_id}.pt"
        save_pt(path, {"qid": s.question_id, "hidden_states": tensors_of(s), "input_ids": tensor(s.tokens)})


@kind(count=4, expect_last="id")
def pt_last_token_stack(folder, samples):
    """Write the last token alone: a tensor (N, L, D) with ids."""
    value = {
        "ids": [s.question_id for s in samples],
        "last_token": tensor(np.stack([s.hidden[:, -1] for s in samples])),
    }
    save_pt(folder / "last_token.pt", value)


@kind(count=5)
def pt_layer_to_matrix(folder, samples):
    """Write a dict from layer to the last tokens of all samples (N, D), as representation reading keeps them."""
    stacked = np.stack([s.hidden[:, -1] for s in samples], 1)
    save_pt(folder / "reps.pt", {layer: tensor(stacked[k]) for k, layer in enumerate((10, 20, 30))})
    return [s.expect_last(layers=[10, 20, 30]) for s in samples]


@kind(count=5)
def geometry_of_truth(folder, samples):
    """Write acts/model/dataset/layer_L_START.pt: last tokens (25 or fewer, D) of statements; labels in dataset.csv."""
    for start in (0, 3):
        part = np.stack([s.hidden[:, -1] for s in samples[start : start + 3]], 1)
        for k, layer in enumerate((8, 12, 16)):
            save_pt(folder / "acts" / "llama-13b" / "cities" / f"layer_{layer}_{start}.pt", tensor(part[k]))
    rows = [{"statement": s.question, "label": int(s.score >= 0.5)} for s in samples]
    write_table(folder / "datasets" / "cities.csv", rows)
    return [s.expect_last(layers=[8, 12, 16]) for s in samples]


@kind(layers=1, expect="tokens")
def eagle_data(folder, samples):
    """Write data_0.ckpt of EAGLE's ge_data: last layer (S, D), input_ids, loss_mask."""
    for i, s in enumerate(samples):
        mask = np.r_[np.zeros(s.prompt_length, "i8"), np.ones(2, "i8")]
        value = {
            "input_ids": tensor(s.tokens),
            "hidden_state": tensor(s.hidden[0], "float16"),
            "loss_mask": tensor(mask),
        }
        save_pt(folder / "0" / f"data_{i}.ckpt", value)


@kind(layers=4)
def specforge_eagle3(folder, samples):
    """Write SpecForge's offline data for EAGLE-3: last layer (1, S, D), three layers side by side (1, S, 3 D)."""
    for i, s in enumerate(samples):
        value = {
            "input_ids": tensor(s.tokens),
            "loss_mask": tensor(np.ones(len(s.tokens), "i8")),
            "hidden_state": tensor(s.hidden[3:]),
            "aux_hidden_state": tensor(np.concatenate(s.hidden[:3], -1)[None]),
        }
        save_pt(folder / "rows_0-2000" / f"data_{i}.ckpt", value)
    return [s.expect("tokens", hidden_states=s.hidden[3:]) for s in samples]


@kind(layers=4)
def speculators_data(folder, samples):
    """Write data_0.pt of speculators: list of bfloat16 layers (S, D), input_ids, loss_mask; lengths in JSON."""
    for i, s in enumerate(samples):
        value = {
            "input_ids": tensor(s.tokens),
            "hidden_states": tensors_of(s, "bfloat16"),
            "loss_mask": tensor(np.ones(len(s.tokens), "i8")),
        }
        save_pt(folder / f"data_{i}.pt", value)
    write_json(folder / "sample_lengths.json", {str(i): len(s.tokens) for i, s in enumerate(samples)})
    write_json(folder / "data_config.json", {"version": "2.0", "model": {"target_model_path": "x", "hidden_size": 12}})
    return [s.expect("tokens", hidden_states=rounded(s.hidden)) for s in samples]


@kind(layers=1, ids="cmpl-{:08x}")
def sglang_request_dumps(folder, samples):
    """Write a file per request id with input_ids of prompt and answer, one layer (S, D), named by the request."""
    for s in samples:
        value = OrderedDict(
            rid=s.question_id, input_ids=tensor(s.tokens), hidden_states=tensor(s.hidden[0], "bfloat16")
        )
        save_pt(folder / f"{s.question_id}_data.ckpt", value)
    return [s.expect("tokens", hidden_states=rounded(s.hidden)) for s in samples]


@kind(count=4, ids="sq_{}", expect="id question answer")
def pt_states_and_lines(folder, samples):
    """Write a tensor per sample in states/, and one JSON line per sample with id, question, answer and file name."""
    rows = []
    for i, s in enumerate(samples):
        save_pt(folder / "states" / f"{i}.pt", tensor(s.hidden))
        rows.append({"id": s.question_id, "question": s.question, "answer": s.answer, "file": f"states/{i}.pt"})
    write_lines(folder / "samples.jsonl", rows)


@kind(count=2, expect="attention")
def pt_raw_tensors_of_a_run(folder, samples):
    """Write layers and heads of one run with prompt_len and generated ids, a file per episode."""
    for i, s in enumerate(samples):
        value = {
            "hidden_states": [t[None] for t in tensors_of(s)],
            "attentions": [tensor(a[None]) for a in s.attention],
            "prompt_len": s.prompt_length,
            "generated_token_ids": s.tokens[s.prompt_length :].tolist(),
            "num_vision_patches": 0,
        }
        save_pt(folder / f"episode_{i}" / "raw.pt", value)


@kind("tensordict", count=2, expect="tokens", rows="traces.pt")
def pt_tensordict(s):
    """Write a TensorDict per sample in a list."""
    from tensordict import TensorDict

    return TensorDict({"hidden_states": tensor(s.hidden), "tokens": tensor(s.tokens)}, batch_size=[])
