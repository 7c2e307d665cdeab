"""Dumps of many structures in many containers, each with the layout that follows from its parameters."""

import numpy as np

from tests.ingest.corpus.changed.dumps import Dump
from tests.ingest.corpus.changed.stacked import (
    answers,
    chunks,
    file_per_layer,
    last_tokens,
    passes,
    prompt_and_answer,
    ragged,
    stack_with_lengths,
    stack_with_mask,
    stacked_answers,
)
from tests.ingest.corpus.samples import make_samples

# Sizes (traces, layers, tokens, width, heads): None is drawn so that all differ.
SIZES = {
    "different sizes": {},
    "N = L": {"count": 3, "layers": 3},
    "L = S": {"layers": 4, "lengths": (4,)},
    "S = D": {"lengths": (8,), "dim": 8},
    "H = L": {"layers": 3, "heads": 3},
    "N = S": {"count": 4, "lengths": (4,)},
    "a batch of one": {"count": 1},
    "one layer": {"layers": 1},
    "one token": {"lengths": (1,)},
    "one head": {"heads": 1},
    "one layer, one token": {"layers": 1, "lengths": (1,)},
}


def samples_of(rng, sizes):
    """Return samples with random sizes, ids and labels."""
    count = int(rng.integers(3, 6))
    lengths = tuple(int(n) for n in rng.permutation([5, 6, 7, 9, 10]))
    drawn = {"count": count, "layers": int(rng.choice([2, 4])), "dim": 12, "heads": int(rng.choice([1, 3]))}
    ids = str(rng.choice(["q{}", "item-{}", "{}"]))
    found = make_samples(**drawn | {"lengths": lengths, "ids": ids, "seed": int(rng.integers(1 << 30))} | sizes)
    for k, sample in enumerate(found):
        sample.score = float(rng.integers(2)) if k > 1 else float(k)
        sample.hidden[np.abs(sample.hidden) < 0.01] = 0.01
    return found


# Keys of fields: names that everybody knows, or short ones that say little.
CLEAR = {"hs": "hidden_states", "attn": "attentions", "ids": "input_ids", "text": "response", "mask": "attention_mask"}


class Writer:
    """The fields that a dump holds besides the states."""

    def __init__(self, rng, samples, container):
        self.rng, self.samples, self.container = rng, samples, container
        self.has_attention = bool(rng.integers(2))
        self.has_tokens = bool(rng.integers(2))
        self.field = str(rng.choice(["is_correct", "is_hallucinated"]))
        self.is_clear = bool(rng.integers(4))
        self.files, self.layout = {}, {}

    def key(self, name):
        """Return the key of a field in the names of the dump."""
        return CLEAR.get(name, name) if self.is_clear else name

    @property
    def ok(self):
        """The key of the label."""
        return self.field if self.is_clear else "ok"

    def label(self, sample):
        """Return the label of a sample under the field of the dump."""
        return int(sample.score) if self.field == "is_correct" else 1 - int(sample.score)

    def labels_by_id(self):
        """Add a table of labels by id."""
        suffix = str(self.rng.choice([".csv", ".json", ".jsonl", ".parquet"]))
        rows = [{"qid": s.question_id, self.ok: self.label(s), "question": s.question} for s in self.samples]
        self.files[f"labels{suffix}"] = [rows[k] for k in self.rng.permutation(len(rows))]
        self.layout[self.field] = f"labels{suffix} : [id=qid]/{self.ok}"
        self.layout["question"] = f"labels{suffix} : [id=qid]/question"

    def labels_in_order(self, *, with_ids=True):
        """Add a table in the order of the traces."""
        suffix = str(self.rng.choice([".csv", ".json", ".jsonl", ".parquet"]))
        ids = {"qid": lambda s: s.question_id} if with_ids else {}
        row = ids | {self.ok: self.label, "question": lambda s: s.question}
        self.files[f"labels{suffix}"] = [{n: of(s) for n, of in row.items()} for s in self.samples]
        self.layout[self.field] = f"labels{suffix} : []/{self.ok}"
        self.layout["question"] = f"labels{suffix} : []/question"
        if with_ids:
            self.layout["question_id"] = f"labels{suffix} : []/qid"

    def dump(self, name, *, last=False, layers=None, **changes):
        """Return the dump with its expected traces."""
        fields = "id question label" if "question_id" not in changes else "question label"
        fields += " tokens" * (self.has_tokens and not last)
        fields += " attention" * (self.has_attention and not last)
        kept = {k: v for k, v in changes.items() if k != "question_id"}
        expected = [s.expect_last(fields, **kept) if last else s.expect(fields, **kept) for s in self.samples]
        return Dump(
            f"{name}{self.container}", self.files, self.layout, expected, None if layers is None else list(layers)
        )

    def fields(self, sample):
        """Return states, attention and tokens of a sample by short keys."""
        found = {self.key("hs"): sample.hidden}
        found |= {self.key("attn"): sample.attention} if self.has_attention else {}
        return found | ({self.key("ids"): sample.tokens} if self.has_tokens else {})

    def lines(self, prefix):
        """Add the lines of `fields`."""
        self.layout["hidden_states"] = f"{prefix}{self.key('hs')} -> L S D"
        self.layout |= {"attentions": f"{prefix}{self.key('attn')} -> L H S S"} if self.has_attention else {}
        self.layout |= {"tokens": f"{prefix}{self.key('ids')} -> S"} if self.has_tokens else {}


def items(w):
    """Write a list of dicts, or rows."""
    rows = [{"qid": s.question_id, **w.fields(s), "question": s.question, w.ok: w.label(s)} for s in w.samples]
    w.files[f"a{w.container}"] = rows
    w.lines(f"a{w.container} : [id=qid]/")
    w.layout |= {w.field: f"a{w.container} : [id=qid]/{w.ok}", "question": f"a{w.container} : [id=qid]/question"}
    return w.dump("items")


def items_and_table(w):
    """Write a list of dicts, labels in a table by id."""
    w.files[f"a{w.container}"] = [{"qid": s.question_id, **w.fields(s)} for s in w.samples]
    w.lines(f"a{w.container} : [id=qid]/")
    w.labels_by_id()
    return w.dump("items and table")


def items_in_files(w):
    """Write lists of dicts in several files, labels in a table by id."""
    half = (len(w.samples) + 1) // 2
    for k, part in enumerate((w.samples[:half], w.samples[half:])):
        if part:
            w.files[f"run/part-{k}{w.container}"] = [{"qid": s.question_id, **w.fields(s)} for s in part]
    w.lines(f"run/*{w.container} : [id=qid]/")
    w.labels_by_id()
    return w.dump("items in files")


def file_per_id(w):
    """Write a file per trace, labels in a table by id."""
    for s in w.samples:
        w.files[f"acts/{s.question_id}{w.container}"] = w.fields(s)
    w.lines(f"acts/{{id}}{w.container} : ")
    w.labels_by_id()
    return w.dump("file per id")


def folder_per_class(w):
    """Write a folder per class of the answer."""
    w.field = "is_correct"
    for s in w.samples:
        verdict = "correct" if s.score else "hallucinated"
        w.files[f"{verdict}/{s.question_id}{w.container}"] = {**w.fields(s)}
    w.lines(f"{{verdict}}/{{id}}{w.container} : ")
    w.layout["is_correct"] = "={verdict}"
    return w.dump("folder per class", question=None)


def dict_by_id(w):
    """Write a mapping of ids to fields."""
    w.files[f"a{w.container}"] = {s.question_id: w.fields(s) for s in w.samples}
    w.lines(f"a{w.container} : {{id}}/")
    w.labels_by_id()
    return w.dump("dict by id")


def layers_by_name(w):
    """Write a file per trace with an array per layer."""
    w.has_attention = False
    numbers = [4 * k for k in range(len(w.samples[0].hidden))]
    for s in w.samples:
        fields = {f"layer_{n}": layer for n, layer in zip(numbers, s.hidden, strict=True)}
        w.files[f"{s.question_id}{w.container}"] = fields | ({w.key("ids"): s.tokens} if w.has_tokens else {})
    w.layout["hidden_states"] = f"{{id}}{w.container} : layer_{{layer}} -> S D"
    w.layout |= {"tokens": f"{{id}}{w.container} : {w.key('ids')}"} if w.has_tokens else {}
    w.labels_by_id()
    return w.dump("layers by name", layers=numbers)


def file_per_id_and_layer(w):
    """Write a folder per trace with a file per layer."""
    w.has_attention = w.has_tokens = False
    for s in w.samples:
        for k, layer in enumerate(s.hidden):
            w.files[f"{s.question_id}/layer_{k}{w.container}"] = layer
    w.layout["hidden_states"] = f"{{id}}/layer_{{layer}}{w.container} -> S D"
    w.labels_by_id()
    return w.dump("file per id and layer", layers=range(len(w.samples[0].hidden)))


def row_per_token(w):
    """Write a table with a row per token."""
    w.has_attention = False
    rows = []
    for s in w.samples:
        for pos, token in enumerate(s.tokens):
            layers = {f"l{k}": layer[pos].tolist() for k, layer in enumerate(s.hidden)}
            rows.append({"example": s.question_id, "pos": pos, **layers, "tok": int(token)})
    w.has_tokens = True
    w.files[f"t{w.container}"] = rows
    prefix = f"t{w.container} : [id=example, token=pos]"
    w.layout |= {"hidden_states": f"{prefix}/l{{layer}} -> D", "tokens": f"{prefix}/tok"}
    w.labels_by_id()
    return w.dump("row per token", layers=range(len(w.samples[0].hidden)))


STRUCTURES = {
    items: (".pkl", ".pt", ".json", ".jsonl", ".parquet"),
    items_and_table: (".pkl", ".pt", ".json", ".jsonl", ".parquet"),
    items_in_files: (".pkl", ".pt", ".json", ".jsonl", ".parquet"),
    file_per_id: (".npz", ".pkl", ".pt", ".safetensors", ".h5"),
    folder_per_class: (".npz", ".pkl", ".pt", ".safetensors", ".h5"),
    dict_by_id: (".pkl", ".pt", ".h5"),
    layers_by_name: (".npz", ".pkl", ".pt", ".safetensors", ".h5"),
    file_per_layer: (".npy", ".pt", ".pkl"),
    file_per_id_and_layer: (".npy", ".pt"),
    stack_with_mask: (".npz", ".pkl", ".pt", ".safetensors", ".h5"),
    stack_with_lengths: (".npz", ".pkl", ".pt", ".safetensors", ".h5"),
    ragged: (".npz", ".pkl", ".pt", ".safetensors", ".h5"),
    row_per_token: (".jsonl", ".parquet", ".json"),
    passes: (".pkl", ".pt"),
    answers: (".pkl", ".pt", ".json", ".jsonl", ".parquet"),
    prompt_and_answer: (".npz", ".pkl", ".pt", ".safetensors", ".h5"),
    stacked_answers: (".npz", ".pkl", ".pt", ".h5"),
    last_tokens: (".npy", ".npz", ".pkl", ".safetensors", ".h5"),
    chunks: (".npz", ".pkl", ".pt", ".safetensors", ".h5"),
}


def chosen(rng):
    """Return a function that writes dumps of one random structure in one container, with sizes of `SIZES`."""
    structures = list(STRUCTURES)
    structure = structures[int(rng.integers(len(structures)))]
    container = str(rng.choice(STRUCTURES[structure]))
    return lambda sizes: structure(Writer(rng, samples_of(rng, SIZES[sizes]), container))
