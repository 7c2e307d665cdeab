"""Folders of many forms that change at random: samples, tables, layers, batches, rows, groups, classes, scores files."""

import json
import shutil

import h5py
import numpy as np
import pyarrow as pa
from pyarrow import parquet

from tests.helpers import field_flags, make_trace, write_pickle

FORMS = (
    "samples", "share", "tables", "layers", "batches", "order", "inside", "classes", "rows", "parquet", "arrow", "hdf5",
    "pkl", "scores",
)  # fmt: skip
_COLUMNS = {"is_correct": "ok", "correctness.f1": "f1", "group": "g", "generated_answer": "text"}
_STATES = {
    "samples": ["hidden_states = {id}_{sample}.npz : hs -> L S D"],
    "share": ["hidden_states = {id}_{sample}.npz : hs -> L S D", 'share.is_correct = ["sample"]'],
    "tables": ["hidden_states = {id}.npz : hs -> L S D"],
    "layers": ["hidden_states = {id}/layer_{layer}.npy -> S D"],
    "batches": ["hidden_states = b_{n}.npz : hs -> N L S D", "question_id = b_{n}.npz : ids -> N", "S.padding = none"],
    "order": ["hidden_states = b.npz : hs -> N L S D", "question_id = t.csv : []/qid", "S.padding = none"],
    "inside": ["hidden_states = {n}.npz : hs -> L S D", "question_id = {n}.npz : id"],
    "classes": ["hidden_states = {verdict}/{id}.npz : hs -> L S D", "is_correct = ={verdict}"],
    "rows": ["hidden_states = {n}.jsonl : [id=qid]/hs -> L S D"],
    "parquet": ["hidden_states = {n}.parquet : [id=qid]/hs -> L S D"],
    "arrow": ["hidden_states = {n}.arrow : [id=qid]/hs -> L S D"],
    "hdf5": ["hidden_states = {n}.h5 : {id}/hs -> L S D"],
    "pkl": [],
    "scores": [],
}
_OF_FILE = {
    "inside": "{n}.npz : ",
    "hdf5": "{n}.h5 : {id}/",
    "rows": "{n}.jsonl : [id=qid]/",
    "parquet": "{n}.parquet : [id=qid]/",
    "arrow": "{n}.arrow : [id=qid]/",
}
_OF_ROWS = {"rows", "parquet", "arrow", "hdf5", "pkl"}  # a file has any traces, with their values
_KEYS = {"ok": "is_correct", "f1": "f1", "g": "group", "text": "generated_answer_clean"}


class Folder:
    """A folder of one form: files with the keys of their traces, and the values of each trace, which are columns of tables."""

    def __init__(self, rng, root):
        self.rng, self.root, self.form = rng, root, rng.choice(FORMS)
        self.files, self.traces, self.num_ids = {}, {}, 0
        self.rows, self.columns = [], [c for c in ("ok", "f1", "g", "text") if rng.random() < 0.7] or ["ok"]
        if self.form in ("classes", "share"):
            self.columns = ["ok"]
        self.scores_name, self.score, self.has_label = "scores.csv", "score", rng.random() < 0.3
        self.bad = None
        self.pasts = []
        root.mkdir(parents=True)

    # Edits

    def key(self):
        has_samples = self.form in ("samples", "share")
        if has_samples and self.traces and self.rng.random() < 0.6:
            question = self.rng.choice(sorted(self.traces))[0]
            return question, max(s for q, s in self.traces if q == question) + 1
        self.num_ids += 1
        return f"q{'abcdefghijklmnopqrstuvwxyz'[self.num_ids % 26]}{self.num_ids // 26}", 0

    def value(self, column):
        rng = self.rng
        choices = {"ok": [0, 1], "f1": [0.25, 0.5, 0.75], "g": ["g", "h"], "text": [f"text {rng.randrange(99)}"]}
        return rng.choice(choices[column])

    def add(self, key=None):
        key = key or self.key()
        self.traces[key] = {"content": self.rng.randrange(10**6), **{c: self.value(c) for c in _KEYS}}
        if self.form == "share":
            others = [t["ok"] for k, t in self.traces.items() if k[0] == key[0]]
            self.traces[key]["ok"] = others[0]
        self.rows.insert(self.rng.randrange(len(self.rows) + 1) if self.form != "order" else len(self.rows), key)
        many = self.form in {"batches", "order", "scores", *_OF_ROWS}
        if many and self.files and (self.form == "order" or self.rng.random() < 0.5):
            self.files[self.rng.choice(sorted(self.files))].append(key)
        else:
            self.files[self.new_name(key)] = [key]

    def new_name(self, key):
        if self.form == "order":
            return "b"
        named = {"samples", "share", "tables", "layers"}
        if self.form in named:
            return key[0] if self.form in ("tables", "layers") else f"{key[0]}_{key[1]}"
        return next(f"{n:02}" for n in iter(lambda: self.rng.randrange(90), None) if f"{n:02}" not in self.files)

    def edit(self):
        """Change the folder at random; return what was done."""
        rng = self.rng
        if not self.traces:
            return self.add()
        ops = [
            self.add,
            self.change,
            self.change,
            self.empty,
            self.empty,
            self.drop_row,
            self.remove,
            self.remove_file,
            self.move,
        ]
        ops += [self.rename, self.rename, self.shuffle, self.column, self.column, self.copy, self.back]
        op = rng.choice(ops)
        self.pasts.append(json.dumps([self.files, [[*k, v] for k, v in self.traces.items()], self.rows]))
        return op.__name__, op()

    def back(self):
        """Restore one file of an earlier state, with the values of its traces."""
        files, traces, _ = json.loads(self.rng.choice(self.pasts))
        traces = {(q, s): v for q, s, v in traces}
        if self.form == "order" or not files:
            return None
        name = self.rng.choice(sorted(files))
        keys = [tuple(key) for key in files[name]]
        for other in list(self.files):
            self.files[other] = [k for k in self.files[other] if k not in keys]
            if not self.files[other]:
                del self.files[other]
        self.files[name] = keys
        for key in keys:
            self.traces[key] = traces[key]
            if key not in self.rows:
                self.rows.append(key)
        self.share()
        return name

    def share(self):
        for (question, _), trace in self.traces.items() if self.form == "share" else ():
            trace["ok"] = next(t["ok"] for k, t in self.traces.items() if k[0] == question)

    def change(self):
        key, name = self.rng.choice(sorted(self.traces)), self.rng.choice([*self.columns, "content"])
        for other, trace in self.traces.items():
            if other == key or (self.form == "share" and name == "ok" and other[0] == key[0]):
                trace[name] = self.rng.randrange(10**6) if name == "content" else self.value(name)
        self.share()
        return key, name

    def empty(self):
        key, name = self.rng.choice(sorted(self.traces)), self.rng.choice(self.columns)
        for other, trace in self.traces.items():
            if other == key or (self.form == "share" and other[0] == key[0]):
                trace[name] = None
        return key, name

    def drop_row(self):
        if self.form == "order" or not self.rows:
            return None
        key = self.rng.choice(self.rows)
        self.rows = [k for k in self.rows if k != key]
        return key

    def remove(self):
        if len(self.traces) < 2:
            return None
        key = self.rng.choice(sorted(self.traces))
        for name, keys in list(self.files.items()):
            self.files[name] = [k for k in keys if k != key]
            if not self.files[name]:
                del self.files[name]
        del self.traces[key]
        self.rows = [k for k in self.rows if k != key or self.rng.random() < 0.3 < 1.3 * (self.form != "order")]
        return key

    def remove_file(self):
        """Remove a file, of which another one may have a trace, too."""
        if len(self.files) < 2 or self.form not in {"inside", "scores", "batches", *_OF_ROWS}:
            return None
        name = self.rng.choice(sorted(self.files))
        for key in self.files.pop(name):
            if not any(key in keys for keys in self.files.values()):
                del self.traces[key]
        return name

    def move(self):
        """Move a trace to another file."""
        names = sorted(self.files)
        if self.form not in {"batches", "scores", *_OF_ROWS} or len(names) < 2:
            return None
        one, two = self.rng.sample(names, 2)
        key = self.files[one].pop(self.rng.randrange(len(self.files[one])))
        if key not in self.files[two]:
            self.files[two].insert(self.rng.randrange(len(self.files[two]) + 1), key)
        if not self.files[one]:
            del self.files[one]
        return key, one, two

    def copy(self):
        """Copy a trace into another file."""
        names = sorted(self.files)
        if self.form not in {"inside", *_OF_ROWS} or not names:
            return None
        key = self.rng.choice(self.files[self.rng.choice(names)])
        if self.form == "inside" or self.rng.random() < 0.5:
            self.files[self.new_name(key)] = [key]
        elif key not in self.files[name := self.rng.choice(names)]:
            self.files[name].append(key)
        return key

    def rename(self):
        """Rename a file; one that is named by its id becomes another trace."""
        if self.form == "order":
            return None
        name = self.rng.choice(sorted(self.files))
        if self.form in {"batches", "inside", "scores", "classes", *_OF_ROWS}:
            new = self.new_name(None)
            self.files[new] = self.files.pop(name)
            return name, new
        return None

    def shuffle(self):
        if self.form != "order":
            self.rng.shuffle(self.rows)
        elif self.rng.random() < 0.7:
            self.rng.shuffle(self.rows)
            self.files["b"] = list(self.rows)
        return self.rows

    def column(self):
        """Add or remove a column with its line, or change the scores file."""
        rng = self.rng
        if self.form == "scores":
            op = rng.choice(["name", "score", "label", "none"])
            if op == "name":
                self.scores_name = rng.choice(["scores.csv", "my_scores.csv", "scores_b.tsv"])
            elif op == "score":
                self.score = rng.choice(["score", "f1", "is_correct"])
            elif op == "label":
                self.has_label = not self.has_label
            else:
                self.scores_name = None if self.scores_name else "scores.csv"
            return op
        if self.form in ("classes", "share"):
            return None
        column = rng.choice([*_KEYS])
        known = self.columns
        self.columns = [c for c in _KEYS if (c in known) != (c == column)] or known
        return column

    # Files

    def lines(self):
        lines, place = list(_STATES[self.form]), _OF_FILE.get(self.form)
        if not lines or self.form == "classes":
            return field_flags(*lines) + ["--attention", "none"] * bool(lines)
        for field, column in _COLUMNS.items():
            if column in self.columns:
                lines.append(f"{field} = {place or self.table(column)}{column}")
        return [*field_flags(*lines), "--attention", "none"]

    def table(self, column):
        ids = {"samples": "[id=qid, sample=s]/", "order": "[]/"}.get(self.form, "[id=qid]/")
        return ("m.jsonl : " if column in ("g", "text") and self.form == "tables" else "t.csv : ") + ids

    def states(self, key):
        return np.random.default_rng(self.traces[key]["content"]).standard_normal((3, 5, 16)).astype("f2")

    def write(self):
        shutil.rmtree(self.root)
        self.root.mkdir()
        for name, keys in self.files.items():
            getattr(self, f"_save_{self.form}", self._save_one)(name, keys)
        rows = [key for key in self.rows if key in self.traces or self.form != "order"]
        if self.form == "share":
            rows = list(dict.fromkeys((question, 0) for question, _ in rows))
            rows = [next((k for k in self.traces if k[0] == q), (q, 0)) for q, _ in rows]
        values = [
            {"qid": k[0], "s": k[1], **self.traces.get(k, {"ok": 0, "f1": 0.5, "g": "g", "text": "t"})} for k in rows
        ]
        if self.form == "scores":
            self._write_scores(values)
        elif self.form not in _OF_FILE and self.form not in ("pkl", "classes"):
            own = [c for c in self.columns if self.form != "tables" or c in ("ok", "f1")]
            ids = ["qid", "s"] if self.form == "samples" else ["qid"]
            if own or self.form == "order":
                _csv(self.root / "t.csv", [*ids, *own], values)
            if other := [c for c in self.columns if c not in own]:
                texts = [{c: v[c] for c in ("qid", *other) if v[c] is not None} for v in values]
                (self.root / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))

    def _write_scores(self, values):
        if self.scores_name is None:
            return
        named = {"question_id": "qid", self.score: "f1" if self.score != "is_correct" else "ok"}
        named |= {"group": "g"} if "g" in self.columns else {}
        named |= {"label": "ok"} if self.has_label and self.score != "is_correct" else {}
        rows = [{name: v[c] for name, c in named.items()} for v in values]
        _csv(self.root / self.scores_name, list(named), rows, "\t" if self.scores_name.endswith("tsv") else ",")

    def _save_one(self, name, keys):
        np.savez(self.root / f"{name}.npz", hs=self.states(keys[0]))

    def _save_layers(self, name, keys):
        (self.root / name).mkdir()
        for layer, states in enumerate(self.states(keys[0])):
            np.save(self.root / name / f"layer_{layer}.npy", states)

    def _save_batches(self, name, keys):
        states = np.stack([self.states(key) for key in keys])
        np.savez(self.root / f"b_{name}.npz", hs=states, ids=np.array([key[0] for key in keys]))

    def _save_order(self, name, keys):
        np.savez(self.root / "b.npz", hs=np.stack([self.states(key) for key in self.rows]))

    def _save_classes(self, name, keys):
        trace = self.traces[keys[0]]
        folder = self.root / {1: "correct", 0: "wrong", None: "wrong"}[trace["ok"]]
        folder.mkdir(exist_ok=True)
        np.savez(folder / f"{keys[0][0]}.npz", hs=self.states(keys[0]))

    def _save_inside(self, name, keys):
        trace = self.traces[keys[0]]
        values = {c: trace[c] for c in self.columns}
        numbers = {c: np.float64("nan" if v is None else v) for c, v in values.items() if c in ("ok", "f1")}
        texts = {c: np.array(v or "") for c, v in values.items() if c in ("g", "text")}
        np.savez(self.root / f"{name}.npz", hs=self.states(keys[0]), id=np.array(keys[0][0]), **numbers, **texts)

    def _rows(self, keys):
        values = [(key, self.traces[key]) for key in keys]
        return [{"qid": k[0], "hs": self.states(k).tolist()} | {c: v[c] for c in self.columns} for k, v in values]

    def _save_rows(self, name, keys):
        (self.root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in self._rows(keys)))

    def _save_parquet(self, name, keys):
        parquet.write_table(pa.Table.from_pylist(self._rows(keys)), self.root / f"{name}.parquet")

    def _save_arrow(self, name, keys):
        table = pa.Table.from_pylist(self._rows(keys))
        with pa.ipc.new_file(self.root / f"{name}.arrow", table.schema) as file:
            file.write_table(table)

    def _save_hdf5(self, name, keys):
        with h5py.File(self.root / f"{name}.h5", "w") as file:
            for key in keys:
                group, trace = file.create_group(key[0]), self.traces[key]
                group["hs"] = self.states(key)
                for column in self.columns:
                    if trace[column] is not None:
                        group[column] = trace[column]

    def _save_pkl(self, name, keys):
        rows = []
        for key in keys:
            trace = self.traces[key]
            row = make_trace(0, tokens=5, dim=16) | {"question_id": key[0], "hidden_states": list(self.states(key))}
            del row["generated_answer_clean"]
            columns = self.columns if self.form == "pkl" else [c for c in self.columns if c == "text"]
            row |= {_KEYS[c]: trace[c] for c in columns if trace[c] is not None}
            rows.append(row)
        write_pickle(self.root / f"{name}.pkl", rows)

    _save_scores = _save_pkl


def _csv(path, columns, rows, separator=","):
    lines = [separator.join("" if row[c] is None else str(row[c]) for c in columns) for row in rows]
    path.write_text("\n".join([separator.join(columns), *lines]) + "\n")
