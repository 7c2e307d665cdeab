"""Convert every folder of the corpus and compare the stores with the expected traces.

python -m tests.ingest.corpus.measure [--part main|unseen|outside|all] [--only NAME ...] [--width N]
"""

import argparse
import collections
import contextlib
import os
import re
import tempfile
import warnings
from pathlib import Path

import numpy as np

import tracestore
from tests.helpers import command
from tests.ingest.corpus.registry import PARTS, load

# Rounding to float16, and of a mean over heads in float16.
CLOSE = {"rtol": 2e-3, "atol": 1e-3}
# The value of --map may be a list: field=key,field=key.
PROPOSAL = re.compile(r"(--[a-z-]+) ([^\s,;'\"`()]+(?:,\w+=[^\s,;'\"`()]+)*)")


class Difference(Exception):
    """A value of the store is not the source's."""


def require(condition, message):
    """Raise Difference unless the condition holds."""
    if not condition:
        raise Difference(message)


def same_array(got, wanted):
    """Return whether an array of the store holds the wanted values."""
    got, wanted = np.asarray(got, "f4"), np.asarray(wanted, "f4")
    return got.shape == wanted.shape and np.allclose(got, wanted, **CLOSE)


def same_states(got, wanted, has_embeddings):
    """Return whether hidden states are equal. The layer of the embeddings may have been left out."""
    return same_array(got, wanted) or (has_embeddings and same_array(got, wanted[1:]))


def same_attention(got, wanted, has_embeddings):
    """Return whether attention is equal, or equal after the mean over heads."""
    got, wanted = np.asarray(got, "f4"), np.asarray(wanted, "f4")
    if wanted.ndim == 4 and got.ndim == 3:
        wanted = wanted.mean(1)
    # A store has as many attention as hidden layers, so that a layer for the embeddings may have been added.
    return same_array(got, wanted) or (has_embeddings and same_array(got[1:], wanted))


def states_equal(trace, wanted):
    """Return whether the states of a trace of the store are those of an expected trace."""
    if wanted["hidden_states"] is None:
        return same_array(trace.last_token, wanted["last_token"])
    with contextlib.suppress(tracestore.errors.TracestoreError, KeyError, ValueError, AttributeError):
        return same_states(trace.hidden_states, wanted["hidden_states"], wanted.get("has_embeddings", False))
    return False


def check_score(trace, wanted, direction):
    """Compare score and label: a score in the expected direction, or a label that says the same."""
    expected, meaning = wanted.get("score"), wanted.get("direction", "correct")
    if "score" in wanted and expected is None:
        require(np.isnan(trace.score), f"score {trace.score} where the source has none")
    elif "score" in wanted:
        flipped = 1 - expected if meaning == "hallucination" else expected
        if np.isnan(trace.score):
            require(trace.label == float(flipped < 0.5), f"label {trace.label} and no score, expected score {expected}")
        elif direction == "hallucination":
            require(np.isclose(trace.score, 1 - flipped), f"score {trace.score} ({direction}), expected {1 - flipped}")
        else:
            require(np.isclose(trace.score, flipped), f"score {trace.score} ({direction}), expected {flipped}")
    if "label" in wanted and trace.label != wanted["label"]:
        known = not np.isnan(trace.score)
        by_score = float(trace.score >= 0.5 if direction == "hallucination" else trace.score < 0.5)
        require(known and by_score == wanted["label"], f"label {trace.label}, expected {wanted['label']}")


def check_trace(trace, wanted, direction):
    """Compare one trace with the expected one; raise Difference."""
    require(states_equal(trace, wanted), "hidden states differ")
    if wanted.get("attention") is not None:
        try:
            got = trace.attention
        except (tracestore.errors.TracestoreError, KeyError, ValueError, AttributeError):
            got = None
        require(got is not None, "attention is missing")
        require(same_attention(got, wanted["attention"], wanted.get("has_embeddings", False)), "attention differs")
    if wanted.get("tokens") is not None:
        # generate() gives one token more than it gives states; a store may keep it.
        got = None if trace.tokens is None else trace.tokens.tolist()
        require(got in (wanted["tokens"], wanted.get("sequence")), f"tokens: {got}, expected {wanted['tokens']}")
    for name in ("tokens_decoded", "question", "answer", "prompt_length"):
        if wanted.get(name) is not None:
            got = getattr(trace, name)
            got = got.tolist() if isinstance(got, np.ndarray) else got
            require(got == wanted[name], f"{name}: {str(got)[:60]!r}, expected {str(wanted[name])[:60]!r}")
    check_score(trace, wanted, direction)


def check_store(path, expected):
    """Compare a store with the expected traces; raise Difference."""
    with tracestore.open(path) as store:
        require(len(store) == len(expected), f"{len(store)} traces, expected {len(expected)}")
        traces = list(store)
        for wanted in expected:
            if wanted["question_id"] is None:
                found = [t for t in traces if states_equal(t, wanted)]
                require(found, "no trace has the hidden states of an expected one")
            else:
                key = (wanted["question_id"], wanted.get("sample", 0))
                found = [t for t in traces if (t.question_id, t.sample) == key]
                ids = sorted({t.question_id for t in traces})[:4]
                require(found, f"no trace {key[0]!r} (sample {key[1]}), only {ids}")
            check_trace(found[0], wanted, store.score_direction)


def proposals(text):
    """Return the flags that a message proposes, in turn, one list per proposal."""
    return [list(match) for match in PROPOSAL.findall(text)]


def attempt(folder, store, expected, flags):
    """Convert with flags; return (result, detail). Results: equal, wrong, refused, crash."""
    try:
        done = command("convert", folder, store, *flags)
    except (Exception, SystemExit) as error:
        return "crash", f"{type(error).__name__}: {error}"
    message = done.stderr.strip()
    if done.returncode != 0:
        one_line = message.count("\n") == 0 and message
        return ("refused" if one_line and done.returncode in (2, 3) else "crash"), message
    try:
        check_store(store, expected)
    except Difference as error:
        return "wrong", str(error)
    except Exception as error:
        return "crash", f"while reading the store: {type(error).__name__}: {error}"
    return "equal", ""


def measure_kind(kind, folder):
    """Write a folder, convert it without flags, with proposed flags, with its natural flag.

    Returns
    -------
    (result, detail) : tuple of str
        Result is one of equal, equal with proposed flag, equal with natural flag, refused, refused as it should,
        wrong, crash, not written, skipped.
    """
    if missing := kind.missing():
        return "skipped", f"{', '.join(missing)} is not installed"
    source = folder / kind.name
    source.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = kind.write(source)
        except ModuleNotFoundError as error:
            return "skipped", str(error)
        except Exception as error:
            return "not written", f"{type(error).__name__}: {error}"
    result, detail = attempt(source, folder / "store0.zarr", expected, [])
    if kind.refused:
        return ("refused as it should", detail) if result == "refused" else ("wrong", f"not refused: {result}")
    # A wrong value without a flag is wrong whatever a flag does, except that a score was not found.
    if result in ("equal", "crash") or (result == "wrong" and not detail.startswith(("score nan", "label nan"))):
        return result, detail
    text = detail + " " + command("convert", "--dry-run", source, folder / "dry.zarr").stdout
    tries = [("proposed", flags) for flags in proposals(text)[:4]]
    tries += [("natural", list(kind.flags))] if kind.flags else []
    for n, (origin, flags) in enumerate(tries, 1):
        again, _ = attempt(source, folder / f"store{n}.zarr", expected, flags)
        if again == "equal":
            return f"equal with {origin} flag", f"{' '.join(flags)} (before: {result}: {detail})"
    return result, detail


def measure(part="all", only=(), measure_kind=measure_kind):
    """Yield (name, result, detail) of each kind of a part of the corpus."""
    for name, kind in load(part).items():
        if not only or name in only:
            with tempfile.TemporaryDirectory() as folder:
                yield name, *measure_kind(kind, Path(folder))


def main(argv=None, description=__doc__, measure_kind=measure_kind):
    """Print a table of the results of `measure_kind` and their totals."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all")
    parser.add_argument("--only", nargs="*", default=())
    parser.add_argument("--width", type=int, default=150, help="characters of a detail that are printed")
    options = parser.parse_args(argv)
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    for part in PARTS if options.part == "all" else (options.part,):
        totals = collections.Counter()
        for name, result, detail in measure(part, options.only, measure_kind):
            totals[result] += 1
            print(f"{name:40} {result:24} {detail[: options.width]}", flush=True)
        print(f"== {part}: {sum(totals.values())} kinds: " + ", ".join(f"{n} {r}" for r, n in totals.most_common()))


if __name__ == "__main__":
    main()
