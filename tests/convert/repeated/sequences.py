"""Sequences of edits of a folder with conversions in between, compared with a new store of the present folder.

python -m tests.convert.repeated.sequences --first 0 --seconds 600 prints the sequences that end in another store.
"""

import argparse
import random
import shutil
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np

import tracestore
from tests.helpers import command, make_trace, write_pickle
from tracestore.convert import cutting
from tracestore.convert.runner import Conversion

_CHANGED = ("different content", "no longer have", "as stored for this key")  # refused without --on-conflict
_VALUES = ("label", "group", "f1")
_KEYS = {"is_correct": "label", "group": "group", "score": "f1"}


class Folder:
    """A folder of files with one to three traces, each a dict of an id, the number of its content, and values.

    The form is "npz" (one trace, by stated lines), "table" (their values in labels.csv), or "pkl" or "keys" (a built-in
    layout, with the key `label` or with keys of all values).
    """

    def __init__(self, rng, root):
        self.rng, self.root = rng, root
        self.form = rng.choice(["npz", "npz", "table", "pkl", "keys", "keys"])
        self.files = {}  # traces by the name of the file
        self.states = []  # all that files had at some time
        self.ids = 0
        root.mkdir(parents=True)

    def lines(self):
        if self.form in ("pkl", "keys"):
            return []
        is_table = self.form == "table"
        place = "labels.csv : [id=qid]/" if is_table else "{file}.npz : "
        names = {"is_correct": "label", "group": "group", "correctness.f1": "f1"}
        lines = [f"{field} = {place}{name}" for field, name in names.items()]
        lines += ["hidden_states = {id}.npz : hs -> L S D"] if is_table else []
        lines += [] if is_table else ["hidden_states = {file}.npz : hs -> L S D", "question_id = {file}.npz : id"]
        return [word for line in lines for word in ("--field", line)] + ["--attention", "none"]

    def trace(self, question_id=None):
        rng = self.rng
        if question_id is None:
            question_id, self.ids = f"q{self.ids}", self.ids + 1
        return {
            "id": question_id,
            "content": rng.randrange(10**6),
            "label": rng.choice([0, 1]),
            "group": rng.choice("ab"),
            "f1": rng.choice([0.25, 0.5]),
        }

    def edit(self):
        """Change the folder at random; return what was done."""
        rng, names = self.rng, sorted(self.files)
        ops = ["add", "label", "label", "group", "f1", "content", "empty", "copy", "copy", "rename", "remove"]
        ops += ["restore"]
        op = rng.choice(ops) if names else "add"
        name = rng.choice(names) if names else ""
        k = rng.randrange(len(self.files[name])) if names else 0
        new = f"f{rng.randrange(30):02}"
        if op == "add":
            self.files[new] = [self.trace() for _ in range(rng.randint(1, 3) if self.form in ("pkl", "keys") else 1)]
        elif op in ("label", "group", "f1", "content"):
            traces = [dict(t) for t in self.files[name]]
            traces[k][op] = self.trace("")[op]
            self.files[name] = traces
        elif op == "empty":
            traces = [dict(t) for t in self.files[name]]
            traces[k][rng.choice(_VALUES[self.form == "pkl" :])] = None  # a missing `label` counts as unchanged
            self.files[name] = traces
        elif op == "copy":
            copy = dict(self.files[name][k])
            change = rng.choice(["", "label", "group", "id", "content"])
            if change == "id":
                mark = rng.choice([" (1)", "-checkpoint"])
                copy["id"] += mark
                new = name + mark if self.form == "table" else new
            elif change:
                copy[change] = self.trace("")[change]
            self.files[new] = [copy]
        elif op == "rename":
            self.files[new] = self.files.pop(name)
        elif op == "remove":
            del self.files[name]
        elif op == "restore" and self.states:
            name, traces = rng.choice(self.states)
            self.files[name] = traces
        self.states += [pair for pair in self.files.items() if pair not in self.states]
        return op, name, new

    def arrays(self, trace):
        """Return the hidden states (L, S, D) of a trace."""
        return np.random.default_rng(trace["content"]).standard_normal((3, 5, 16)).astype("f2")

    def removed(self, question_id):
        """Return the traces of an id that files had, which have none of this id now."""
        found = []
        for name, traces in self.states:
            ids = [name if self.form == "table" else t["id"] for t in traces]
            now = [name if self.form == "table" else t["id"] for t in self.files.get(name, [])]
            if question_id not in now:
                own = [t for i, t in zip(ids, traces, strict=True) if i == question_id]
                found += [t | {"content": self.arrays(t).tobytes()} for t in own]
        return found

    def write(self):
        shutil.rmtree(self.root)
        self.root.mkdir()
        for name, traces in self.files.items():
            if self.form in ("pkl", "keys"):
                names = {"label": "label"} if self.form == "pkl" else _KEYS
                rows = []
                for t in traces:
                    row = make_trace(0, tokens=5, dim=16) | {"question_id": t["id"]}
                    row["hidden_states"] = list(self.arrays(t))
                    row |= {key: t[name] for key, name in names.items() if t[name] is not None}
                    rows.append(row)
                write_pickle(self.root / f"{name}.pkl", rows)
                continue
            (t,) = traces
            values = {"hs": self.arrays(t), "id": np.array(t["id"])}
            if self.form == "npz":
                numbers = {n: np.float64("nan" if t[n] is None else t[n]) for n in ("label", "f1")}
                values |= numbers | {"group": np.array(t["group"] or "")}
            np.savez(self.root / f"{name}.npz", **values)
        if self.form == "table":
            rows = {name: traces[0] for name, traces in self.files.items()}
            lines = [
                ",".join([name, *("" if t[n] is None else str(t[n]) for n in _VALUES)]) for name, t in rows.items()
            ]
            (self.root / "labels.csv").write_text("\n".join(["qid,label,group,f1", *lines]) + "\n")


def values(store):
    """Return the content, label, group and scores of each trace of a store."""
    with tracestore.open(store) as opened:
        return {
            (t.question_id, t.sample): (
                t.hidden_states.tobytes(),
                *(None if v is None or v != v or v == "" else v for v in (t.label, t.group)),
                tuple(sorted(t.scores.items())),
            )
            for t in opened
        }


def run(seed, root):
    """Run the sequence of a seed; return its log and the differences from a new store."""
    rng = random.Random(seed)
    folder, store, fresh = Folder(rng, root / "data"), root / "s.zarr", root / "fresh.zarr"
    log, wrong = [folder.form], []
    choice = rng.choice(["error", "keep-first", "keep-last", "keep-last"])
    options = ["--on-conflict", choice]
    # A new store skips others of the present traces.
    may_differ = [""] if choice == "keep-first" else []
    with mock.patch.object(cutting, "MIN_BYTES", rng.choice([1, 10**9])):
        for _ in range(rng.randint(1, 2)):
            folder.edit()
        for _ in range(rng.randint(3, 7)):
            log.append([folder.edit() for _ in range(rng.randint(1, 2))])
            if not folder.files:
                folder.edit()
            folder.write()
            words = ["convert", folder.root, store, *folder.lines(), *options]
            if rng.random() < 0.2:
                log.append(interrupted(words, rng.randint(1, 6)))
            used = [*words, *(["--workers", "2"] if rng.random() < 0.1 else [])]
            done, again = command(*used), command(*words)
            new = command("convert", folder.root, fresh, *folder.lines(), *options, "--overwrite")
            log.append((options, used[-1], done.returncode, done.stderr[-200:], new.returncode, new.stderr[-200:]))
            line, last = done.stderr.splitlines()[-1:], again.stderr.splitlines()[-1:]
            if (done.returncode, line) != (again.returncode, last):
                wrong.append(("another answer", done.returncode, line, again.returncode, last))
            if done.returncode not in (0, 3):
                wrong.append(("code", done.returncode, done.stderr))
            elif new.returncode != done.returncode and not any(
                text in done.stderr for text in (*_CHANGED, *may_differ)
            ):
                wrong.append(("code of a new store", done.returncode, done.stderr, new.returncode, new.stderr))
            elif done.returncode == new.returncode == 0 and "keep-first" in options:
                wrong += [key for key, found in values(store).items() if not _is_whole(folder, key, found)]
            elif done.returncode == new.returncode == 0:
                wrong += _differences(folder, values(store), values(fresh))
            if wrong:
                break
    return log, wrong


def interrupted(words, after):
    """Run a command that is interrupted behind some traces."""
    left = [after]

    def check(self):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    with mock.patch.object(Conversion, "_check_interrupt", check):
        done = command(*words)
        return "interrupted", done.returncode, done.stdout


def _differences(folder, stored, expected):
    """Return the traces that are not as expected, apart from values of removed traces."""
    return [
        ("values", key, own and own[1:], wanted[1:], own and own[0] == wanted[0])
        for key, wanted in expected.items()
        if (own := stored.get(key)) != wanted and (own is None or not _is_left(own, wanted, folder.removed(key[0])))
    ]


def _is_whole(folder, key, found):
    """Return whether each value of a stored trace is one that files had for its content."""
    rows = [
        t for name, traces in folder.states for t in traces if key[0] == (name if folder.form == "table" else t["id"])
    ]
    rows = [t for t in rows if folder.arrays(t).tobytes() == found[0]]
    scores = dict(found[3])
    pairs = zip(
        _VALUES, (scores.get("is_correct", found[1]), found[2], scores.get("f1", scores.get("score"))), strict=True
    )
    return all(value is None or any(t[name] == value for t in rows) for name, value in pairs)


def _is_left(own, wanted, removed):
    """Return whether each difference is a value of a removed trace."""
    pairs = zip(own[:3], wanted[:3], ("content", "label", "group"), strict=True)
    scores, expected = dict(own[3]), dict(wanted[3])
    names = {"is_correct": "label", "f1": "f1", "score": "f1"}
    removed = [trace for trace in removed if trace["content"] == own[0]]
    pairs = [*pairs, *((scores.get(name), expected.get(name), field) for name, field in names.items())]
    return all(old == new or any(old == trace[field] for trace in removed) for old, new, field in pairs)


def search(run):
    """Run the sequences of consecutive seeds for --seconds, and print those that end wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    end, seed, num_wrong, steps = time.time() + args.seconds, args.first, 0, 0
    while time.time() < end:
        with tempfile.TemporaryDirectory() as root:
            log, wrong = run(seed, Path(root))
        steps += len(log)
        if wrong:
            num_wrong += 1
            print("SEED", seed, *log, "WRONG", *wrong, sep="\n    ", flush=True)
        seed += 1
    print(f"{seed - args.first} sequences, {steps} steps, {num_wrong} wrong")


if __name__ == "__main__":
    search(run)
