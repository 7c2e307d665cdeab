"""Small random samples of a language model's internal states, and helpers that write files."""

import bz2
import csv
import functools
import gzip
import json
import lzma
import pickle
from dataclasses import dataclass

import numpy as np

WORDS = ["the", "capital", "of", "France", "is", "Paris", "and", "not", "Lyon"]
OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


@dataclass
class Sample:
    """One question with the states of one answer: L layers, S tokens, width D, H heads."""

    question_id: str
    hidden: np.ndarray  # (L, S, D) float32
    attention: np.ndarray  # (L, H, S, S) float32, causal, rows sum to 1
    tokens: np.ndarray  # (S,) int64
    words: list[str]
    question: str
    answer: str
    prompt_length: int
    score: float

    def expect(self, fields="", **changes):
        """Return the expected trace with its hidden states and the named fields of this sample.

        Names: id, attention, mean (attention averaged over heads), tokens, words, question, answer, score, label
        (1 for a score below 0.5).
        """
        values = {
            "id": ("question_id", self.question_id),
            "attention": ("attention", self.attention),
            "mean": ("attention", self.attention.mean(1)),
            "tokens": ("tokens", self.tokens.tolist()),
            "words": ("tokens_decoded", self.words),
            "question": ("question", self.question),
            "answer": ("answer", self.answer),
            "score": ("score", self.score),
            "label": ("label", float(self.score < 0.5)),
        }
        trace = {"question_id": None, "hidden_states": self.hidden}
        return trace | dict(values[name] for name in fields.split()) | changes

    def expect_last(self, fields="", **changes):
        """Return the expected trace if the input has the last token alone."""
        return self.expect(fields, **{"hidden_states": None, "last_token": self.hidden[:, -1]} | changes)


def make_samples(count=3, *, layers=3, dim=12, heads=2, ids="q{}", lengths=(6, 9, 5, 7, 8), seed=0):
    """Return samples with random values. `ids` is a format of the position, `lengths` are token counts in turn."""
    samples = []
    for i in range(count):
        rng = np.random.default_rng([seed, i])
        num_tokens = lengths[i % len(lengths)]
        mask = np.tril(np.ones((num_tokens, num_tokens)))
        weights = np.exp(rng.standard_normal((layers, heads, num_tokens, num_tokens))) * mask
        samples.append(
            Sample(
                question_id=ids.format(i),
                hidden=rng.standard_normal((layers, num_tokens, dim)).astype("f4"),
                attention=(weights / weights.sum(-1, keepdims=True)).astype("f4"),
                tokens=rng.integers(5, 30_000, num_tokens),
                words=[WORDS[k % len(WORDS)] + f"_{i}" for k in range(num_tokens)],
                question=f"What is fact number {i}?",
                answer=f"It is number {i}.",
                prompt_length=num_tokens - 2,
                score=[0.9, 0.2, 0.75, 0.1, 0.6][i % 5],
            )
        )
    return samples


def open_binary(path):
    """Open a file for writing, compressed as its suffix says."""
    if path.suffix == ".zst":
        import zstandard

        return zstandard.open(path, "wb")
    return OPENERS.get(path.suffix, open)(path, "wb")


def dump(path, *values, protocol=4):
    """Pickle values one after the other into a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_binary(path) as file:
        for value in values:
            pickle.dump(value, file, protocol=protocol)


def save_pt(path, value, **options):
    """Save a value with torch."""
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path, **options)


def tensor(array, dtype=None):
    """Return an array as a tensor, in a dtype by name."""
    import torch

    result = torch.from_numpy(np.ascontiguousarray(array))
    return result if dtype is None else result.to(getattr(torch, dtype))


def rounded(array, dtype="bfloat16"):
    """Return an array after it was rounded to a dtype of torch, as float32."""
    return tensor(array, dtype).float().numpy()


def pad(arrays, axis=0, side="right", fill=0):
    """Stack arrays whose length along `axis` differs. Return (stacked, mask of shape (B, longest) int64)."""
    longest = max(a.shape[axis] for a in arrays)
    padded, mask = [], np.zeros((len(arrays), longest), "i8")
    for i, array in enumerate(arrays):
        missing = longest - array.shape[axis]
        widths = [(0, 0)] * array.ndim
        widths[axis] = (missing, 0) if side == "left" else (0, missing)
        padded.append(np.pad(array, widths, constant_values=fill))
        mask[i, slice(missing, None) if side == "left" else slice(array.shape[axis])] = 1
    return np.stack(padded), mask


def pad_attention(arrays, side="right"):
    """Stack attention arrays (..., S, S) of different sizes, padded with zeros."""
    longest = max(a.shape[-1] for a in arrays)
    widths = lambda n: (longest - n, 0) if side == "left" else (0, longest - n)  # noqa: E731
    return np.stack([np.pad(a, [(0, 0)] * (a.ndim - 2) + [widths(a.shape[-1])] * 2) for a in arrays])


def write_json(path, value):
    """Write a value as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def write_lines(path, rows):
    """Write rows as JSON Lines, compressed as the suffix says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_binary(path) as file:
        for row in rows:
            file.write((json.dumps(row) + "\n").encode())


def write_table(path, rows, delimiter=",", encoding="utf-8"):
    """Write a list of dicts as CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding=encoding) as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(path, rows, schema=None):
    """Write a list of dicts as Parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)


def write_rows(path, rows):
    """Write a list of rows in the format that the suffixes of the path name, compressed or not."""
    writers = {".pt": save_pt, ".pth": save_pt, ".csv": write_table, ".parquet": write_parquet, ".json": write_json}
    writers |= {".jsonl": write_lines}
    (suffix,) = [suffix for suffix in path.suffixes if suffix in writers] or [""]
    writers.get(suffix, dump)(path, rows)


@functools.cache
def tiny_model(name="llama", dtype="float32"):
    """Return a random model of transformers with eager attention: llama, gpt2, bert or t5."""
    import torch
    import transformers as tf

    torch.manual_seed(0)
    shared = {"vocab_size": 64, "attn_implementation": "eager"}
    width = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    if name == "llama":
        config = tf.LlamaConfig(**shared, **width, **special, num_key_value_heads=1)
        model = tf.LlamaForCausalLM(config)
    elif name == "gpt2":
        config = tf.GPT2Config(**shared, **special, n_embd=16, n_layer=3, n_head=2, n_positions=64)
        model = tf.GPT2LMHeadModel(config)
    elif name == "bert":
        model = tf.BertForMaskedLM(tf.BertConfig(**shared, **width))
    else:
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 3, "num_heads": 2}
        config = tf.T5Config(**shared, **sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=63)
        model = tf.T5ForConditionalGeneration(config)
    return model.to(getattr(torch, dtype)).eval()


def prompts(count=3, lengths=(6, 9, 5), seed=0):
    """Return token ids of prompts, each (1, P) int64."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 60, (1, lengths[i % len(lengths)]), generator=generator) for i in range(count)]


def left_padded(ids):
    """Return (input_ids, attention_mask), both (B, longest), of prompts padded on the left with 0."""
    import torch

    longest = max(x.shape[1] for x in ids)
    rows = [torch.nn.functional.pad(x[0], (longest - x.shape[1], 0)) for x in ids]
    input_ids = torch.stack(rows)
    return input_ids, (input_ids != 0).long()


def forward(ids, name="llama", dtype="float32", **options):
    """Run a model on token ids (B, S) with hidden states and attentions in the output."""
    import torch

    with torch.no_grad():
        return tiny_model(name, dtype)(
            input_ids=ids, output_hidden_states=True, output_attentions=True, use_cache=False, **options
        )


def generate(ids, new=4, name="llama", attentions=True, **options):
    """Generate `new` tokens after token ids (B, P); return the output object of transformers."""
    import torch

    torch.manual_seed(1)
    with torch.no_grad():
        return tiny_model(name).generate(
            ids,
            attention_mask=options.pop("attention_mask", torch.ones_like(ids)),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=options.pop("do_sample", False),
            return_dict_in_generate=True,
            output_hidden_states=True,
            output_attentions=attentions,
            **options,
        )


def states_of(layers, row=0, keep=slice(None)):
    """Return the hidden states (L, S, D) float32 of one row of a tuple of tensors (B, S, D)."""
    return np.stack([layer[row].float().numpy()[keep] for layer in layers])


def attention_of(layers, row=0, keep=slice(None)):
    """Return the attention (L, H, S, S) float32 of one row of a tuple of tensors (B, H, S, S)."""
    return np.stack([layer[row].float().numpy()[:, keep][:, :, keep] for layer in layers])


def joined_states(steps, row=0, skip=0):
    """Return the hidden states (L, P + n - 1, D) of the prompt pass and the steps of `generate`."""
    layers = range(len(steps[0]))
    return np.stack([np.concatenate([s[k][row].float().numpy() for s in steps])[skip:] for k in layers])


def joined_attention(steps, row=0, skip=0):
    """Return the attention (L, H, S, S) of the prompt pass and the steps of `generate`, S = P + n - 1."""
    size = steps[-1][0].shape[-1]
    layers = []
    for k in range(len(steps[0])):
        rows = [np.pad(s[k][row].float().numpy(), [(0, 0), (0, 0), (0, size - s[k].shape[-1])]) for s in steps]
        layers.append(np.concatenate(rows, 1)[:, skip:, skip:])
    return np.stack(layers)


def expect_output(output, row=0, keep=slice(None), **changes):
    """Return the expected trace of one row of a forward pass: all layers with the embeddings, all heads."""
    trace = {"question_id": None, "hidden_states": states_of(output.hidden_states, row, keep), "has_embeddings": True}
    if output.attentions is not None:
        trace["attention"] = attention_of(output.attentions, row, keep)
    return trace | changes


def expect_generated(output, row=0, skip=0, attention=True, **changes):
    """Return the expected trace of one row of `generate`; `skip` is the number of padding tokens on the left."""
    trace = {
        "question_id": None,
        "hidden_states": joined_states(output.hidden_states, row, skip),
        "has_embeddings": True,
        "tokens": output.sequences[row, skip:-1].tolist(),
        "sequence": output.sequences[row, skip:].tolist(),
    }
    if attention:
        trace["attention"] = joined_attention(output.attentions, row, skip)
    return trace | changes
