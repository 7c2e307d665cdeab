"""Sequences of commands on several stores, compared with a model of their traces after each step.

python -m tests.convert.repeated.commands --first 0 --seconds 600 prints the sequences that end in another state.
"""

import errno
import itertools
import os
import random
from unittest import mock

import numpy as np

import tracestore
from tests.convert.repeated.sequences import search
from tests.helpers import command, make_trace, write_pickle
from tracestore.errors import TracestoreError

CALLS = ("write", "pwrite", "writev", "open", "link", "rename", "replace", "mkdir", "fsync", "unlink")
FORMATS = ("pkl", "safetensors", "pt-lstm", "pt-gnn", "datasets")
# Score, its direction: the first three by their names.
SCORES = {"bleurt_score": "correct", "is_hallucinated": "hallucination", "f1": "correct", "judge": "hallucination"}


class Model:
    """Hold what a store must have: traces by key, the direction of each score, and the default score."""

    def __init__(self):
        self.traces, self.directions, self.default = {}, {}, None

    def copy(self):
        found = Model()
        found.traces = {key: trace | {"scores": dict(trace["scores"])} for key, trace in self.traces.items()}
        found.directions, found.default = dict(self.directions), self.default
        return found

    def add(self, key, trace, replaces=False):
        """Add a trace, or what the stored one lacks; return whether the two fit."""
        stored = self.traces.get(key)
        if stored is None:
            self.traces[key] = trace | {"scores": dict(trace["scores"])}
            return True
        one, other = (trace, stored) if not replaces else (stored, trace)
        stored["scores"] = one["scores"] | other["scores"]
        stored["group"] = other["group"] or one["group"]
        fits = stored["content"] == trace["content"] and trace["label"] in (None, stored["label"] or trace["label"])
        stored["label"] = trace["label"] if stored["label"] is None else stored["label"]
        given = {name: value for name, value in trace["fields"].items() if value != stored["fields"].get(name)}
        return fits and not given

    def define(self, directions, default):
        """Add scores; return whether their directions are those that are known."""
        fits = all(self.directions.get(name, d) == d for name, d in directions.items())
        self.directions = directions | self.directions
        self.default = self.default or default
        return fits

    def state(self):
        used = {name for trace in self.traces.values() for name in trace["scores"]}
        directions = {name: direction for name, direction in self.directions.items() if name in used}
        return self.traces, directions, self.default if used else None


def read(path):
    """Return the model of a stored state."""
    found = Model()
    with tracestore.open(path) as store:
        for t in store:
            fields = {"question": t.question, "spans": t.spans, **t.extras}
            found.traces[t.question_id, t.sample] = {
                "content": t.last_token.tobytes(),
                "fields": {name: value for name, value in fields.items() if value is not None},
                "scores": t.scores,
                "label": None if t.label != t.label else t.label,
                "group": t.group,
            }
        found.directions = {name: field.direction for name, field in store.score_fields.items()}
        found.default = store.score_name
    return found


class Sequence:
    """One sequence of commands, which a seed determines."""

    def __init__(self, seed, root):
        self.rng, self.root = random.Random(seed), root
        self.stores, self.log, self.wrong, self.number = {}, [], [], 0
        self.files, self.read = {}, {}  # traces by the name of a file; those that a store has read

    # Values

    def trace(self):
        """Return key, dict of a trace and its model."""
        rng = self.rng
        k, sample = rng.randrange(8), rng.choice([0, 0, 0, 1])
        fields = {"question": f"why {k}"} if rng.random() < 0.7 else {}
        fields |= {"spans": [{"start": 0, "end": k, "type": "x"}]} if rng.random() < 0.2 else {}
        fields |= {"note": rng.choice("xy")} if rng.random() < 0.2 else {}
        made = make_trace(k, tokens=3, layers=2, dim=4, seed=(rng.random() < 0.05) + 10 * sample) | fields
        made |= {"sample": sample}
        model = {
            "content": np.stack([layer[-1] for layer in made["hidden_states"]]).tobytes(),
            "fields": fields,
            "scores": {n: rng.choice([0.0, 0.25, 1.0]) for n in rng.sample(list(SCORES), rng.choice([0, 1, 1, 2]))},
            "label": rng.choice([None, None, 0.0, 1.0]),
            "group": rng.choice(["", "", "a", "b"]),
        }
        return (f"q{k}", sample), made, model

    def path(self, name):
        return self.root / f"{name}.zarr"

    def store(self):
        return self.rng.choice(sorted(self.stores))

    # Steps

    def run(self, num_steps):
        self.append("a")
        for _ in range(num_steps):
            ops = [self.append, self.append, self.score, self.score, self.score, self.merge, self.merge, self.subset]
            ops += [self.export, self.export, self.keep, self.convert, self.convert, self.convert]
            (self.rng.choice(ops) if self.stores else self.append)(self.rng.choice("abc"))
            if self.wrong:
                break
        return self.log, self.wrong

    def call(self, *words):
        if self.rng.random() < 0.2:
            self.interrupt(words)
        done = command(*words)
        self.log.append((" ".join(str(w).replace(f"{self.root}/", "") for w in words), done.returncode, done.stderr))
        if done.returncode not in (0, 2, 3) and words[0] != "lint":
            self.wrong.append(("code", done.returncode, done.stderr))
        return done

    def interrupt(self, words):
        """Run a command, one of whose calls of the system ends it; the next one continues."""
        name, left = self.rng.choice(CALLS), self.rng.randrange(1, 12)
        error = self.rng.choice([KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
        original, count = getattr(os, name), itertools.count(1)

        def failing(*args, **options):
            if next(count) == left:
                raise error
            return original(*args, **options)

        with mock.patch.object(os, name, failing):
            code = command(*words).returncode
        self.log.append(("interrupted", name, left, repr(error), code))

    def compare(self, name, expected, done):
        """Compare a store with a model; after a refusal with its earlier state."""
        found = read(self.path(name)) if self.path(name).exists() else Model()
        if found.state() != expected.state():
            for one, other in zip(found.state(), expected.state(), strict=True):
                if one != other and isinstance(one, dict):
                    keys = {k for k in one.keys() | other.keys() if one.get(k) != other.get(k)}
                    one, other = ({k: _short(d.get(k)) for k in keys} for d in (one, other))
                self.wrong += [] if one == other else [(name, "found", one, "expected", other)]
        if self.path(name).exists():
            self.stores[name] = found

    def append(self, name):
        traces = [self.trace() for _ in range(self.rng.randint(1, 4))]
        expected, refused = self.stores.get(name, Model()).copy(), None
        with tracestore.create(self.path(name), append=True, attention="mean") as writer:
            for key, made, model in traces:
                before = expected.copy()
                names = list(model["scores"])
                is_new = key not in expected.traces
                fits = expected.define({n: SCORES[n] for n in names}, names[0] if names else None)
                fits = expected.add(key, model, replaces=True) and fits
                try:
                    for n in names:
                        writer.define_score(n, direction=SCORES[n])
                    values = {n: model[n] for n in ("scores", "label", "group")}
                    writer.append(made, **values)
                    if not fits:
                        self.wrong.append(("accepted", key, _short(model), _short(before.traces.get(key))))
                except TracestoreError as error:
                    refused = str(error)
                    defined, default = expected.directions, expected.default
                    expected = before
                    expected.directions, expected.default = defined, default
                self.log.append((f"append {name}", key, _short(model), is_new, refused))
        self.compare(name, expected, None)

    def score(self, name):
        rng = self.rng
        if name not in self.stores:
            return
        expected = self.stores[name].copy()
        keys = rng.sample(sorted(expected.traces), rng.randint(1, len(expected.traces)))
        keys = sorted(expected.traces) if rng.random() < 0.4 else keys
        has_samples, has_groups = rng.random() < 0.5, rng.random() < 0.3
        column = rng.choice(list(SCORES))
        flags = ["--name", rng.choice(list(SCORES))] if rng.random() < 0.6 else []
        target = flags[1] if flags else expected.default or column
        direction = SCORES[column] if rng.random() < 0.8 else "correct"
        flags += ["--score-direction", direction] if column == "judge" or direction != SCORES[column] else []
        is_default = rng.random() < 0.2
        flags += ["--default"] if is_default else []
        choice = rng.choice(["error", "error", "keep-first", "keep-last"])
        flags += ["--on-conflict", choice]
        rows, lines = {}, [f"question_id{',sample' * has_samples},{column}{',group' * has_groups}"]
        for key in keys:
            key = key if has_samples else key[0]
            if key in rows:
                continue
            rows[key] = rng.choice([None, 0.0, 0.5, 1.0, 0.75]), rng.choice(["", "g", "h"]) if has_groups else None
            value = "" if rows[key][0] is None else rows[key][0]
            cells = [*(key if has_samples else [key]), value, *([rows[key][1]] if has_groups else [])]
            lines.append(",".join(map(str, cells)))
        file = self.root / "scores.csv"
        file.write_text("\n".join(lines) + "\n")
        self.log.append(lines)
        done = self.call("score", self.path(name), "--scores", file, *flags)
        if done.returncode:
            self.compare(name, self.stores[name], done)
            return
        given = False
        for key, trace in expected.traces.items():
            row = rows.get(key if has_samples else key[0])
            if row is None:
                continue
            if row[0] is not None:
                trace["scores"][target], given = row[0], True
            elif target in trace["scores"] and choice == "keep-last":
                del trace["scores"][target]
            if row[1]:
                trace["group"] = row[1]
            elif row[1] == "" and choice == "keep-last":
                trace["group"] = ""
        if given:
            was = expected.directions.get(target, direction)
            kept = [
                t
                for k, t in expected.traces.items()
                if (k if has_samples else k[0]) not in rows or rows[k if has_samples else k[0]][0] is None
            ]
            if was != direction and any(target in t["scores"] for t in kept):
                self.wrong.append(("direction", was, direction))
            expected.directions[target] = direction
            expected.default = target if is_default or expected.default is None else expected.default
        self.compare(name, expected, done)

    def copied(self, name, sources, done):
        """Compare the destination of a copy with the model."""
        if done.returncode:
            before = self.stores.get(name, Model())
            found = read(self.path(name)) if self.path(name).exists() else Model()
            for key, trace in before.traces.items():
                if _short(found.traces.get(key)) != _short(trace) and done.returncode == 2:
                    self.wrong.append(("lost after a refusal", key, _short(found.traces.get(key)), _short(trace)))
            for key, trace in found.traces.items():
                if key not in before.traces and not any(
                    key in s.traces and s.traces[key]["content"] == trace["content"] for s in sources
                ):
                    self.wrong.append(("not of a source", key))
            if self.path(name).exists():
                self.stores[name] = found
            return
        expected = self.stores.get(name, Model()).copy()
        fits = True
        for source in sources:
            fits = expected.define(source.directions, source.default) and fits
            for key, trace in source.traces.items():
                fits = expected.add(key, trace) and fits
        if not fits:
            self.wrong.append(("accepted a conflict",))
        self.compare(name, expected, done)

    def merge(self, name):
        names = sorted(set(self.rng.choices(sorted(self.stores), k=2)) - {name})
        if not names:
            return
        flags = ["--overwrite"] if self.rng.random() < 0.2 else []
        done = self.call("merge", *map(self.path, names), self.path(name), *flags)
        if flags and not done.returncode:
            self.stores.pop(name, None)
            self.read.pop(name, None)
        self.copied(name, [self.stores[n] for n in names], done)
        if not done.returncode:  # its sources are those of the stores
            for other in names:
                self.read.setdefault(name, {}).update(self.read.get(other, {}))

    def convert(self, name):
        rng, folder = self.rng, self.root / "data"
        for _ in range(rng.randint(0, 2) or not self.files):
            file, traces = rng.choice("xyz") + ".pkl", [self.trace() for _ in range(rng.randint(1, 3))]
            op = rng.choice(["write", "write", "value", "value", "remove"]) if file in self.files else "write"
            if op == "remove" and len(self.files) > 1:
                del self.files[file]
                (folder / file).unlink()
                continue
            if op == "value":  # of the first trace
                key, made, model = self.files[file][0]
                changed = traces[0][2] | {n: model[n] for n in ("content", "fields", rng.choice(["label", "group"]))}
                traces = [(key, made, changed), *self.files[file][1:]]
            for _, _, model in traces:
                model["scores"] = {n: v for n, v in model["scores"].items() if n == "is_hallucinated"}
            self.files[file] = traces
            values = [
                m["scores"] | {n: m[n] for n in ("label", "group") if m[n] not in (None, "")} for _, _, m in traces
            ]
            write_pickle(folder / file, [made | v for (_, made, _), v in zip(traces, values, strict=True)])
            self.log.append((file, [(key, _short(model)) for key, _, model in traces]))
        before = self.stores.get(name, Model())
        done = self.call("convert", folder, self.path(name))
        found = read(self.path(name)) if self.path(name).exists() else Model()
        given = {}
        for file, traces in self.files.items():
            for key, _, model in traces:
                given.setdefault(key, []).append((file, model))
        known, keys = self.read.setdefault(name, {}), before.traces.keys() | (given if done.returncode == 0 else ())
        for key in keys:
            stored, now, models = before.traces.get(key), found.traces.get(key), [m for _, m in given.get(key, ())]
            options = models + ([stored] if stored else [])
            is_changed = (
                len(models) == 1
                and done.returncode == 0
                and known.get(given[key][0][0]) != self.files[given[key][0][0]]
            )
            wrong = (
                now is None
                or now["content"] != (options[-1]["content"])
                or (stored and now["fields"] != options[-1]["fields"])
            )
            for n in () if wrong else (*SCORES, "label", "group"):
                values = (m.get(n, m["scores"].get(n)) for m in (now, *options))
                value, *possible = (None if v == "" else v for v in values)
                first = possible[0] if is_changed else None
                wrong = wrong or value not in (possible if first is None else [first])
                wrong = wrong or (done.returncode == 0 and value is None and any(p is not None for p in possible))
            if wrong:
                self.wrong.append(("converted", key, _short(now), [_short(o) for o in options], is_changed))
        if keys_left := found.traces.keys() - before.traces.keys() - given.keys():
            self.wrong.append(("not of a file", keys_left))
        if done.returncode == 0:
            self.read[name] = dict(self.files)
        if self.path(name).exists():
            self.stores[name] = found

    def subset(self, name):
        source = self.store()
        if source == name:
            return
        model = self.stores[source].copy()
        ids = (
            self.rng.sample(sorted({key[0] for key in model.traces}), 1 + self.rng.randrange(2) % len(model.traces))
            if len({key[0] for key in model.traces}) > 1
            else [next(iter(model.traces))[0]]
        )
        (self.root / "ids.txt").write_text("\n".join(ids) + "\n")
        self.log.append(ids)
        done = self.call("subset", self.path(source), self.path(name), "--ids", self.root / "ids.txt")
        model.traces = {key: trace for key, trace in model.traces.items() if key[0] in ids}
        self.copied(name, [model], done)

    def export(self, name):
        source, format = self.store(), self.rng.choice(FORMATS)
        self.number += 1
        out = self.root / f"out{self.number}"
        done = self.call("export", self.path(source), out, "--format", format, "--traces-per-file", 2)
        if done.returncode:
            return
        fresh = self.path(f"fresh{self.number}")
        done = self.call("convert", out, fresh)
        if done.returncode:
            self.wrong.append(("export is refused", done.stderr))
            return
        self.compare(fresh.name.removesuffix(".zarr"), self.stores[source], done)
        self.stores.pop(f"fresh{self.number}", None)

    def keep(self, name):
        name = self.store()
        words = self.rng.choice(
            [["clean", "--force", "--older-than", "0s"], ["verify"], ["lint"], ["info"], ["verify", "--repair"]]
        )
        done = self.call(words[0], self.path(name), *words[1:])
        self.compare(name, self.stores[name], done)


def _short(trace):
    """Return a trace with the beginning of its content."""
    if not isinstance(trace, dict) or "content" not in trace:
        return trace
    content = trace["content"]
    return trace | {"content": content[:4].hex() if isinstance(content, bytes) else content}


def run(seed, root):
    """Run the sequence of a seed; return its log and what is wrong."""
    sequence = Sequence(seed, root)
    return sequence.run(sequence.rng.randint(3, 10))


if __name__ == "__main__":
    search(run)
