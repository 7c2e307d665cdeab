"""Convert every folder of the corpus without a layout, else with its layout; compare the stores with what is expected.

python -m tests.ingest.corpus.measure [--part main|unseen|outside|all] [--only NAME ...] [--width N]
"""

import argparse
import collections
import contextlib
import os
import tempfile
import warnings
from pathlib import Path

import numpy as np

import tracestore
from tests.ingest.corpus.registry import LAYOUTS, PARTS, load
from tracestore.errors import TracestoreError

# Rounding to float16, and of a mean over heads in float16.
CLOSE = {"rtol": 2e-3, "atol": 1e-3}


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
        elif trace.score in (0, 1) and any(np.isclose(value, expected) for value in trace.scores.values()):
            # A judgment is the default, next to the score.
            wrong = float(trace.score == (direction == "hallucination"))
            require(wrong == float(flipped < 0.5), f"judgment {trace.score} ({direction}), score {expected}")
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


def attempt(folder, store, expected, **options):
    """Convert; return (result, detail). Results: equal, wrong, refused, crash."""
    try:
        tracestore.convert_files(folder, store, **options)
    except TracestoreError as error:
        return ("refused" if "\n" not in str(error) else "crash"), str(error)
    except (Exception, SystemExit) as error:
        return "crash", f"{type(error).__name__}: {error}"
    try:
        check_store(store, expected)
    except Difference as error:
        return "wrong", str(error)
    except Exception as error:
        return "crash", f"while reading the store: {type(error).__name__}: {error}"
    return "equal", ""


def written(kind, folder):
    """Write the files of a kind; return their folder and the expected traces."""
    source = folder / kind.name
    source.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return source, kind.write(source)


def measure_kind(kind, folder):
    """Write a folder, convert it without a layout; if that is refused, with its layout.

    Returns
    -------
    (result, detail) : tuple of str
        Result is one of equal, equal with its layout, refused, refused as it should, wrong, crash, skipped.
    """
    if missing := kind.missing():
        return "skipped", f"{', '.join(missing)} is not installed"
    try:
        source, expected = written(kind, folder)
    except ModuleNotFoundError as error:
        return "skipped", str(error)
    result, detail = attempt(source, folder / "alone.zarr", expected)
    if kind.refused:
        return ("refused as it should", detail) if result == "refused" else ("wrong", f"not refused: {result}")
    layout = LAYOUTS.get(kind.name)
    if result != "refused" or layout is None:
        return result, detail
    again, reason = attempt(source, folder / "layout.zarr", expected, layout=layout)
    return ("equal with its layout", detail) if again == "equal" else (again, f"with its layout: {reason}")


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
