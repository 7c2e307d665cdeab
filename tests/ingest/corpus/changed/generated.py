"""Dumps of many structures in many containers, each with the layout that follows from its parameters."""

import itertools

import numpy as np

from tests.ingest.corpus.changed.dumps import Dump
from tests.ingest.corpus.samples import make_samples, pad, pad_attention

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


class Writer:
    """The fields that a dump holds besides the states."""

    def __init__(self, rng, samples, container):
        self.rng, self.samples, self.container = rng, samples, container
        self.has_attention = bool(rng.integers(2))
        self.has_tokens = bool(rng.integers(2))
        self.field = str(rng.choice(["is_correct", "is_hallucinated"]))
        self.files, self.layout = {}, {}

    def label(self, sample):
        """Return the label of a sample under the field of the dump."""
        return int(sample.score) if self.field == "is_correct" else 1 - int(sample.score)

    def labels_by_id(self):
        """Add a table of labels by id."""
        suffix = str(self.rng.choice([".csv", ".json", ".jsonl", ".parquet"]))
        rows = [{"qid": s.question_id, "ok": self.label(s), "question": s.question} for s in self.samples]
        self.files[f"labels{suffix}"] = [rows[k] for k in self.rng.permutation(len(rows))]
        self.layout[self.field] = f"labels{suffix} : [id=qid]/ok"
        self.layout["question"] = f"labels{suffix} : [id=qid]/question"

    def labels_in_order(self, *, with_ids=True):
        """Add a table in the order of the traces."""
        suffix = str(self.rng.choice([".csv", ".json", ".jsonl", ".parquet"]))
        ids = {"qid": lambda s: s.question_id} if with_ids else {}
        row = ids | {"ok": self.label, "question": lambda s: s.question}
        self.files[f"labels{suffix}"] = [{n: of(s) for n, of in row.items()} for s in self.samples]
        self.layout[self.field] = f"labels{suffix} : []/ok"
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
        found = {"hs": sample.hidden}
        found |= {"attn": sample.attention} if self.has_attention else {}
        return found | ({"ids": sample.tokens} if self.has_tokens else {})

    def lines(self, prefix):
        """Add the lines of `fields`."""
        self.layout["hidden_states"] = f"{prefix}hs -> L S D"
        self.layout |= {"attentions": f"{prefix}attn -> L H S S"} if self.has_attention else {}
        self.layout |= {"tokens": f"{prefix}ids -> S"} if self.has_tokens else {}


def items(w):
    """A list of dicts, or rows."""
    rows = [{"qid": s.question_id, **w.fields(s), "question": s.question, "ok": w.label(s)} for s in w.samples]
    w.files[f"a{w.container}"] = rows
    w.lines(f"a{w.container} : [id=qid]/")
    w.layout |= {w.field: f"a{w.container} : [id=qid]/ok", "question": f"a{w.container} : [id=qid]/question"}
    return w.dump("items")


def items_and_table(w):
    """A list of dicts, labels in a table by id."""
    w.files[f"a{w.container}"] = [{"qid": s.question_id, **w.fields(s)} for s in w.samples]
    w.lines(f"a{w.container} : [id=qid]/")
    w.labels_by_id()
    return w.dump("items and table")


def items_in_files(w):
    """Lists of dicts in several files, labels in a table by id."""
    half = (len(w.samples) + 1) // 2
    for k, part in enumerate((w.samples[:half], w.samples[half:])):
        if part:
            w.files[f"run/part-{k}{w.container}"] = [{"qid": s.question_id, **w.fields(s)} for s in part]
    w.lines(f"run/*{w.container} : [id=qid]/")
    w.labels_by_id()
    return w.dump("items in files")


def file_per_id(w):
    """A file per trace, labels in a table by id."""
    for s in w.samples:
        w.files[f"acts/{s.question_id}{w.container}"] = w.fields(s)
    w.lines(f"acts/{{id}}{w.container} : ")
    w.labels_by_id()
    return w.dump("file per id")


def folder_per_class(w):
    """A folder per class of the answer."""
    w.field = "is_correct"
    for s in w.samples:
        verdict = "correct" if s.score else "hallucinated"
        w.files[f"{verdict}/{s.question_id}{w.container}"] = {**w.fields(s)}
    w.lines(f"{{verdict}}/{{id}}{w.container} : ")
    w.layout["is_correct"] = "={verdict}"
    return w.dump("folder per class", question=None)


def dict_by_id(w):
    """A mapping of ids to fields."""
    w.files[f"a{w.container}"] = {s.question_id: w.fields(s) for s in w.samples}
    w.lines(f"a{w.container} : {{id}}/")
    w.labels_by_id()
    return w.dump("dict by id")


def layers_by_name(w):
    """A file per trace with an array per layer."""
    w.has_attention = False
    numbers = [4 * k for k in range(len(w.samples[0].hidden))]
    for s in w.samples:
        fields = {f"layer_{n}": layer for n, layer in zip(numbers, s.hidden, strict=True)}
        w.files[f"{s.question_id}{w.container}"] = fields | ({"ids": s.tokens} if w.has_tokens else {})
    w.layout["hidden_states"] = f"{{id}}{w.container} : layer_{{layer}} -> S D"
    w.layout |= {"tokens": f"{{id}}{w.container} : ids"} if w.has_tokens else {}
    w.labels_by_id()
    return w.dump("layers by name", layers=numbers)


def file_per_layer(w):
    """A file per layer, padded on the right, with lengths; ids and labels in order."""
    w.has_attention = False
    hidden, _ = pad([s.hidden for s in w.samples], 1, fill=float(w.rng.choice([0, 3])))
    for k in range(hidden.shape[1]):
        w.files[f"layer_{k}{w.container}"] = hidden[:, k]
    w.files["lengths.npy"] = np.array([s.hidden.shape[1] for s in w.samples])
    w.layout |= {"hidden_states": f"layer_{{layer}}{w.container} -> N S D", "S.lengths": "lengths.npy -> N"}
    w.layout["S.side"] = "right"
    if w.has_tokens:
        w.files["ids.npy"] = pad([s.tokens for s in w.samples], fill=1)[0]
        w.layout["tokens"] = "ids.npy -> N S"
    w.labels_in_order()
    return w.dump("file per layer", layers=range(hidden.shape[1]))


def file_per_id_and_layer(w):
    """A folder per trace with a file per layer."""
    w.has_attention = w.has_tokens = False
    for s in w.samples:
        for k, layer in enumerate(s.hidden):
            w.files[f"{s.question_id}/layer_{k}{w.container}"] = layer
    w.layout["hidden_states"] = f"{{id}}/layer_{{layer}}{w.container} -> S D"
    w.labels_by_id()
    return w.dump("file per id and layer", layers=range(len(w.samples[0].hidden)))


def _stack(w, samples, order, side, fill):
    """Return the arrays of a padded stack with the axes `order`, and their mask."""
    hidden, mask = pad([s.hidden for s in samples], 1, side, fill)
    arrays = {"hidden": np.ascontiguousarray(hidden.transpose([("NLSD").index(axis) for axis in order]))}
    if w.has_attention:
        arrays["attn"] = pad_attention([s.attention for s in samples], side)
    if w.has_tokens:
        arrays["input_ids"] = pad([s.tokens for s in samples], 0, side, 1)[0]
    return arrays, mask


def _stack_lines(w, file, order):
    w.layout["hidden_states"] = f"{file} : hidden -> {' '.join(order)}"
    w.layout |= {"attentions": f"{file} : attn -> N L H S S"} if w.has_attention else {}
    w.layout |= {"tokens": f"{file} : input_ids -> N S"} if w.has_tokens else {}


def stack_with_mask(w):
    """A padded stack with a mask, ids and labels in order."""
    order, side = str(w.rng.choice(["NLSD", "LNSD", "NSLD"])), str(w.rng.choice(["left", "right"]))
    arrays, mask = _stack(w, w.samples, order, side, float(w.rng.choice([0, 3])))
    w.files[f"a{w.container}"] = {**arrays, "mask": mask}
    _stack_lines(w, f"a{w.container}", order)
    w.layout["S.mask"] = f"a{w.container} : mask -> N S"
    w.labels_in_order()
    return w.dump("stack with mask")


def stack_with_lengths(w):
    """A padded stack with lengths and a stated side."""
    order, side = str(w.rng.choice(["NLSD", "LNSD", "NSLD"])), str(w.rng.choice(["left", "right"]))
    arrays, mask = _stack(w, w.samples, order, side, float(w.rng.choice([0, 3])))
    w.files[f"a{w.container}"] = {**arrays, "lengths": mask.sum(1)}
    _stack_lines(w, f"a{w.container}", order)
    w.layout |= {"S.lengths": f"a{w.container} : lengths -> N", "S.side": side}
    w.labels_in_order()
    return w.dump("stack with lengths")


def ragged(w):
    """Traces behind each other, with offsets, lengths, owners, or a table of ranges."""
    w.has_attention = False
    lengths = [s.hidden.shape[1] for s in w.samples]
    ends = np.cumsum(lengths)
    arrays = {"h": np.concatenate([s.hidden.transpose(1, 0, 2) for s in w.samples])}
    arrays |= {"ids": np.concatenate([s.tokens for s in w.samples])} if w.has_tokens else {}
    w.labels_in_order()
    known = str(w.rng.choice(["S.offsets", "S.lengths", "S.owner", "S.starts"]))
    file = f"a{w.container}"
    if known == "S.starts":
        table = next(iter(w.files))
        for row, begin, end in zip(w.files[table], ends - lengths, ends, strict=True):
            row |= {"start": int(begin), "end": int(end)}
        w.layout |= {"S.starts": f"{table} : []/start", "S.ends": f"{table} : []/end"}
    else:
        values = {"S.offsets": np.array([0, *ends]), "S.lengths": np.array(lengths)}
        values["S.owner"] = np.repeat(np.arange(len(lengths)), lengths)
        arrays["known"] = values[known]
        w.layout[known] = f"{file} : known" + (" -> N" if known == "S.lengths" else "")
    w.files[file] = arrays
    w.layout["hidden_states"] = f"{file} : h -> (N S) L D"
    w.layout |= {"tokens": f"{file} : ids -> (N S)"} if w.has_tokens else {}
    return w.dump("ragged")


def row_per_token(w):
    """A table with a row per token."""
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


def passes(w):
    """The output of generate(): a padded batch of prompts, then passes of one token."""
    new, side = 3, "left"
    w.has_tokens, w.has_attention = True, False
    lengths = [max(s.hidden.shape[1] - new, 1) for s in w.samples]
    for s, n in zip(w.samples, lengths, strict=True):
        num_layers, _, width = s.hidden.shape
        steps = w.rng.standard_normal((num_layers, new, width)).astype("f4")
        s.hidden = np.concatenate([s.hidden[:, :n], steps], 1)
        s.tokens = np.arange(n + new + 1) + int(w.rng.integers(10, 1000))
    hidden, mask = pad([s.hidden[:, :n] for s, n in zip(w.samples, lengths, strict=True)], 1, side, 3.0)
    steps = [list(hidden.swapaxes(0, 1))]
    for k in range(new):
        rows = [s.hidden[:, n + k : n + k + 1] for s, n in zip(w.samples, lengths, strict=True)]
        steps.append(list(np.stack(rows, 1)))
    sequences = pad([s.tokens for s in w.samples], 0, side, 0)[0]
    file = f"g{w.container}"
    w.files[file] = {"hidden_states": steps, "sequences": sequences, "attention_mask": mask}
    w.layout |= {"hidden_states": f"{file} : hidden_states -> P L N S D", "tokens": f"{file} : sequences -> N T"}
    w.layout |= {"S.mask": f"{file} : attention_mask -> N S"}
    w.labels_in_order()
    return w.dump("passes")


def answers(w):
    """Several answers to a question, nested."""
    w.has_tokens = w.has_attention = False
    groups = [w.samples[: len(w.samples) // 2], w.samples[len(w.samples) // 2 :]]
    groups = [group for group in groups if group]
    rows, expected = [], []
    for n, group in enumerate(groups):
        rows.append({"qid": f"q{n}", "samples": [{"hs": s.hidden, "text": s.answer, "ok": w.label(s)} for s in group]})
        expected += [s.expect("answer label", question_id=f"q{n}", sample=k) for k, s in enumerate(group)]
    file = f"s{w.container}"
    w.files[file] = rows
    prefix = f"{file} : [id=qid]/samples/[K]/"
    w.layout |= {"hidden_states": f"{prefix}hs -> L S D", "generated_answer": f"{prefix}text", w.field: f"{prefix}ok"}
    return Dump(f"answers{w.container}", w.files, w.layout, expected)


def prompt_and_answer(w):
    """The states of prompt and answer in two arrays."""
    w.has_attention = w.has_tokens = False
    for s in w.samples:
        at = max(s.hidden.shape[1] - 2, 1)
        parts = {"prompt": s.hidden[:, :at], "answer": s.hidden[:, at:] if s.hidden.shape[1] > 1 else s.hidden}
        s.hidden, s.prompt_length = np.concatenate(list(parts.values()), 1), at
        w.files[f"{s.question_id}{w.container}"] = parts
    w.layout["hidden_states"] = [f"{{id}}{w.container} : {name} -> L S D" for name in ("prompt", "answer")]
    w.labels_by_id()
    dump = w.dump("prompt and answer")
    for s, trace in zip(w.samples, dump.expected, strict=True):
        trace["prompt_length"] = s.prompt_length
    return dump


def stacked_answers(w):
    """Last tokens of several answers to each question (N, K, L, D), labels (N, K)."""
    count = len(w.samples) // 2 or 1
    groups = [w.samples[k * count : (k + 1) * count] for k in range(len(w.samples) // count)]
    w.samples = [s for group in groups for s in group]
    file = f"a{w.container}"
    hidden = np.stack([[s.hidden[:, -1] for s in group] for group in groups])
    w.files[file] = {"h": hidden, "y": np.array([[w.label(s) for s in group] for group in groups])}
    w.files["ids.json"] = [f"q{n}" for n in range(len(groups))]
    w.layout |= {"last_token": f"{file} : h -> N K L D", "question_id": "ids.json -> N", w.field: f"{file} : y -> N K"}
    expected = [
        s.expect_last("label", question_id=f"q{n}", sample=k)
        for n, group in enumerate(groups)
        for k, s in enumerate(group)
    ]
    return Dump(f"stacked answers{w.container}", w.files, w.layout, expected)


def last_tokens(w):
    """States of last tokens (N, L, D), a table in order."""
    arrays = np.stack([s.hidden[:, -1] for s in w.samples])
    file = f"a{w.container}"
    w.files[file] = arrays if w.container == ".npy" else {"h": arrays}
    w.layout["last_token"] = f"{file}{'' if w.container == '.npy' else ' : h'} -> N L D"
    w.labels_in_order(with_ids=bool(w.rng.integers(4)))
    ids = {} if "question_id" in w.layout else {"question_id": None}
    return w.dump("last tokens", last=True, **ids)


def chunks(w):
    """Batches in several files, and one table for all of them in order."""
    w.has_attention = w.has_tokens = False
    order = str(w.rng.choice(["NLSD", "LNSD", "NSLD"]))
    at = [0, max(len(w.samples) // 2, 1), len(w.samples)]
    for k, (begin, end) in enumerate(itertools.pairwise(at)):
        if begin < end:
            arrays, mask = _stack(w, w.samples[begin:end], order, "right", 0)
            w.files[f"batch_{k}{w.container}"] = {**arrays, "lengths": mask.sum(1)}
    _stack_lines(w, f"batch_{{chunk}}{w.container}", order)
    w.layout["S.lengths"] = f"batch_{{chunk}}{w.container} : lengths -> N"
    w.labels_in_order()
    return w.dump("chunks")


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


def generate(rng, sizes):
    """Return a random dump with sizes of `SIZES`."""
    structures = list(STRUCTURES)
    structure = structures[int(rng.integers(len(structures)))]
    container = str(rng.choice(STRUCTURES[structure]))
    return structure(Writer(rng, samples_of(rng, SIZES[sizes]), container))
