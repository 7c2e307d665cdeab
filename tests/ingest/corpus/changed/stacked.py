"""Dumps whose arrays hold several traces: padded stacks, rows behind each other, passes, answers."""

import itertools

import numpy as np

from tests.ingest.corpus.changed.dumps import Dump
from tests.ingest.corpus.samples import pad, pad_attention


def file_per_layer(w):
    """Write a file per layer, padded on the right, with lengths; ids and labels in order."""
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


def _stack(w, samples, order, side, fill):
    """Return the arrays of a padded stack with the axes `order`, and their mask."""
    hidden, mask = pad([s.hidden for s in samples], 1, side, fill)
    arrays = {w.key("hs"): np.ascontiguousarray(hidden.transpose([("NLSD").index(axis) for axis in order]))}
    if w.has_attention:
        arrays[w.key("attn")] = pad_attention([s.attention for s in samples], side)
    if w.has_tokens:
        arrays["input_ids"] = pad([s.tokens for s in samples], 0, side, 1)[0]
    return arrays, mask


def _stack_lines(w, file, order):
    w.layout["hidden_states"] = f"{file} : {w.key('hs')} -> {' '.join(order)}"
    w.layout |= {"attentions": f"{file} : {w.key('attn')} -> N L H S S"} if w.has_attention else {}
    w.layout |= {"tokens": f"{file} : input_ids -> N S"} if w.has_tokens else {}


def stack_with_mask(w):
    """Write a padded stack with a mask, ids and labels in order."""
    order, side = str(w.rng.choice(["NLSD", "LNSD", "NSLD"])), str(w.rng.choice(["left", "right"]))
    arrays, mask = _stack(w, w.samples, order, side, float(w.rng.choice([0, 3])))
    w.files[f"a{w.container}"] = {**arrays, w.key("mask"): mask}
    _stack_lines(w, f"a{w.container}", order)
    w.layout["S.mask"] = f"a{w.container} : {w.key('mask')} -> N S"
    w.labels_in_order()
    return w.dump("stack with mask")


def stack_with_lengths(w):
    """Write a padded stack with lengths and a stated side."""
    order, side = str(w.rng.choice(["NLSD", "LNSD", "NSLD"])), str(w.rng.choice(["left", "right"]))
    arrays, mask = _stack(w, w.samples, order, side, float(w.rng.choice([0, 3])))
    w.files[f"a{w.container}"] = {**arrays, "lengths": mask.sum(1)}
    _stack_lines(w, f"a{w.container}", order)
    w.layout |= {"S.lengths": f"a{w.container} : lengths -> N", "S.side": side}
    w.labels_in_order()
    return w.dump("stack with lengths")


def ragged(w):
    """Write traces behind each other, with offsets, lengths, owners, or a table of ranges."""
    w.has_attention = False
    lengths = [s.hidden.shape[1] for s in w.samples]
    ends = np.cumsum(lengths)
    arrays = {w.key("hs"): np.concatenate([s.hidden.transpose(1, 0, 2) for s in w.samples])}
    arrays |= {w.key("ids"): np.concatenate([s.tokens for s in w.samples])} if w.has_tokens else {}
    w.labels_in_order()
    known = str(w.rng.choice(["S.offsets", "S.lengths", "S.owner", "S.starts"]))
    file = f"a{w.container}"
    key = known[2:] if w.is_clear else "known"
    if known == "S.starts":
        table = next(iter(w.files))
        for row, begin, end in zip(w.files[table], ends - lengths, ends, strict=True):
            row |= {"start": int(begin), "end": int(end)}
        w.layout |= {"S.starts": f"{table} : []/start", "S.ends": f"{table} : []/end"}
    else:
        values = {"S.offsets": np.array([0, *ends]), "S.lengths": np.array(lengths)}
        values["S.owner"] = np.repeat(np.arange(len(lengths)), lengths)
        arrays[key] = values[known]
        w.layout[known] = f"{file} : {key}" + (" -> N" if known == "S.lengths" else "")
    w.files[file] = arrays
    w.layout["hidden_states"] = f"{file} : {w.key('hs')} -> (N S) L D"
    w.layout |= {"tokens": f"{file} : {w.key('ids')} -> (N S)"} if w.has_tokens else {}
    return w.dump("ragged")


def passes(w):
    """Write the output of generate(): a padded batch of prompts, then passes of one token."""
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
    fill = int(w.rng.choice([0, 2]))
    if w.rng.integers(2):
        w.layout["S.pad"] = [fill, 2]
        ended, n = w.samples[-1], lengths[-1]
        ended.tokens[n + 1 :] = [2, *[fill] * (new - 1)]
    sequences = pad([s.tokens for s in w.samples], 0, side, fill)[0]
    if "S.pad" in w.layout:  # the last row ended early
        ended.tokens, ended.hidden = ended.tokens[: n + 2], ended.hidden[:, : n + 1]
    file = f"g{w.container}"
    w.files[file] = {"hidden_states": steps, "sequences": sequences, "attention_mask": mask}
    w.layout |= {"hidden_states": f"{file} : hidden_states -> P L N S D", "tokens": f"{file} : sequences -> N T"}
    w.layout |= {"S.mask": f"{file} : attention_mask -> N S"}
    w.labels_in_order()
    return w.dump("passes")


def answers(w):
    """Write several answers to a question, nested."""
    w.has_tokens = w.has_attention = False
    groups = [w.samples[: len(w.samples) // 2], w.samples[len(w.samples) // 2 :]]
    groups = [group for group in groups if group]
    rows, expected = [], []
    for n, group in enumerate(groups):
        found = [{w.key("hs"): s.hidden, w.key("text"): s.answer, w.ok: w.label(s)} for s in group]
        rows.append({"qid": f"q{n}", "samples": found})
        expected += [s.expect("answer label", question_id=f"q{n}", sample=k) for k, s in enumerate(group)]
    file = f"s{w.container}"
    w.files[file] = rows
    prefix = f"{file} : [id=qid]/samples/[K]/"
    w.layout["hidden_states"] = f"{prefix}{w.key('hs')} -> L S D"
    w.layout |= {"generated_answer": f"{prefix}{w.key('text')}", w.field: f"{prefix}{w.ok}"}
    return Dump(f"answers{w.container}", w.files, w.layout, expected)


def prompt_and_answer(w):
    """Write the states of prompt and answer in two arrays."""
    w.has_attention = w.has_tokens = False
    names = ("prompt_hidden_states", "answer_hidden_states") if w.is_clear else ("prompt", "answer")
    for s in w.samples:
        at = max(s.hidden.shape[1] - 2, 1)
        parts = {names[0]: s.hidden[:, :at], names[1]: s.hidden[:, at:] if s.hidden.shape[1] > 1 else s.hidden}
        s.hidden, s.prompt_length = np.concatenate(list(parts.values()), 1), at
        w.files[f"{s.question_id}{w.container}"] = parts
    w.layout["hidden_states"] = [f"{{id}}{w.container} : {name} -> L S D" for name in names]
    w.labels_by_id()
    dump = w.dump("prompt and answer")
    for s, trace in zip(w.samples, dump.expected, strict=True):
        trace["prompt_length"] = s.prompt_length
    return dump


def stacked_answers(w):
    """Write last tokens of several answers to each question (N, K, L, D), labels (N, K)."""
    count = len(w.samples) // 2 or 1
    groups = [w.samples[k * count : (k + 1) * count] for k in range(len(w.samples) // count)]
    w.samples = [s for group in groups for s in group]
    file = f"a{w.container}"
    h, y = ("last_token_hidden_states", w.field) if w.is_clear else ("h", "y")
    hidden = np.stack([[s.hidden[:, -1] for s in group] for group in groups])
    w.files[file] = {h: hidden, y: np.array([[w.label(s) for s in group] for group in groups])}
    w.files["ids.json"] = [f"q{n}" for n in range(len(groups))]
    w.layout |= {
        "last_token": f"{file} : {h} -> N K L D",
        "question_id": "ids.json -> N",
        w.field: f"{file} : {y} -> N K",
    }
    expected = [
        s.expect_last("label", question_id=f"q{n}", sample=k)
        for n, group in enumerate(groups)
        for k, s in enumerate(group)
    ]
    return Dump(f"stacked answers{w.container}", w.files, w.layout, expected)


def last_tokens(w):
    """Write states of last tokens (N, L, D), a table in order."""
    arrays = np.stack([s.hidden[:, -1] for s in w.samples])
    h = "last_token_hidden_states" if w.is_clear else "h"
    file = f"a{w.container}"
    w.files[file] = arrays if w.container == ".npy" else {h: arrays}
    w.layout["last_token"] = f"{file}{'' if w.container == '.npy' else f' : {h}'} -> N L D"
    w.labels_in_order(with_ids=bool(w.rng.integers(4)))
    ids = {} if "question_id" in w.layout else {"question_id": None}
    return w.dump("last tokens", last=True, **ids)


def chunks(w):
    """Write batches in several files, and one table for all of them in order."""
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
