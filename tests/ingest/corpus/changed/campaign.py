"""Convert changed dumps whose meaning is known, and count what is right, refused or wrong."""

import collections
import copy
import importlib.util
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

# Where memory holds files: thousands of small stores are written and removed.
SCRATCH = "/dev/shm" if Path("/dev/shm").is_dir() else None


@dataclass
class Outcome:
    """Result of the conversion of a changed dump."""

    kind: str
    mutation: str
    way: str
    result: str  # right, refused or wrong
    detail: str = ""


class Refused(Exception):
    """No layout is used by itself."""


def with_layout(dump, folder, store):
    """Convert a dump by its layout."""
    tracestore.convert_files(folder, store, layout=dump.layout)


def alone(dump, folder, store):
    """Convert a dump by the layout that is proposed for it, if one is used by itself."""
    from tracestore.ingest.propose.proposal import propose_folder

    proposal = propose_folder([folder])
    if proposal.layout is None:
        raise Refused("no layout is proved")
    tracestore.convert_files(folder, store, layout=proposal.layout)


# How a folder is converted; "alone" needs the package that proposes layouts.
WAYS = {"layout": with_layout}
if importlib.util.find_spec("tracestore.ingest.propose") is not None:
    WAYS["alone"] = alone


def judge(dump, folder, means, convert):
    """Return (result, detail) of a conversion: right, refused or wrong."""
    store = folder.parent / "store.zarr"
    shutil.rmtree(store, ignore_errors=True)
    try:
        convert(dump, folder, store)
    except Refused as error:
        return "refused", str(error)
    except tracestore.errors.TracestoreError as error:
        return ("refused" if error.exit_code in (2, 3) else "wrong"), str(error)
    except Exception as error:
        return "wrong", f"{type(error).__name__}: {error}"
    if means == NONE:
        return "wrong", "converted, expected a refusal"
    try:
        compare(store, dump, is_part=means == PART)
    except measure.Difference as error:
        return "wrong", str(error)
    return "right", ""


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
        mutate, _ = MUTATIONS[name]
        dump = make()
        means = mutate(dump, rng)
        if means is None:
            continue
        with tempfile.TemporaryDirectory(dir=SCRATCH) as scratch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            folder = Path(scratch) / "in"
            dump.write(folder)
            for way in ways:
                yield Outcome(kind, name, way, *judge(dump, folder, means, WAYS[way]))


def of_generated(num_folders, seed):
    """Yield outcomes of generated dumps: each with every mutation, and with every size and one mutation of it."""
    turn, count = 0, 0
    while count < num_folders:
        for outcome in _of_turn(np.random.default_rng([seed, turn])):
            yield outcome
            count += 1
            if count == num_folders:
                return
        turn += 1


def _of_turn(rng):
    make = generated.chosen(rng)
    names = list(MUTATIONS)
    for size in generated.SIZES:
        dump = make(size)
        chosen = names if size == "different sizes" else [names[0], str(rng.choice(names[1:]))]
        for outcome in outcomes_of(lambda dump=dump: copy.deepcopy(dump), dump.name, chosen, rng):
            outcome.mutation = size if outcome.mutation == names[0] else outcome.mutation
            yield outcome


def of_kind(kind, layout, rng):
    """Yield outcomes of a kind of the corpus."""
    with tempfile.TemporaryDirectory(dir=SCRATCH) as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = Path(scratch) / "source"
        source.mkdir()
        expected = kind.write(source)

        def read():
            return Dump.of_folder(kind.name, source, layout, copy.deepcopy(expected))

        yield from outcomes_of(read, kind.name, MUTATIONS if read().states() else ["unchanged"], rng)


def table(outcomes):
    """Return lines with the counts of each mutation and their totals."""
    counts = collections.defaultdict(collections.Counter)
    for outcome in outcomes:
        counts[outcome.mutation][outcome.result] += 1
    total = sum(counts.values(), collections.Counter())
    rows = [(name, MUTATIONS[name][1] if name in MUTATIONS else "none", found) for name, found in counts.items()]
    rows.append(("all", "", total))
    lines = ["| mutation | rules | folders | right | refused | wrong |", "|---|---|---:|---:|---:|---:|"]
    for name, rules, found in rows:
        cells = [found["right"], found["refused"], found["wrong"]]
        lines.append(
            f"| {name.replace('_', ' ')} | {rules} | {sum(cells):,} | " + " | ".join(f"{n:,}" for n in cells) + " |"
        )
    return lines
