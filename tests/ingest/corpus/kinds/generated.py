"""States from `generate` of transformers, made by random models: prompt pass and steps."""

import numpy as np

from tests.ingest.corpus.registry import kind
from tests.ingest.corpus.samples import dump, expect_generated, generate, joined_states, left_padded, prompts, save_pt


def runs(count=3, **options):
    """Yield (position, prompt ids (1, P), output of generate)."""
    for i, ids in enumerate(prompts(count)):
        yield i, ids, generate(ids, new=3 + i, **options)


@kind("transformers")
def generate_output_objects(folder):
    """Write a GenerateDecoderOnlyOutput per file."""
    for i, _, output in runs():
        save_pt(folder / f"gen_{i}.pt", output)
        yield expect_generated(output)


@kind("transformers", rows="generations.pkl")
def generate_objects_in_pickle():
    """Write a list of dicts with the output object, question, answer and prompt length; cache left out."""
    for i, ids, output in runs():
        output.cache = None
        row = {
            "question_id": f"q{i}",
            "question": f"Q {i}?",
            "generated_answer": f"A {i}",
            "prompt_length": ids.shape[1],
        }
        row = row | {"generation": output}
        yield row, expect_generated(output, question_id=f"q{i}", question=f"Q {i}?", answer=f"A {i}")


@kind("transformers", rows="steps.pt")
def generate_steps_of_layers():
    """Write hidden_states as a tuple over steps of tuples over layers, with the sequence; no attention."""
    for i, _, output in runs(attentions=False):
        row = {"id": f"q{i}", "hidden_states": output.hidden_states, "sequences": output.sequences}
        yield row, expect_generated(output, attention=False, question_id=f"q{i}")


@kind("transformers", rows="steps.pt")
def generate_steps_with_attentions():
    """Write steps of hidden states and of attentions (1, H, 1, P + k), tensors moved to the CPU in lists."""
    for i, ids, output in runs():
        row = {
            "question_id": f"q{i}",
            "hidden_states": [[h.half() for h in step] for step in output.hidden_states],
            "attentions": [[a.half() for a in step] for step in output.attentions],
            "tokens": output.sequences[0].tolist(),
            "prompt_length": ids.shape[1],
        }
        yield row, expect_generated(output, question_id=f"q{i}")


@kind("transformers")
def generate_steps_as_numpy(folder):
    """Write steps as lists of numpy arrays without the batch dimension, (P, D) and (1, D); a file per question."""
    for i, _, output in runs(attentions=False):
        steps = [[h[0].numpy() for h in step] for step in output.hidden_states]
        dump(folder / f"question_{i}.pkl", {"qid": f"q{i}", "hidden_states": steps, "answer": f"A {i}"})
        yield expect_generated(output, attention=False, question_id=f"q{i}", answer=f"A {i}", tokens=None)


@kind("transformers")
def generate_left_padded_batch(folder):
    """Write generate() of a left-padded batch, with the attention mask of the prompts and ids."""
    ids = prompts()
    input_ids, mask = left_padded(ids)
    output = generate(input_ids, new=4, attention_mask=mask)
    value = {
        "question_ids": [f"q{i}" for i in range(3)],
        "attention_mask": mask,
        "sequences": output.sequences,
        "hidden_states": output.hidden_states,
        "attentions": output.attentions,
    }
    save_pt(folder / "batch.pt", value)
    skips = [input_ids.shape[1] - x.shape[1] for x in ids]
    return [expect_generated(output, i, skips[i], question_id=f"q{i}") for i in range(3)]


@kind("transformers")
def generate_several_sequences(folder):
    """Write num_return_sequences=2 for a question: the batch dimension counts the answers."""
    rows = []
    for i, ids in enumerate(prompts(2)):
        output = generate(ids, new=4, do_sample=True, num_return_sequences=2, attentions=False)
        rows.append({"question_id": f"q{i}", "sequences": output.sequences, "hidden_states": output.hidden_states})
        yield from [expect_generated(output, k, attention=False, question_id=f"q{i}", sample=k) for k in range(2)]
    save_pt(folder / "sampled.pt", rows)


@kind("transformers", rows="answer_states.pt")
def generate_new_tokens_only():
    """Write the states of the generated tokens alone: torch.stack of the last position of each step, (n, L + 1, D)."""
    import torch

    for i, _, output in runs(attentions=False):
        stack = torch.stack([torch.stack([h[0, -1] for h in step]) for step in output.hidden_states])
        answer_ids = output.sequences[0, -len(stack) :]
        row = {"question_id": f"q{i}", "hidden_states": stack, "generated_ids": answer_ids}
        yield row, {"question_id": f"q{i}", "hidden_states": stack.numpy().transpose(1, 0, 2), "has_embeddings": True}


@kind("transformers", rows="last_step.pt")
def generate_last_step():
    """Write hidden_states[-1] of generate: the layers of the last step, each (1, 1, D)."""
    for i, _, output in runs(attentions=False):
        row = {"question_id": f"q{i}", "hidden_states": output.hidden_states[-1], "answer": f"A {i}"}
        vectors = np.stack([h[0, -1].numpy() for h in output.hidden_states[-1]])
        yield row, {"question_id": f"q{i}", "hidden_states": None, "last_token": vectors, "answer": f"A {i}"}


@kind("transformers", rows="prompt_pass.pt")
def generate_prompt_pass():
    """Write hidden_states[0] of generate: the prompt pass alone, with its attentions."""
    for i, ids, output in runs():
        states, maps = output.hidden_states[0], output.attentions[0]
        row = {"question_id": f"q{i}", "hidden_states": states, "attentions": maps, "input_ids": ids}
        yield (
            row,
            {
                "question_id": f"q{i}",
                "hidden_states": np.stack([h[0].numpy() for h in states]),
                "has_embeddings": True,
                "attention": np.stack([a[0].numpy() for a in maps]),
                "tokens": ids[0].tolist(),
            },
        )


@kind("transformers")
def generate_as_dict_with_scores(folder):
    """Write dict(output) with scores, logits and cache, by question id."""
    rows = {}
    for i, _, output in runs(output_scores=True, output_logits=True):
        rows[f"q{i}"] = dict(output)
        yield expect_generated(output, question_id=f"q{i}")
    save_pt(folder / "generations.pth", rows)


@kind("transformers", rows="joined.pt")
def generate_joined_by_layer():
    """Write layers joined over prompt pass and steps with torch.cat, as a list of (1, S, D); tokens one longer than S."""
    import torch

    for i, _, output in runs(attentions=False):
        layers = [torch.cat([s[k] for s in output.hidden_states], 1) for k in range(len(output.hidden_states[0]))]
        row = {"question_id": f"q{i}", "hidden_states": layers, "token_ids": output.sequences[0]}
        yield row, expect_generated(output, attention=False, question_id=f"q{i}")


@kind("transformers", rows="steps.pkl")
def generate_gpt2_steps_by_name():
    """Write steps as dicts {"step_0": {"layer_0": array}} of GPT-2, with the text of the answer."""
    for i, _, output in runs(name="gpt2", attentions=False):
        steps = {
            f"step_{n}": {f"layer_{k}": h[0].numpy() for k, h in enumerate(step)}
            for n, step in enumerate(output.hidden_states)
        }
        row = {"question_id": f"q{i}", "output_text": f"A {i}", "hidden_states": steps}
        hidden = joined_states(output.hidden_states)
        yield row, {"question_id": f"q{i}", "hidden_states": hidden, "has_embeddings": True, "answer": f"A {i}"}
