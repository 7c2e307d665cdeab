"""Convert changed dumps whose meaning is known in three ways, and count what is right, refused or wrong."""

import collections
import contextlib
import copy
import itertools
import shutil
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import tracestore
from tests.ingest.corpus import measure
from tests.ingest.corpus.changed import (
    changed_arrays,  # noqa: F401 - it registers mutations, as the next one
    changed_rows,  # noqa: F401
    generated,
)
from tests.ingest.corpus.changed.dumps import Dump
from tests.ingest.corpus.changed.mutations import MUTATIONS, NONE, PART
from tests.ingest.propose.folders import check_outcome, propose_folder
from tests.machine import folder_in_memory
from tracestore.ingest.builtin.claiming import claim
from tracestore.ingest.builtin.library import builtins
from tracestore.ingest.execute.claims import list_files

SCRATCH = folder_in_memory()


@dataclass
class Outcome:
    """Result of the conversion of a changed dump."""

    kind: str
    mutation: str
    way: str
    result: str  # right, refused or wrong
    detail: str = ""


def judge(dump, folder, means, layout):
    """Return (result, detail) of a conversion by a layout, or without one if it is None."""
    store = folder.parent / "store.zarr"
    if refusal := convert(folder, store, layout):
        return refusal
    if means == NONE:
        return "wrong", "converted, expected a refusal"
    try:
        compare(store, dump, is_part=means == PART)
    except measure.Difference as error:
        return "wrong", str(error)
    return "right", ""


def convert(folder, store, layout):
    """Convert a folder; return (result, detail) if that fails, else None."""
    shutil.rmtree(store, ignore_errors=True)
    try:
        tracestore.convert_files(folder, store, layout=layout)
    except tracestore.errors.TracestoreError as error:
        return ("refused" if error.exit_code in (2, 3) else "wrong"), str(error)
    except Exception as error:
        return "wrong", f"{type(error).__name__}: {error}"
    return None


def with_layout(dump, folder, means):
    """Convert a dump by its layout."""
    return judge(dump, folder, means, dump.layout)


def alone(dump, folder, means):
    """Convert a dump without a layout, as `tracestore convert` does."""
    return judge(dump, folder, means, None)


def takes_one_more_id(folder):
    """Return whether a built-in layout of the files states that a trace may have one id more than states (rule 3)."""
    return any(
        "T" in (a.axes or ())
        for b in claim(list_files([folder], folder / "-"), builtins()).owned
        for a in b.layout.addresses.get("tokens", ())
    )


def candidates(dump, folder, means):
    """Convert a dump by each candidate that is printed for it.

    Right: one of them gives the meaning of the dump. Wrong: one gives something else than it printed.
    """
    store, result = folder.parent / "store.zarr", ("refused", "no candidate has the meaning of the dump")
    for candidate in propose_folder([folder]).candidates:
        layout = candidate.layout.to_entries()
        if refusal := convert(folder, store, layout):
            if refusal[0] == "wrong":
                return refusal
            continue
        try:
            check_outcome(store, candidate)
        except AssertionError as error:
            return "wrong", f"{candidate.gives()}: {layout}: {error}"
        with contextlib.suppress(measure.Difference):
            compare(store, dump, is_part=means == PART)
            result = "right", ""
    return result


WAYS = {"layout": with_layout, "alone": alone, "candidates": candidates}


def compare(store, dump, *, is_part):
    """Raise Difference unless a store holds the expected traces, or a part of them."""
    expected = dump.expected
    if is_part:
        with tracestore.open(store) as opened:
            keys = {(trace.question_id, trace.sample) for trace in opened}
            arrays = [copy_of(trace) for trace in opened]
        measure.require(keys, "no traces")
        unnamed = [t for t in expected if t["question_id"] is None and any(measure.states_equal(a, t) for a in arrays)]
        expected = [t for t in expected if (t["question_id"], t.get("sample", 0)) in keys] + unnamed
    measure.check_store(store, expected)
    if dump.layers is not None:
        with tracestore.open(store) as opened:
            found = [p.layer_ids for p in opened.provenance]
        measure.require(found == [tuple(dump.layers)], f"layers {found}, expected {dump.layers}")


def copy_of(trace):
    """Return the states of a trace that outlive its store."""
    try:
        states = np.array(trace.hidden_states)
    except (tracestore.errors.TracestoreError, KeyError, ValueError, AttributeError):
        states = None
    last = None if trace.last_token is None else np.array(trace.last_token)
    return type("States", (), {"hidden_states": states, "last_token": last})


def outcomes_of(make, kind, names, rng, ways=tuple(WAYS)):
    """Yield the outcomes of the mutations of a dump that `make` returns for each of them."""
    for name in names:
        mutate, rules = MUTATIONS[name]
        dump = make()
        means = mutate(dump, rng)
        if means is None:
            continue
        with tempfile.TemporaryDirectory(dir=SCRATCH) as scratch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            folder = Path(scratch) / "in"
            dump.write(folder)
            for way in ways:
                if way == "alone" and rules.startswith("2") and takes_one_more_id(folder):
                    continue  # nothing shows that the id more is wrong
                yield Outcome(kind, name, way, *WAYS[way](dump, folder, means))


def of_generated(num_folders, seed, ways=tuple(WAYS)):
    """Yield outcomes of generated dumps: each with every mutation, and with every size and one mutation of it."""
    folders = (folder for turn in itertools.count() for folder in _of_turn(np.random.default_rng([seed, turn]), ways))
    for outcomes in itertools.islice(folders, num_folders):
        yield from outcomes


def _of_turn(rng, ways):
    """Yield the outcomes of each folder of one structure."""
    make = generated.chosen(rng)
    names = list(MUTATIONS)
    for size in generated.SIZES:
        dump = make(size)
        chosen = names if size == "different sizes" else [names[0], str(rng.choice(names[1:]))]
        for name in chosen:
            outcomes = list(outcomes_of(lambda dump=dump: copy.deepcopy(dump), dump.name, [name], rng, ways))
            for outcome in outcomes:
                outcome.mutation = size if name == names[0] else name
            if outcomes:
                yield outcomes


def of_kind(kind, layout, rng, ways=tuple(WAYS)):
    """Yield outcomes of a kind of the corpus."""
    with tempfile.TemporaryDirectory(dir=SCRATCH) as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = Path(scratch) / "source"
        source.mkdir()
        expected = kind.write(source)

        def read():
            return Dump.of_folder(kind.name, source, layout, copy.deepcopy(expected))

        yield from outcomes_of(read, kind.name, MUTATIONS if read().states() else ["unchanged"], rng, ways)


def table(outcomes):
    """Return lines with the counts of each way and mutation, and the totals of each way."""
    counts = collections.defaultdict(collections.Counter)
    for outcome in outcomes:
        for name in (outcome.mutation, "all"):
            counts[outcome.way, name][outcome.result] += 1
    lines = ["| way | mutation | rules | folders | right | refused | wrong |", "|---|---|---|---:|---:|---:|---:|"]
    for way in WAYS:
        for name in (*generated.SIZES, *MUTATIONS, "all"):
            if found := counts.get((way, name)):
                cells = [found.total(), found["right"], found["refused"], found["wrong"]]
                rules = MUTATIONS[name][1] if name in MUTATIONS else ""
                numbers = " | ".join(f"{n:,}" for n in cells)
                lines.append(f"| {way} | {name.replace('_', ' ')} | {rules} | {numbers} |")
    return lines
