"""Changes of rows, items and files: labels, ids, tables and their order."""

import numpy as np

from tests.ingest.corpus.changed.dumps import array_of, like
from tests.ingest.corpus.changed.mutations import EXACT, NONE, PART, choice, mutation


def _labels(dump):
    names = [n for n in dump.plan.layout.addresses if dump.plan.layout.rule(n).kind == "score"]
    return [slot for name in names for slot in dump.slots(name)]


@mutation("22a")
def labels_per_token(dump, rng):
    """Write a label per token instead of the label of the trace."""
    slots = [s for s in _labels(dump) if isinstance(s.parent, dict) and s.parent is not dump.files and not s.axes]
    if not slots or any(slot.file.endswith(".csv") for slot in slots):
        return None
    size = int(rng.integers(2, 6))
    is_nested = all(slot.file.endswith((".json", ".jsonl", ".parquet")) for slot in slots)
    for slot in slots:
        slot.put([int(v) for v in rng.integers(0, 2, size)] if is_nested else rng.integers(0, 2, size))
    return NONE


@mutation("8a")
def further_labels_per_token(dump, rng):
    """Add a label per token that no line names."""
    parents = [s.parent for s in dump.states() if type(s.parent) is dict and s.parent is not dump.files]
    if not parents or any(isinstance(s.key, int) for s in dump.states()):
        return None
    size = 6 if len(dump.expected) == 5 else 5  # as many numbers as traces could be their labels
    for parent in parents:
        parent["token_labels"] = rng.integers(0, 2, size)
    return NONE if not dump.layout.get("ignore") and len(parents) == len(dump.states()) else None


@mutation("22a")
def a_word_as_label(dump, rng):
    """Write a label that is neither 0 nor 1."""
    slot = choice(rng, [s for s in _labels(dump) if isinstance(s.parent, dict) and not s.axes])
    names = [n for n in dump.plan.layout.addresses if n in ("is_correct", "is_hallucinated", "label")]
    if slot is None or not names or slot.file.endswith((".parquet", ".h5", ".npz", ".safetensors")):
        return None
    if not any(slot.parent is s.parent and slot.key == s.key for n in names for s in dump.slots(n)):
        return None
    return NONE if slot.put(choice(rng, ["maybe", "0.5", "n"])) else None


@mutation("14")
def two_labels_disagree(dump, rng):
    """Add a column of labels for the other direction that holds the same number."""
    names = [n for n in dump.plan.layout.addresses if n in ("is_correct", "is_hallucinated")]
    if len(names) != 1 or len(dump.plan.layout.addresses[names[0]]) > 1:
        return None
    slots = dump.slots(names[0])
    if not slots or any(not isinstance(s.parent, dict) or s.parent is dump.files or s.axes for s in slots):
        return None
    if any(slot.key in slot.bound.values() for slot in slots):
        return None  # the keys are ids
    other = {"is_correct": "is_hallucinated", "is_hallucinated": "is_correct"}[names[0]]
    wrong = int(rng.integers(len(slots)))
    for k, slot in enumerate(slots):
        if str(slot.value) not in ("0", "1"):
            return None
        slot.parent["other_verdict"] = slot.value if k == wrong else 1 - int(slot.value)
    line = dump.layout[names[0]]
    if rng.integers(2) and "/" in line.partition(" : ")[2]:
        dump.layout[other] = line.rpartition("/")[0] + "/other_verdict"
    return NONE


def _id_slots(dump):
    return [s for s in dump.slots("question_id") if not s.axes or s.axes == ("N",)]


@mutation("10")
def ids_repeated(dump, rng):
    """Give two traces one id, in one file or in two."""
    rows = _keyed_rows(dump)
    if rows is not None:
        lists, key = rows
        every = [row for rows in lists for row in rows]
        if len(every) < 2:
            return None
        a, b = (every[int(k)] for k in rng.permutation(len(every))[:2])
        if key not in a or key not in b or a[key] == b[key]:
            return None
        b[key] = a[key]
        return NONE
    slots = _id_slots(dump)
    if len(slots) == 1 and isinstance(slots[0].value, list) and len(slots[0].value) > 1:
        slots[0].value[-1] = slots[0].value[0]
        return NONE
    if len(slots) > 1 and isinstance(slots[0].parent, dict) and slots[0].parent is not dump.files:
        slots[-1].put(slots[0].value)
        return NONE
    return None


def _keyed_rows(dump):
    """Return the lists of the items of the states that are named by one key, and the key."""
    place = dump.plan.states[0]
    step = place.address.path[0] if place.address.path else None
    values = getattr(step, "values", ())
    if len(dump.plan.states) > 1 or [v.name for v in values] != ["id"] or len(values[0].path) > 1:
        return None
    if any(getattr(s, "letter", None) for s in place.address.path[1:]) or "{sample}" in place.address.files.text:
        return None
    lists = [dump.files[file] for file in dump.owned(place)]
    if not all(isinstance(rows, list) and all(type(row) is dict for row in rows) for rows in lists):
        return None
    return lists, values[0].path[0]


@mutation("10, 12a")
def ids_numbered_per_file(dump, rng):
    """Split the items into two files, each of which numbers them from 0; labels by the number over all."""
    rows = _keyed_rows(dump)
    if rows is None or len(rows[0]) > 1 or len(rows[0][0]) < 2:
        return None
    file = dump.owned(dump.plan.states[0])[0]
    (items,), key = rows
    del dump.files[file]
    base = file.rpartition(".")
    half = (len(items) + 1) // 2
    for rank, part in enumerate((items[:half], items[half:])):
        for k, row in enumerate(part):
            row[key] = k
        dump.files[f"{base[0]}_rank{rank}.{base[2]}"] = part
    old, new = dump.plan.states[0].address.files.text, f"{base[0]}_rank*.{base[2]}"
    for name, value in dump.layout.items():
        if isinstance(value, str) and value.startswith(old + " "):
            dump.layout[name] = new + value[len(old) :]
        elif isinstance(value, list) and name not in ("L.ids", "S.pad"):
            dump.layout[name] = [new + v[len(old) :] if str(v).startswith(old + " ") else v for v in value]
    return NONE


@mutation("12, 12c, 13, 9")
def a_row_too_few(dump, rng):
    """Drop a row of a table."""
    table = choice(rng, [t for t in dump.tables() if len(t[1]) > 1])
    if table is None:
        return None
    _, rows, is_by_name = table
    gone = rows.pop(int(rng.integers(len(rows))))
    if not is_by_name:
        return NONE
    _forget(dump, gone)
    return EXACT


def _forget(dump, row):
    """Drop the values of a row of a table from its expected trace."""
    texts = {str(value) for value in row.values()}
    for trace in dump.expected:
        if trace["question_id"] is None or str(trace["question_id"]) in texts:
            for name in ("label", "score", "question", "answer", "tokens", "tokens_decoded", "prompt_length"):
                trace.pop(name, None)
            if "records" in dump.layout or "question_id" in dump.layout:
                trace["question_id"] = None  # the row held the id


@mutation("12, 13, 9")
def a_row_too_many(dump, rng):
    """Add a row of another id to a table."""
    table = choice(rng, dump.tables())
    if table is None:
        return None
    _, rows, is_by_name = table
    more = {n: f"{v}zzz" if isinstance(v, str) and not v.isdecimal() else v for n, v in rows[0].items()}
    more |= {n: str(int(v) + 1000) if isinstance(v, str) else v + 1000 for n, v in more.items() if _is_key(dump, n, v)}
    if more in rows:
        return None
    rows.insert(int(rng.integers(len(rows) + 1)), more)
    return EXACT if is_by_name else NONE


def _is_key(dump, name, value):
    """Return whether a column of numbers joins rows."""
    is_number = (isinstance(value, str) and value.isdecimal()) or type(value) is int
    return is_number and any(f"={name}" in str(line) for line in dump.layout.values())


@mutation("none, 13")
def rows_permuted(dump, rng):
    """Permute the rows of a table: joined by a name, or with a column of ids that no line names."""
    table = choice(rng, [t for t in dump.tables() if len(t[1]) > 1])
    if table is None:
        return None
    file, rows, is_by_name = table
    order = rng.permutation(len(rows))
    if (order == np.arange(len(rows))).all():
        order = order[::-1]
    if is_by_name:
        rows[:] = [rows[k] for k in order]
        return EXACT
    if any(str(line).startswith(file) for name, line in dump.layout.items() if name.startswith(("S.", "records"))):
        return None
    if "question_id" in dump.layout and str(dump.layout["question_id"]).startswith(file):
        dump.layout.pop("question_id")
        if "[id=" in str(dump.layout) or "{id}" in str(dump.layout):
            return None
    for k, row in enumerate(rows):
        row["idx"] = k
    rows[:] = [rows[k] for k in order]
    return NONE


@mutation("none")
def items_permuted(dump, rng):
    """Permute the items of traces."""
    rows = _keyed_rows(dump)
    if rows is None or any(not t[2] for t in dump.tables()):
        return None
    for items in rows[0]:
        items[:] = [items[k] for k in rng.permutation(len(items))]
    return EXACT


@mutation("12b")
def ids_shifted(dump, rng):
    """Number labels from 1, traces from 0."""
    tables = [t for t in dump.tables() if t[2]]
    if len(tables) != 1 or not all("qid" in row and len(row) == 3 for row in tables[0][1]):
        return None
    rows, names = tables[0][1], [trace["question_id"] for trace in dump.expected]
    if len(rows) < 2 or sorted(row["qid"] for row in rows) != sorted(names):
        return None
    head = names[0].rstrip("0123456789")
    if sorted(names) != [f"{head}{k}" for k in range(len(names))]:
        return None
    for row in rows:
        row["qid"] = f"{head}{int(row['qid'][len(head) :]) + 1}"
    return NONE


@mutation("12b")
def ids_spelled_otherwise(dump, rng):
    """Write ids of a table with leading zeros or in capital letters."""
    tables = [t for t in dump.tables() if t[2]]
    if len(tables) != 1 or not all("qid" in row and len(row) == 3 for row in tables[0][1]):
        return None
    spell = choice(rng, [str.upper, lambda t: f"0{t}" if t.isdecimal() else t.upper(), lambda t: f"{t}.0"])
    rows, some = tables[0][1], len(tables[0][1]) > 1
    for row in rows[: len(rows) - some]:
        row["qid"] = spell(row["qid"])
    return None if {row["qid"] for row in rows} == {t["question_id"] for t in dump.expected} else NONE


def _is_last(slot, slots):
    """Return whether a slot is the last pass or token of its trace."""
    for name in {"step", "token", "P", "S"} & slot.bound.keys():
        rest = {n: v for n, v in slot.bound.items() if n not in (name, "layer")}
        others = [s.bound[name] for s in slots if all(s.bound.get(n) == v for n, v in rest.items())]
        return slot.bound[name] == max(others)
    return False


@mutation("4, 11, 12, 13")
def a_file_missing(dump, rng):
    """Remove one of several files of states."""
    files = list(dict.fromkeys(slot.file for slot in dump.states()))
    layers = {slot.bound.get("layer") for slot in dump.states()}
    if len(files) < 2 or any(isinstance(dump.files[file], bytes) for file in files):
        return None
    gone = choice(rng, files)
    if any(_is_last(slot, dump.states()) for slot in dump.states() if slot.file == gone):
        return None  # nothing shows that the last pass or token is lost
    del dump.files[gone]
    # One layer of all traces: see layers_with_gaps.
    return PART if {slot.bound.get("layer") for slot in dump.states()} == layers else None


@mutation("10, 11")
def a_second_answer(dump, rng):
    """Add a second answer to a question under the same id."""
    rows = _keyed_rows(dump)
    if rows is None:
        return None
    items = choice(rng, rows[0])
    more = dict(choice(rng, items))
    key = dump.plan.states[0].address.path[-1]
    name = getattr(key, "text", "")
    if name not in more or array_of(more[name]) is None:
        return None
    more[name] = like(more[name], array_of(more[name])[..., ::-1].copy())
    items.append(more)
    return NONE
