"""Changes of dumps whose meaning stays known: each gives what may come out, and names the rules that catch it.

A mutation changes a dump in place and returns the traces that it now means: `EXACT` those of `expected`, `PART` a part
of them, `NONE` if every conversion is wrong. It returns None where it cannot be applied.
"""

import copy

import numpy as np

from tests.ingest.corpus.changed.dumps import array_of, like

EXACT, PART, NONE = "exact", "part", "none"
MUTATIONS = {}


def mutation(rules):
    """Register a mutation with the rules that catch it where it cannot be read."""

    def decorate(function):
        MUTATIONS[function.__name__] = (function, rules)
        return function

    return decorate


def _choice(rng, values):
    return values[int(rng.integers(len(values)))] if values else None


def _float_slots(dump):
    found = [slot for slot in dump.states() if (array := slot.array()) is not None and array.dtype.kind == "f"]
    return found


def _is_text(slot):
    return slot.file.endswith((".csv", ".json", ".jsonl", ".parquet"))


def _has_labels(dump):
    return any("label" in trace or "score" in trace for trace in dump.expected)


@mutation("none")
def unchanged(dump, rng):
    """The dump as it is."""
    return EXACT


@mutation("7")
def float64(dump, rng):
    """States in double precision."""
    slots = [slot for slot in _float_slots(dump) if not _is_text(slot)]
    return EXACT if slots and all([slot.set(slot.array().astype("f8")) for slot in slots]) else None


@mutation("7")
def bfloat16_bits(dump, rng):
    """States as the upper half of their bits, with the line that says so or without it."""
    slots = [slot for slot in _float_slots(dump) if not _is_text(slot)]
    what = dump.plan.layout.states
    if not slots or any(slot.array().dtype != np.float32 for slot in slots) or len(dump.plan.states) > 1:
        return None
    bits = "i2" if any(slot.file.endswith((".pt", ".safetensors")) for slot in slots) else "u2"
    done = [slot.set(((slot.array().astype("f4").view("u4") + 0x8000) >> 16).astype("u2").view(bits)) for slot in slots]
    if not all(done):
        return None
    if rng.integers(2):
        return NONE
    dump.layout[f"dtype.{what}"] = "bfloat16"
    for trace in dump.expected:
        for name in ("hidden_states", "last_token"):
            if trace.get(name) is not None:
                rounded = np.asarray(trace[name], "f4").view("u4") + 0x8000
                trace[name] = (rounded & 0xFFFF0000).astype("u4").view("f4")
    return EXACT


@mutation("17b, 24, 2")
def mask_dropped(dump, rng):
    """A mask or lengths that the layout names are not in the files; with their line or without it."""
    slots = [*dump.slots("S.mask"), *dump.slots("S.lengths")]
    slots = [slot for slot in slots if isinstance(slot.parent, dict) and slot.parent is not dump.files]
    if not slots or "(N S)" in str(dump.layout) or not _is_padded(dump):
        return None
    for slot in slots:
        del slot.parent[slot.key]
    if rng.integers(2) and _shows_padding(dump):
        for name in ("S.mask", "S.lengths", "S.side"):
            dump.layout.pop(name, None)
    return NONE


def _is_padded(dump):
    sizes = {slot.array().shape[slot.axes.index("S")] for slot in dump.states() if "S" in slot.axes and slot.array() is not None}
    lengths = {trace["hidden_states"].shape[1] for trace in dump.expected if trace["hidden_states"] is not None}
    return len(lengths) > 1 and bool(sizes)


def _shows_padding(dump):
    """Return whether states or ids show the padding without a mask: zeros, or one id repeated at one end."""
    for slot in dump.states():
        array = slot.array()
        if array is not None and {"N", "S"} <= set(slot.axes):
            tokens = np.moveaxis(array, [slot.axes.index("N"), slot.axes.index("S")], [0, 1])
            if not tokens.reshape(*tokens.shape[:2], -1).any(-1).all():
                return True
    for slot in dump.slots("tokens"):
        ids = slot.array()
        if ids is not None and ids.ndim == 2 and ids.shape[1] > 1:
            return bool(((ids[:, -1] == ids[:, -2]) | (ids[:, 0] == ids[:, 1])).any())
    return False


@mutation("17b")
def mask_inverted(dump, rng):
    """A mask that is 1 where padding is."""
    slots = [slot for slot in dump.slots("S.mask") if slot.array() is not None]
    if not slots or not any((slot.array() == 0).any() for slot in slots):
        return None
    return NONE if all([slot.set((1 - slot.array().astype("i8"))) for slot in slots]) else None


def _padded(side):
    def change(dump, rng):
        extra = int(rng.integers(1, 4))
        if not dump.slots("S.mask") or "P" in "".join(dump.states()[0].axes) or "step" in dump.states()[0].bound:
            return None
        names = dict.fromkeys(place.name for place in dump.plan.places)
        for name in names:
            for slot in dump.slots(name):
                array = slot.array()
                axes = [k for k, axis in enumerate(slot.axes) if axis in ("S", "Q", "T")]
                if not axes or array is None:
                    if axes:
                        return None
                    continue
                if slot.axes[axes[0]] == "T" or array.ndim != len(slot.axes):
                    return None
                mask = dump.slots("S.mask")[0].array()
                fill = {"S.mask": 0, "tokens": 1}.get(name, 0.0)
                if name == "tokens" and (mask == 0).any() and mask.shape == array.shape:
                    fill = int(array[mask == 0][0])
                widths = [(0, 0)] * array.ndim
                for k in axes:
                    widths[k] = (extra, 0) if side == "left" else (0, extra)
                if not slot.set(np.pad(array, widths, constant_values=fill)):
                    return None
        return EXACT

    return change


for _side in ("left", "right"):
    _change = _padded(_side)
    _change.__name__, _change.__doc__ = f"padding_{_side}", f"Padding more on the {_side}."
    mutation("17b")(_change)


def _labels(dump):
    names = [n for n in dump.plan.layout.addresses if dump.plan.layout.rule(n).kind == "score"]
    return [slot for name in names for slot in dump.slots(name)]


@mutation("22a")
def labels_per_token(dump, rng):
    """A label per token where the label of the trace was."""
    slots = [s for s in _labels(dump) if isinstance(s.parent, dict) and s.parent is not dump.files and not s.axes]
    if not slots or any(slot.file.endswith(".csv") for slot in slots):
        return None
    size = int(rng.integers(2, 6))
    is_nested = all(slot.file.endswith((".json", ".jsonl", ".parquet")) for slot in slots)
    for slot in slots:
        slot.put([int(v) for v in rng.integers(0, 2, size)] if is_nested else rng.integers(0, 2, size))
    return NONE


@mutation("8a")
def labels_per_token_beside(dump, rng):
    """A label per token that no line names."""
    parents = [s.parent for s in dump.states() if type(s.parent) is dict and s.parent is not dump.files]
    if not parents or any(isinstance(s.key, int) for s in dump.states()):
        return None
    for parent in parents:
        parent["token_labels"] = rng.integers(0, 2, 5)
    return NONE if not dump.layout.get("ignore") and len(parents) == len(dump.states()) else None


@mutation("22a")
def a_word_as_label(dump, rng):
    """A label that is neither 0 nor 1."""
    slot = _choice(rng, [s for s in _labels(dump) if isinstance(s.parent, dict) and not s.axes])
    names = [n for n in dump.plan.layout.addresses if n in ("is_correct", "is_hallucinated", "label")]
    if slot is None or not names or slot.file.endswith((".parquet", ".h5", ".npz", ".safetensors")):
        return None
    if not any(slot.parent is s.parent and slot.key == s.key for n in names for s in dump.slots(n)):
        return None
    return NONE if slot.put(_choice(rng, ["maybe", "0.5", "n"])) else None


@mutation("14")
def two_labels_disagree(dump, rng):
    """A second column of labels, for the other direction, that says the same number."""
    names = [n for n in dump.plan.layout.addresses if n in ("is_correct", "is_hallucinated")]
    if len(names) != 1 or len(dump.plan.layout.addresses[names[0]]) > 1:
        return None
    slots = dump.slots(names[0])
    if not slots or any(not isinstance(s.parent, dict) or s.parent is dump.files or s.axes for s in slots):
        return None
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
    """One id for two traces, in one file or in two."""
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
    """The items in two files, each of which numbers them from 0; labels by the number over all."""
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
    """A table without one of its rows."""
    table = _choice(rng, [t for t in dump.tables() if len(t[1]) > 1])
    if table is None:
        return None
    _, rows, is_by_name = table
    gone = rows.pop(int(rng.integers(len(rows))))
    if not is_by_name:
        return NONE
    _forget(dump, gone)
    return EXACT


def _forget(dump, row):
    """Drop what a row of a table says of its trace from the expected traces."""
    texts = {str(value) for value in row.values()}
    for trace in dump.expected:
        if trace["question_id"] is None or str(trace["question_id"]) in texts:
            for name in ("label", "score", "question", "answer"):
                trace.pop(name, None)
            if "records" in dump.layout or "question_id" in dump.layout:
                trace["question_id"] = None  # the row said the id


@mutation("12, 13, 9")
def a_row_too_many(dump, rng):
    """A table with a row more, of another id."""
    table = _choice(rng, dump.tables())
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
    """The rows of a table in another order: joined by a name, or with a column of ids that no line names."""
    table = _choice(rng, [t for t in dump.tables() if len(t[1]) > 1])
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
    """The items of traces in another order."""
    rows = _keyed_rows(dump)
    if rows is None or any(not t[2] for t in dump.tables()):
        return None
    for items in rows[0]:
        items[:] = [items[k] for k in rng.permutation(len(items))]
    return EXACT


@mutation("12b")
def ids_shifted(dump, rng):
    """Labels numbered from 1, traces from 0."""
    tables = [t for t in dump.tables() if t[2]]
    if len(tables) != 1 or not all("ok" in row and "qid" in row for row in tables[0][1]):
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
    """Ids of a table with leading zeros or blanks."""
    tables = [t for t in dump.tables() if t[2]]
    if len(tables) != 1 or not all("ok" in row and "qid" in row for row in tables[0][1]):
        return None
    spell = _choice(rng, [str.upper, lambda t: f"0{t}" if t.isdecimal() else t.upper(), lambda t: f"{t}.0"])
    rows, some = tables[0][1], len(tables[0][1]) > 1
    for row in rows[: len(rows) - some]:
        row["qid"] = spell(row["qid"])
    return None if {row["qid"] for row in rows} == {t["question_id"] for t in dump.expected} else NONE


def _tokens(change):
    def mutate(dump, rng):
        slots = [s for s in dump.slots("tokens") if (a := s.array()) is not None and a.dtype.kind in "iu"]
        slots = [s for s in slots if set(s.axes) & {"S", "T", "NS"} and s.array().ndim == len(s.axes)]
        if not slots:
            return None
        for slot in slots if slots[0].axes[0] == "N" else [_choice(rng, slots)]:
            axis = next(k for k, letter in enumerate(slot.axes) if letter in ("S", "T", "NS"))
            if slot.array().shape[axis] < 2 or not slot.set(change(slot.array(), axis)):
                return None
        return NONE

    return mutate


for _name, _of in {
    "a_token_too_many": lambda a, axis: np.insert(a, a.shape[axis], 7, axis=axis),
    "a_token_too_many_in_front": lambda a, axis: np.insert(a, 0, 7, axis=axis),
    "a_token_too_few": lambda a, axis: np.delete(a, -1, axis=axis),
    "a_token_too_few_in_front": lambda a, axis: np.delete(a, 0, axis=axis),
}.items():
    _change = _tokens(_of)
    _change.__name__, _change.__doc__ = _name, "Another number of ids than the states have tokens."
    mutation("2, 3")(_change)


@mutation("2")
def states_cut(dump, rng):
    """The states of one trace without their last token."""
    slots = [s for s in dump.states() if (a := s.array()) is not None and s.axes.count("S") == 1 and a.ndim == len(s.axes)]
    slots = [s for s in slots if s.array().shape[s.axes.index("S")] > 1]
    is_checked = bool(dump.slots("tokens") or dump.slots("attentions") or dump.slots("S.mask"))
    if not slots or not is_checked or {"layer", "step", "P"} & set(slots[0].bound) or slots[0].bound.get("P") == 0:
        return None
    slot = _choice(rng, slots)
    return NONE if slot.set(np.delete(slot.array(), -1, axis=slot.axes.index("S"))) else None


@mutation("1, 4, 11")
def a_layer_of_one_trace_missing(dump, rng):
    """One trace without one of its layers."""
    slots = [s for s in dump.states() if "layer" in s.bound and isinstance(s.parent, dict)]
    if not slots or len(dump.expected) < 2 or len({s.bound["layer"] for s in slots}) < 2:
        return None
    slot = _choice(rng, slots)
    if sum(s.bound["layer"] == slot.bound["layer"] for s in slots) < 2:
        return None
    del slot.parent[slot.key]
    return NONE


@mutation("none")
def layers_with_gaps(dump, rng):
    """Every trace without one layer whose number names say."""
    slots = [s for s in dump.states() if "layer" in s.bound and isinstance(s.parent, dict)]
    numbers = sorted({s.bound["layer"] for s in slots})
    if len(numbers) < 3 or "L.ids" in dump.layout or dump.slots("attentions") or "L.ids" in str(dump.layout):
        return None
    at = int(rng.integers(1, len(numbers) - 1))
    if any(t["hidden_states"] is not None and len(t["hidden_states"]) != len(numbers) for t in dump.expected):
        return None
    for slot in slots:
        if slot.bound["layer"] == numbers[at]:
            del slot.parent[slot.key]
    if dump.layers is not None:
        del dump.layers[at]
    for trace in dump.expected:
        for name in ("hidden_states", "last_token"):
            if trace.get(name) is not None:
                trace[name] = np.delete(trace[name], at, axis=0)
    return EXACT


@mutation("4, 11, 12, 13")
def a_file_missing(dump, rng):
    """One of several files of states is lost."""
    files = list(dict.fromkeys(slot.file for slot in dump.states()))
    layers = {slot.bound.get("layer") for slot in dump.states()}
    ends = {n: max(slot.bound.get(n, -1) for slot in dump.states()) for n in ("step", "token", "P", "S")}
    if len(files) < 2 or any(isinstance(dump.files[file], bytes) for file in files):
        return None
    gone = _choice(rng, files)
    lost = [slot.bound for slot in dump.states() if slot.file == gone]
    if any(bound.get(n) == end for bound in lost for n, end in ends.items()):
        return None  # nothing shows that the last pass or token is lost
    del dump.files[gone]
    # One layer of all traces: see layers_with_gaps.
    return PART if {slot.bound.get("layer") for slot in dump.states()} == layers else None


@mutation("10, 11")
def a_second_answer(dump, rng):
    """A second answer to a question under the same id."""
    rows = _keyed_rows(dump)
    if rows is None:
        return None
    items = _choice(rng, rows[0])
    more = copy.deepcopy(_choice(rng, items))
    key = dump.plan.states[0].address.path[-1]
    name = getattr(key, "text", "")
    if name not in more or array_of(more[name]) is None:
        return None
    more[name] = like(more[name], array_of(more[name])[..., ::-1].copy())
    items.append(more)
    return NONE


@mutation("6a, 2")
def attention_transposed(dump, rng):
    """Attention whose columns are its rows."""
    slots = [s for s in dump.slots("attentions") if (a := s.array()) is not None and a.ndim == len(s.axes)]
    slots = [s for s in slots if "S" in s.axes and "Q" in s.axes]
    if not slots or {"P", "step"} & {*slots[0].bound, *slots[0].axes} or max(s.array().shape[-1] for s in slots) < 2:
        return None
    expected = [np.asarray(trace["attention"]) for trace in dump.expected if trace.get("attention") is not None]
    if any(np.allclose(attention.sum(-2), 1, atol=0.05) for attention in expected):
        return None  # nearly uniform: nothing tells rows from columns
    done = [s.set(s.array().swapaxes(s.axes.index("S"), s.axes.index("Q")).copy()) for s in slots]
    return NONE if all(done) else None


@mutation("24")
def a_token_of_zeros(dump, rng):
    """A token that was never written."""
    slots = [s for s in _float_slots(dump) if s.array().ndim == len(s.axes)]
    slots = [s for s in slots if set(s.axes) >= {"S", "D"} and "layer" not in s.bound or s.axes == ("N", "L", "D")]
    if not slots or dump.layout.get("S.padding") or {"P", "step"} & {*slots[0].bound, *slots[0].axes}:
        return None
    if dump.slots("S.mask") or dump.slots("S.lengths") and "(N S)" not in str(dump.layout):
        return None
    slot = _choice(rng, slots)
    array = slot.array().copy()
    axis = slot.axes.index("S" if "S" in slot.axes else "N")
    array[(slice(None),) * axis + (int(rng.integers(array.shape[axis])),)] = 0
    return NONE if slot.set(array) else None


@mutation("9, 17a, 24")
def a_length_too_short(dump, rng):
    """One length that is less by one."""
    slots = [s for s in dump.slots("S.lengths") if (a := s.array()) is not None and a.ndim == 1 and a.max() > 1]
    if not slots or not (dump.slots("tokens") or "(N S)" in str(dump.layout)):
        return None
    lengths = slots[0].array().copy()
    if "(N S)" not in str(dump.layout) and (lengths < lengths.max()).sum() < 1:
        return None  # without other padding, nothing tells a token from it
    lengths[int(np.argmax(lengths))] -= 1
    return NONE if slots[0].set(lengths) else None


@mutation("4, 5")
def a_pass_missing(dump, rng):
    """A pass of generation that was not written."""
    lists = [s.value for s in dump.states() if s.axes[:1] == ("P",) and isinstance(s.value, list) and len(s.value) > 2]
    if not lists or not dump.slots("tokens"):
        return None
    for steps in lists:
        del steps[int(rng.integers(1, len(steps)))]
    return NONE


@mutation("5")
def passes_repeat(dump, rng):
    """Passes that hold the tokens before them, too."""
    slots = [s for s in dump.states() if s.axes == ("P", "L", "N", "S", "D") and isinstance(s.value, list)]
    if not slots or dump.slots("attentions") or dump.layout.get("P.repeats"):
        return None
    steps = slots[0].value
    arrays = [array_of(step) for step in steps]
    if len(steps) < 2 or any(a is None or a.ndim != 4 for a in arrays) or any(a.shape[2] != 1 for a in arrays[1:]):
        return None
    if not all(isinstance(step, list) for step in steps):
        return None
    for k in range(1, len(steps)):
        steps[k] = like(steps[k], np.concatenate(arrays[: k + 1], 2))
    return NONE
