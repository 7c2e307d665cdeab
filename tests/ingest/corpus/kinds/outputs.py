"""Output objects of transformers from one forward pass, made by random models."""

import numpy as np

from tests.ingest.corpus.registry import kind
from tests.ingest.corpus.samples import (
    attention_of,
    dump,
    expect_output,
    forward,
    left_padded,
    prompts,
    save_pt,
    states_of,
    tiny_model,
)


@kind("transformers")
def llama_output_objects(folder):
    """Write a CausalLMOutputWithPast per file: logits, hidden states with the embeddings, attentions."""
    for i, ids in enumerate(prompts()):
        output = forward(ids)
        save_pt(folder / f"output_{i}.pt", output)
        yield expect_output(output)


@kind("transformers", rows="outputs.pkl")
def llama_outputs_in_pickle():
    """Write a list of dicts with the output object under "output", with id and question."""
    for i, ids in enumerate(prompts()):
        output = forward(ids)
        row = {"question_id": f"q{i}", "question": f"Q {i}?", "output": output}
        yield row, expect_output(output, question_id=f"q{i}", question=f"Q {i}?")


@kind("transformers", rows="outputs.pt")
def llama_output_with_cache():
    """Write output objects that carry a DynamicCache of keys and values, with input_ids."""
    import torch

    for ids in prompts(2):
        with torch.no_grad():
            output = tiny_model()(ids, output_hidden_states=True, output_attentions=True, use_cache=True)
        yield {"input_ids": ids, "outputs": output}, expect_output(output, tokens=ids[0].tolist())


@kind("transformers")
def gpt2_outputs_by_id(folder):
    """Write CausalLMOutputWithCrossAttentions of GPT-2 in a dict by question id."""
    outputs = {f"tqa{i}": forward(ids, "gpt2") for i, ids in enumerate(prompts())}
    save_pt(folder / "gpt2.pt", outputs)
    return [expect_output(output, question_id=name) for name, output in outputs.items()]


@kind("transformers")
def gpt2_batch_with_tokenizer_output(folder):
    """Write a right-padded batch: the tokenizer's BatchEncoding under "inputs", the output under "outputs"."""
    import torch
    from transformers import BatchEncoding

    ids = prompts()
    longest = max(x.shape[1] for x in ids)
    padded = torch.stack([torch.nn.functional.pad(x[0], (0, longest - x.shape[1])) for x in ids])
    mask = (padded != 0).long()
    output = forward(padded, "gpt2", attention_mask=mask)
    save_pt(
        folder / "batch.pt", {"inputs": BatchEncoding({"input_ids": padded, "attention_mask": mask}), "outputs": output}
    )
    keeps = [slice(x.shape[1]) for x in ids]
    return [expect_output(output, i, keeps[i], tokens=x[0].tolist()) for i, x in enumerate(ids)]


@kind("transformers")
def llama_left_padded_output(folder):
    """Write a left-padded batch as one output object, attention_mask and ids next to it; pickle."""
    ids = prompts()
    input_ids, mask = left_padded(ids)
    output = forward(input_ids, attention_mask=mask)
    names = [f"q{i}" for i in range(len(ids))]
    dump(folder / "batch.pkl", {"question_ids": names, "attention_mask": mask, "output": output})
    longest = input_ids.shape[1]
    return [
        expect_output(output, i, slice(longest - x.shape[1], None), question_id=names[i]) for i, x in enumerate(ids)
    ]


@kind("transformers", rows="base.pth")
def base_model_outputs():
    """Write BaseModelOutputWithPast of the model without its head, bfloat16, no attentions."""
    import torch

    for i, ids in enumerate(prompts()):
        with torch.no_grad():
            output = tiny_model("llama", "bfloat16").model(ids, output_hidden_states=True, use_cache=False)
        row = {"idx": i, "model_output": output}
        yield row, {"question_id": str(i), "hidden_states": states_of(output.hidden_states), "has_embeddings": True}
    tiny_model.cache_clear()


@kind("transformers", rows="bert.pt")
def bert_masked_lm_outputs():
    """Write MaskedLMOutput of BERT: attention in both directions."""
    for i, ids in enumerate(prompts()):
        import torch

        with torch.no_grad():
            output = tiny_model("bert")(ids, output_hidden_states=True, output_attentions=True)
        yield {"id": f"s{i}", "output": output}, expect_output(output, question_id=f"s{i}")


@kind("transformers", rows="outputs.pt")
def output_as_dict():
    """Write dict(output) in a list."""
    for ids in prompts():
        output = forward(ids)
        yield dict(output) | {"input_ids": ids}, expect_output(output, tokens=ids[0].tolist())


@kind("transformers")
def output_object_list(folder):
    """Write a bare list of output objects in a legacy .pt file."""
    outputs = [forward(ids, "gpt2") for ids in prompts(2)]
    save_pt(folder / "outputs.pt", outputs, _use_new_zipfile_serialization=False)
    return [expect_output(output) for output in outputs]


@kind("transformers", rows="stacked.pt")
def stacked_without_embeddings():
    """Write torch.stack(output.hidden_states[1:]).squeeze(1): the embeddings are left out, attentions stacked as well."""
    import torch

    for i, ids in enumerate(prompts()):
        output = forward(ids)
        hidden, attention = torch.stack(output.hidden_states[1:]).squeeze(1), torch.stack(output.attentions).squeeze(1)
        row = {"question_id": f"q{i}", "hidden_states": hidden, "attentions": attention, "tokens": ids[0]}
        yield (
            row,
            {
                "question_id": f"q{i}",
                "hidden_states": hidden.numpy(),
                "attention": attention.numpy(),
                "tokens": ids[0].tolist(),
            },
        )


@kind("transformers", rows="stacked.pkl")
def stacked_with_embeddings():
    """Write np.stack of all L + 1 states (L + 1, S, D) and of L attentions (L, H, S, S); pickle."""
    for i, ids in enumerate(prompts()):
        output = forward(ids)
        hidden, attention = states_of(output.hidden_states), attention_of(output.attentions)
        row = {"id": f"q{i}", "hidden_states": hidden, "attentions": attention, "input_ids": ids[0].tolist()}
        yield row, expect_output(output, question_id=f"q{i}", tokens=ids[0].tolist())


@kind("transformers")
def embeddings_and_head_mean(folder):
    """Write all L + 1 states as float16 lists, attention averaged over heads as a list of L arrays (S, S)."""
    rows, traces = [], []
    for i, ids in enumerate(prompts()):
        output = forward(ids)
        means = [a[0].mean(0).half().numpy() for a in output.attentions]
        states = [h[0].half().numpy() for h in output.hidden_states]
        rows.append({"question_id": f"q{i}", "hidden_states": states, "attentions": means})
        traces.append(expect_output(output, question_id=f"q{i}", attention=np.stack(means).astype("f4")))
    dump(folder / "traces.pkl.gz", rows)
    return traces


@kind("transformers", rows="last_layer.pt")
def last_layer_of_output():
    """Write output.hidden_states[-1] alone, (1, S, D) bfloat16, with the logits of the last token."""
    for i, ids in enumerate(prompts()):
        output = forward(ids)
        last = output.hidden_states[-1].bfloat16()
        row = {"question_id": f"q{i}", "last_hidden_state": last, "logits": output.logits[0, -1]}
        yield row, {"question_id": f"q{i}", "hidden_states": last.float().numpy()}


@kind("transformers")
def last_token_of_output(folder):
    """Write [h[0, -1] for h in output.hidden_states]: the last token alone with the embeddings, by question."""
    rows = {}
    for i, ids in enumerate(prompts()):
        output = forward(ids)
        vectors = [h[0, -1].numpy() for h in output.hidden_states]
        rows[f"q{i}"] = {"question": f"Q {i}?", "hidden_states": vectors}
        yield ({"question_id": f"q{i}", "question": f"Q {i}?", "hidden_states": None, "last_token": np.stack(vectors)})
    dump(folder / "last.pkl", rows)
