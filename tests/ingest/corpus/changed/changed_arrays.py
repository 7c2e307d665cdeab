"""Changes of arrays: states, attention, ids, masks and lengths."""

import numpy as np

from tests.ingest.corpus.changed.dumps import array_of, like
from tests.ingest.corpus.changed.mutations import EXACT, NONE, choice, mutation


def _float_slots(dump):
    found = [slot for slot in dump.states() if (array := slot.array()) is not None and array.dtype.kind == "f"]
    return found


def _set_all(slots, change):
    """Change the arrays of slots; return whether all can be changed."""
    return all([slot.set(change(slot.array())) for slot in slots])  # noqa: C419 - every one of them


def _is_text(slot):
    return slot.file.endswith((".csv", ".json", ".jsonl", ".parquet"))


@mutation("none")
def unchanged(dump, rng):
    """Keep the dump."""
    return EXACT


@mutation("7")
def float64(dump, rng):
    """Write states in double precision."""
    slots = [slot for slot in _float_slots(dump) if not _is_text(slot)]
    return EXACT if slots and _set_all(slots, lambda array: array.astype("f8")) else None


@mutation("7")
def bfloat16_bits(dump, rng):
    """Write states as the upper half of their bits, with or without the line for them."""
    slots = [slot for slot in _float_slots(dump) if not _is_text(slot)]
    what = dump.plan.layout.states
    if not slots or any(slot.array().dtype != np.float32 for slot in slots) or len(dump.plan.states) > 1:
        return None
    bits = "i2" if any(slot.file.endswith((".pt", ".safetensors")) for slot in slots) else "u2"
    if not _set_all(slots, lambda a: ((a.astype("f4").view("u4") + 0x8000) >> 16).astype("u2").view(bits)):
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
    """Leave out a mask or lengths that the layout names, with their line or without it."""
    slots = [*dump.slots("S.mask"), *dump.slots("S.lengths")]
    slots = [slot for slot in slots if isinstance(slot.parent, dict) and slot.parent is not dump.files]
    if not slots or "(N S)" in str(dump.layout) or not _is_padded(dump):
        return None
    if "S.mask" in dump.layout and all(np.all(slot.array()) for slot in slots):
        return None  # rows end in the passes, by S.pad: the mask says nothing
    for slot in slots:
        del slot.parent[slot.key]
    if rng.integers(2) and _shows_padding(dump):
        for name in ("S.mask", "S.lengths", "S.side"):
            dump.layout.pop(name, None)
    return NONE


def _is_padded(dump):
    sizes = {
        slot.array().shape[slot.axes.index("S")]
        for slot in dump.states()
        if "S" in slot.axes and slot.array() is not None
    }
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
    """Write a mask that is 1 where padding is."""
    slots = [slot for slot in dump.slots("S.mask") if slot.array() is not None]
    if not slots or not any((slot.array() == 0).any() for slot in slots):
        return None
    return NONE if _set_all(slots, lambda array: 1 - array.astype("i8")) else None


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
    _change.__name__, _change.__doc__ = f"padding_{_side}", f"Add padding on the {_side}."
    mutation("17b")(_change)


def _tokens(change):
    def mutate(dump, rng):
        slots = [s for s in dump.slots("tokens") if (a := s.array()) is not None and a.dtype.kind in "iu"]
        slots = [s for s in slots if set(s.axes) & {"S", "T", "NS"} and s.array().ndim == len(s.axes)]
        if not slots or (
            "T" in slots[0].axes and not {"P", "step"} & {*dump.states()[0].axes, *dump.states()[0].bound}
        ):
            return None  # T is as many as states or one more
        for slot in slots if slots[0].axes[0] == "N" else [choice(rng, slots)]:
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
    """Cut the last token of the states of one trace."""
    slots = [
        s for s in dump.states() if (a := s.array()) is not None and s.axes.count("S") == 1 and a.ndim == len(s.axes)
    ]
    slots = [s for s in slots if s.array().shape[s.axes.index("S")] > 1]
    is_checked = bool(dump.slots("tokens") or dump.slots("attentions") or dump.slots("S.mask"))
    if not slots or not is_checked or {"layer", "step", "P"} & set(slots[0].bound) or slots[0].bound.get("P") == 0:
        return None
    slot = choice(rng, slots)
    return NONE if slot.set(np.delete(slot.array(), -1, axis=slot.axes.index("S"))) else None


@mutation("1, 4, 11")
def a_layer_of_one_trace_missing(dump, rng):
    """Leave out one layer of one trace."""
    slots = [s for s in dump.states() if "layer" in s.bound and isinstance(s.parent, dict)]
    if not slots or len(dump.expected) < 2 or len({s.bound["layer"] for s in slots}) < 2:
        return None
    slot = choice(rng, slots)
    if sum(s.bound["layer"] == slot.bound["layer"] for s in slots) < 2:
        return None
    del slot.parent[slot.key]
    return NONE


@mutation("none")
def layers_with_gaps(dump, rng):
    """Leave out one layer of every trace, where names state the numbers."""
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


@mutation("6a, 2")
def attention_transposed(dump, rng):
    """Exchange rows and columns of attention."""
    slots = [s for s in dump.slots("attentions") if (a := s.array()) is not None and a.ndim == len(s.axes)]
    slots = [s for s in slots if "S" in s.axes and "Q" in s.axes]
    if not slots or {"P", "step"} & {*slots[0].bound, *slots[0].axes} or max(s.array().shape[-1] for s in slots) < 2:
        return None
    expected = [np.asarray(trace["attention"]) for trace in dump.expected if trace.get("attention") is not None]
    if any(np.allclose(attention.sum(-2), 1, atol=0.05) for attention in expected):
        return None  # nearly uniform: nothing tells rows from columns
    a, b = slots[0].axes.index("S"), slots[0].axes.index("Q")
    return NONE if _set_all(slots, lambda array: array.swapaxes(a, b).copy()) else None


@mutation("24")
def a_token_of_zeros(dump, rng):
    """Write zeros instead of a token."""
    slots = [s for s in _float_slots(dump) if s.array().ndim == len(s.axes)]
    slots = [s for s in slots if (set(s.axes) >= {"S", "D"} and "layer" not in s.bound) or s.axes == ("N", "L", "D")]
    if not slots or dump.layout.get("S.padding") or {"P", "step"} & {*slots[0].bound, *slots[0].axes}:
        return None
    if dump.slots("S.mask") or (dump.slots("S.lengths") and "(N S)" not in str(dump.layout)):
        return None
    slot = choice(rng, slots)
    array = slot.array().copy()
    axis = slot.axes.index("S" if "S" in slot.axes else "N")
    array[(slice(None),) * axis + (int(rng.integers(array.shape[axis])),)] = 0
    return NONE if slot.set(array) else None


@mutation("9, 17a, 24")
def a_length_too_short(dump, rng):
    """Reduce one length by one."""
    slots = [s for s in dump.slots("S.lengths") if (a := s.array()) is not None and a.ndim == 1 and a.max() > 1]
    if not slots or not (dump.slots("tokens") or "(N S)" in str(dump.layout)):
        return None
    lengths = slots[0].array().copy()
    if "(N S)" not in str(dump.layout) and (lengths < lengths.max()).sum() < 1:
        return None  # without other padding, nothing tells a token from it
    lengths[int(np.argmax(lengths))] -= 1
    return NONE if slots[0].set(lengths) else None


@mutation("17c, 24")
def a_token_of_padding_kept(dump, rng):
    """Let masks and lengths keep one token of the padding of each row."""
    masks, lengths = ([s for s in dump.slots(name) if s.array() is not None] for name in ("S.mask", "S.lengths"))
    if not dump.slots("tokens") or "(N S)" in str(dump.layout) or {"P", "step"} & {*dump.states()[0].axes}:
        return None
    if any("S.pad" in name for name in dump.layout) or not any((slot.array() == 0).any() for slot in masks):
        return None
    return NONE if _set_all(masks, _with_one_more) and _set_all(lengths, lambda array: array + 1) else None


def _with_one_more(mask):
    """Return a mask whose rows have one more token at each end where they leave some out."""
    wide = np.pad(mask.astype("i8"), [(0, 0)] * (mask.ndim - 1) + [(1, 1)])
    return np.maximum(np.maximum(wide[..., :-2], wide[..., 1:-1]), wide[..., 2:])


@mutation("3a")
def early_end_not_stated(dump, rng):
    """Leave out the line for the id that fills a row of generate() that ended early."""
    if "S.pad" not in dump.layout or dump.slots("S.lengths"):
        return None
    rows = [row for slot in dump.slots("tokens") if (ids := slot.array()) is not None for row in np.atleast_2d(ids)]
    if not any(len(row) > 1 and row[-1] == row[-2] for row in rows):
        return None
    del dump.layout["S.pad"]
    return NONE


@mutation("4, 5")
def a_pass_missing(dump, rng):
    """Leave out a pass of generation."""
    lists = [s.value for s in dump.states() if s.axes[:1] == ("P",) and isinstance(s.value, list) and len(s.value) > 2]
    if not lists or not dump.slots("tokens"):
        return None
    for steps in lists:
        del steps[int(rng.integers(1, len(steps)))]
    return NONE


@mutation("5")
def passes_repeat(dump, rng):
    """Write passes that hold the tokens before them, too."""
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
