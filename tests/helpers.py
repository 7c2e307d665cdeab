"""Traces and files of every input format, and commands that run on them."""

import contextlib
import csv
import gzip
import hashlib
import importlib.util
import io
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

import tracestore
from tracestore.ingest import sources
from tracestore.ingest.builtin.parts import find_sources
from tracestore.store.format import schema

ROOT = Path(__file__).resolve().parent.parent


def make_trace(k, *, tokens=None, layers=3, dim=8, heads=2, dtype="f2", causal=True, seed=0):
    """Return a trace in the pickle schema, with random values that `seed` and `k` determine."""
    rng = np.random.default_rng([seed, k])
    num_tokens = 1 + k % 5 if tokens is None else tokens
    attention = rng.random((layers, heads, num_tokens, num_tokens))
    attention = np.tril(attention) if causal else attention
    return {
        "hidden_states": list(rng.standard_normal((layers, num_tokens, dim)).astype(dtype)),
        "attentions": list(attention.astype(dtype)),
        "tokens": rng.integers(0, 50_000, num_tokens),
        "tokens_decoded": [f"t{i}é\n" for i in range(num_tokens)],
        "generated_answer_clean": f"answer {k} ✓",
        "question_id": f"q{k}",
    }


def make_traces(count, **options):
    """Return the traces 0 to `count` - 1 of `make_trace`. An option may be a function of the number of the trace."""
    return [make_trace(k, **{n: v(k) if callable(v) else v for n, v in options.items()}) for k in range(count)]


def make_optional(num_tokens, seed=0):
    """Return a value for each field of schema.OPTIONAL_FIELDS, with random numbers in their stored dtype."""
    rng, values = np.random.default_rng(seed), {}
    for name, field in schema.TOKEN_FIELDS.items():
        shape = (num_tokens, 3) if field.shape == schema.TOP_K else (num_tokens,)
        if field.dtype == "<f4":
            values[name] = np.abs(rng.standard_normal(shape)).astype("<f4") * (-1 if field.maximum < 1 else 1)
            values[name].flat[0] = np.nan
        else:
            values[name] = rng.integers(field.fill, field.maximum, shape, field.dtype, endpoint=True)
    spans = [{"start": 1, "end": 4, "type": "Evident Conflict", "meta": {"a": [None, 1.5, float("inf")]}}]
    return values | {"answer_span": (0, num_tokens), "temperature": 0.75, "seed": 2**40 + seed, "spans": spans}


def write_store(path, traces, *, score=None, label=None, group="", commit_after=(), **options):
    """Write traces into a store and return its path.

    `score`, `label` and `group` are the values of all traces, or functions of their position. `commit_after` holds
    positions. `options` are those of `tracestore.create`.
    """
    values = {"score": score, "label": label, "group": group}
    with tracestore.create(path, **options) as writer:
        for k, trace in enumerate(traces):
            writer.append(trace, **{name: v(k) if callable(v) else v for name, v in values.items()})
            if k in commit_after:
                writer.flush()
    return path


def as_torch(trace, dtype=None):
    """Return the same trace with tensors instead of arrays."""
    import torch

    def convert(array):
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor if dtype is None else tensor.to(dtype)

    arrays = {name: [convert(a) for a in trace[name]] for name in ("hidden_states", "attentions")}
    return trace | arrays | {"tokens": torch.from_numpy(trace["tokens"])}


def write_pickle(path, value, protocol=4):
    """Pickle a value, compressed if the path ends with .gz, into a folder that may be new; return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wb") as file:
        pickle.dump(value, file, protocol=protocol)
    return path


def write_scores(path, scores, column="score", extra=()):
    """Write the scores by question id, with extra columns [(name, values by question id)]; return the path."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["question_id", column, *[name for name, _ in extra]])
        for question_id, score in scores.items():
            writer.writerow([question_id, score, *[values[question_id] for _, values in extra]])
    return path


def make_graphs(trace, *, reverse=False, threshold=0.0):
    """Return the PyG graph of each layer of a trace, with edges from the head-averaged attention."""
    import torch
    from torch_geometric.data import Data

    layers = []
    for hidden, attention in zip(trace["hidden_states"], trace["attentions"], strict=True):
        mean = attention.astype("f8").mean(0).astype("f2")
        target, source = np.nonzero(np.tril(mean) > threshold)
        pairs = [target, source] if reverse else [source, target]
        layers.append(
            Data(
                x=torch.from_numpy(hidden.copy()),
                edge_index=torch.from_numpy(np.stack(pairs)),
                edge_attr=torch.from_numpy(mean[target, source]).unsqueeze(1),
                num_nodes=len(hidden),
                num_possible_edges=mean.size,
                num_filtered_edges=len(source),
                filter_ratio=len(source) / mean.size,
            )
        )
    return layers


def load_script(path):
    """Return a script of the checkout as a module."""
    spec = importlib.util.spec_from_file_location(f"{Path(path).stem}_script", ROOT / path)
    # dataclasses look up their module.
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_cli(*args, check=None, env=None, **options):
    """Run Python with these arguments from the root of the checkout; return the finished process."""
    process = subprocess.run(
        [sys.executable, *map(str, args)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        timeout=240,
        **options,
    )
    if check is not None:
        assert process.returncode == check, f"exit {process.returncode}\n{process.stdout}\n{process.stderr}"
    return process


def command(*words, check=None):
    """Run `tracestore` with these arguments in this process; return the same as `run_cli`."""
    from tracestore.cli import main

    argv, out, err = [str(word) for word in words], io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    done = subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())
    if check is not None:
        assert code == check, f"exit {code}\n{done.stdout}\n{done.stderr}"
    return done


def convert(*args, check=0):
    """Run `tracestore convert` in this process."""
    return command("convert", *args, check=check)


def field_flags(*lines):
    """Return the options of a command that state the lines of a layout."""
    return [word for line in lines for word in ("--field", line)]


def error_of(*words, code):
    """Run a command that fails with this exit code; return its error message after checking that it is one line."""
    done = command(*words, check=code)
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def read_traces(path, name, *, need_attention=True):
    """Yield the traces of one file of a built-in layout; see `tracestore.ingest.sources.read_traces`."""
    (source,) = find_sources([path], path.parent / "none")
    return sources.read_traces(replace(source, name=name), need_attention)


def read_all(store):
    """Return all fields of the traces of a store as plain values, for comparisons."""
    traces = []
    for trace in store:
        traces.append(
            {
                "question_id": trace.question_id,
                "hidden": trace.hidden_states.tobytes(),
                "attention": trace.attention.tobytes(),
                "last": trace.last_token.tobytes(),
                "tokens": None if trace.tokens is None else trace.tokens.tolist(),
                "decoded": trace.tokens_decoded,
                "answer": trace.answer,
                "score": trace.score,
            }
        )
    return traces


def tree_bytes(store):
    """Return the bytes of every file of a store except the lock, by path."""
    store = Path(store)
    return {
        p.relative_to(store).as_posix(): p.read_bytes()
        for p in sorted(store.rglob("*"))
        if p.is_file() and p.name != "lock"
    }


def segment_of(store, number=0):
    """Return the path of a segment in a store."""
    with tracestore.open(store) as opened:
        return opened.internals.index.segment(number).path


def tree_digest(folder):
    """Return a hash of the names, kinds, link targets and bytes of all files below a folder."""
    digest = hashlib.blake2b()
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        digest.update(f"{path.relative_to(folder)}\0{status.st_mode}\0".encode())
        if path.is_symlink():
            digest.update(os.readlink(path).encode())
        elif path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()
