"""Arrays of one trace: states, attention, tokens and their texts, of all parts and passes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tracestore.errors import InvalidInputError
from tracestore.ingest.execute.axes import Block, descend, extent, read, read_block, settle_dtype, shaped
from tracestore.ingest.execute.found import Columns, FoundTrace, identity_of
from tracestore.ingest.execute.join import Column
from tracestore.ingest.execute.tokens import numbers_of
from tracestore.ingest.execute.values import is_missing
from tracestore.ingest.execute.walk import Cell
from tracestore.ingest.layout.addresses import KeyStep
from tracestore.ingest.layout.places import Place
from tracestore.ingest.tree import Items, Value, as_array

_TOLERANCE = 2e-2  # of a sum of weights in float16 or bfloat16
_BITS, _FLOAT = np.dtype("<u2"), np.dtype("<f4")
_MOST_BITS = int(np.float16(1 + _TOLERANCE).view("<u2"))  # of positive numbers up to it; negative ones have more


class ArrayReader:
    """Read the arrays of traces.

    Parameters
    ----------
    columns : Columns
        What the source and the tables hold.
    """

    def __init__(self, columns: Columns) -> None:
        self.columns, self.plan = columns, columns.plan
        self.settings = self.plan.layout.settings
        self.missing: dict[Place, set[str]] = {}

    def count(self, trace: FoundTrace, place: Place, column: Column, *, is_there: bool) -> None:
        """Count a trace for which a table has no row."""
        if not is_there:
            key = next((trace.environment[name] for name in column.names if name in trace.environment), "")
            self.missing.setdefault(place, set()).add(str(key))

    def states(self, trace: FoundTrace, letters: str) -> tuple[list[np.ndarray], list[int], tuple[int, ...] | None]:
        """Return the layers of the states, the number of tokens of each part and pass, and the numbers of the layers."""
        what = self.plan.layout.states
        parts: list[Block] = []
        ids: tuple[int, ...] | None = None
        rows = self.rows_of_passes(trace)
        for part in sorted(trace.cells):
            num_before = trace.num_first = sum(len(block.layers[0]) for block in parts)
            own = self._shaped(trace, trace.cells[part])
            for cells, fixed in self.passes(own, trace.fixed, rows, (num_before, len(parts))):
                block = read_block(cells, letters, fixed, self.settings, what, num_before)
                settle_dtype(block, what, self.settings)
                if shapes := {layer.shape for layer in block.layers} - {block.layers[0].shape}:
                    found = f"{shapes.pop()} in one layer, expected {block.layers[0].shape} as in the first"
                    raise InvalidInputError(f"found {found}", field=what)
                if parts and (block.ids != ids or len(block.layers) != len(parts[0].layers)):
                    raise InvalidInputError(
                        f"found {len(block.layers)} layers, expected {len(parts[0].layers)} as before", field=what
                    )
                parts.append(block)
                ids = block.ids
        if "S" not in letters:
            if len(parts) > 1:
                raise InvalidInputError("found several passes of one token", field=what)
            return parts[0].layers, [1], ids
        sizes = [len(block.layers[0]) for block in parts]
        if self.settings.get("P.repeats"):
            if sizes != sorted(sizes):
                raise InvalidInputError(f"passes of {sizes!s:.60} tokens do not grow", field=what)
            parts, sizes = parts[-1:], sizes[-1:]
        if len(parts) == 1:
            return parts[0].layers, sizes, ids
        joined = []
        for layers in zip(*(block.layers for block in parts), strict=True):
            if len({layer.shape[1:] for layer in layers}) > 1 or len({layer.dtype for layer in layers}) > 1:
                raise InvalidInputError("found passes of different widths", field=what)
            joined.append(np.concatenate(layers))
        return joined, sizes, ids

    def _shaped(self, trace: FoundTrace, cells: list[Cell]) -> list[Cell]:
        """Return the cells of the states in the shape that the layout states for flat numbers."""
        what = self.plan.layout.states
        found = self.array(f"shape.{what}", trace, "V")
        return cells if found is None else [shaped(c, found[0], self.settings.get(f"dtype.{what}")) for c in cells]

    def rows_of_passes(self, trace: FoundTrace) -> list[int] | None:
        """Return the row of the batch that each pass of a trace is, None without a line for P.rows."""
        found = self.array("P.rows", trace, "P")
        return None if found is None else found[0].tolist()

    def passes(
        self,
        cells: list[Cell],
        fixed: Mapping[str, Any],
        rows: list[int] | None = None,
        firsts: tuple[int, ...] | None = (),
    ) -> Iterator[tuple[list[Cell], Mapping[str, Any]]]:
        """Yield the cells of each pass of generation, or all of them, with what is fixed on the axes.

        `rows` are the positions of a beam, which begin to be negative behind its end. Steps are numbered from 0, 1 or
        one of `firsts`; from any number where `firsts` is None.
        """
        name = next((n for n in ("step", "P") if n in cells[0].bound), None)
        if name is not None:
            numbers = sorted({cell.bound[name] for cell in cells})
            if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
                raise InvalidInputError(f"the steps {numbers!s:.60} have gaps", field=cells[0].place.name)
            if firsts is not None and numbers[0] not in (0, 1, *firsts):
                expected = " or ".join(map(str, sorted({0, 1, *firsts})))
                raise InvalidInputError(
                    f"the first step is {numbers[0]}, expected {expected}", field=cells[0].place.name
                )
            for number in numbers:
                yield [cell for cell in cells if cell.bound[name] == number], fixed
        elif "P" in cells[0].axes:
            count = extent(cells[0].value, cells[0].axes, "P")
            if not count:
                raise InvalidInputError("found zero passes, expected at least one", field=cells[0].place.name)
            if rows is None:
                yield from ((cells, {**fixed, "P": number}) for number in range(count))
                return
            kept = next((k for k, row in enumerate(rows) if row < 0), len(rows))
            if not 0 < kept <= count or any(row >= 0 for row in rows[kept:]):
                raise InvalidInputError(f"found {rows!s:.60} for {count} passes", field="P.rows")
            yield from ((cells, {**fixed, "P": number, "N": rows[number]}) for number in range(kept))
        else:
            yield cells, fixed

    def attention(
        self, trace: FoundTrace, sizes: list[int], ids: tuple[int, ...] | None, *, is_needed: bool
    ) -> list[np.ndarray] | None:
        """Return the layers (H, S, S) of the attention of a trace, None without; `ids` are the layers of the states."""
        found = {k: cells for k, cells in self._cells("attentions", trace).items() if not all(map(_is_empty, cells))}
        if not found or not is_needed:
            return None
        fixed = self.fixed_of(trace, found[min(found)][0])
        blocks: list[Block] = []
        for part in sorted(found):
            for cells, inner in self.passes(found[part], fixed, self.rows_of_passes(trace), None if part else ()):
                blocks.append(read_block(cells, "HSQ", inner, self.settings, "attentions"))
        if self.settings.get("P.repeats"):
            blocks = blocks[-1:]
        # The states may have the embeddings in front, or be numbered with them.
        own = blocks[0].ids
        is_shifted = ids == tuple(range(len(ids or ()))) and own == ids[:-1]
        if ids and own and own not in (ids, ids[1:]) and not is_shifted:
            raise InvalidInputError(f"found the layers {list(own)}, expected {list(ids)}", field="attentions")
        return joined_attention(blocks, sum(sizes))

    def is_head_mean(self) -> bool:
        """Return whether the attention has no axis of heads."""
        places = [place for place, _ in self.columns.of("attentions")]
        return not ({"head", "H"} & {*places[0].address.bound, *places[0].axes})

    def _cells(self, name: str, trace: FoundTrace) -> dict[int, list[Cell]]:
        """Return the cells of a field by the part of the field that they are."""
        found: dict[int, list[Cell]] = {}
        for place, column in self.columns.of(name):
            cells = [cell for cell in column.cells(trace.environment) if not is_missing(cell.value)]
            if place in self.columns.tables:
                self.count(trace, place, column, is_there=bool(cells))
            if cells:
                if column.use(trace.environment, identity_of(trace, self.settings)) > 1 and place.rule.kind != "known":
                    raise InvalidInputError(f"one value of {place.address} serves several traces", field=name)
                found.setdefault(place.part, cells)
        return found

    def fixed_of(self, trace: FoundTrace, cell: Cell) -> dict[str, Any]:
        """Return what is fixed on the axes of a cell for a trace."""
        fixed = dict(trace.fixed)
        if "NS" in cell.axes and (size := extent(cell.value, cell.axes, "NS")) != trace.num_rows:
            raise InvalidInputError(
                f"found {size} on the axis (N S), expected {trace.num_rows:,} as states", field=cell.place.name
            )
        if "N" in cell.axes:
            fixed["N"] = trace.environment["N*" if "N*" in self.plan.keys.get(cell.place, ()) else "N"]
        if "K" in cell.axes:
            fixed["K"] = trace.environment["K"]
        return fixed

    def has_full_mask(self, trace: FoundTrace) -> bool:
        """Return whether the mask of one trace of a stack leaves out no token."""
        for cells in self._cells("S.mask", trace).values():
            array = as_array(cells[0].value)
            if array is not None and cells[0].axes[0] in ("N", "K"):
                values = array.read()
                return bool(values.reshape(len(values), -1).all(axis=1).any())
        return any(
            (array := as_array(cell.value)) is not None and bool(array.read().all())
            for _, column in self.columns.of("S.mask")
            for cell in column.all_cells()
        )

    def array(self, name: str, trace: FoundTrace, letters: str) -> tuple[np.ndarray, str] | None:
        """Return the values of a field on one of the letters, its parts behind each other, and the letter."""
        found = self._cells(name, trace)
        arrays, letter = list[np.ndarray](), letters[0]
        for part in sorted(found):
            _check_first_part(trace, part, sum(map(len, arrays)), name)
            fixed_of_part = self.fixed_of(trace, found[part][0])
            for cells, fixed in self.passes(found[part], fixed_of_part, firsts=None if part else ()):
                letter = next((c for c in letters if c in cells[0].axes), letters[0])
                if (axis := next((a for a in cells[0].axes if len(a) > 1 and a[0] == "N"), None)) is not None:
                    letter = axis[-1]
                names = [n for n in ("token", *letters) if n in cells[0].bound]
                if names:
                    ordered = one_per_token(cells, names[0], name)
                    numbers = [read(cell.value, cell.axes, fixed, name)[0] for cell in ordered]
                    arrays.append(np.stack(numbers))
                else:
                    copies = [np.atleast_1d(read(cell.value, cell.axes, fixed, name)[0]) for cell in cells]
                    if not all(np.array_equal(copy, copies[0]) for copy in copies[1:]):
                        raise InvalidInputError("found different values for one trace", field=name)
                    arrays.append(copies[0])
        if not arrays:
            return None
        return (arrays[0] if len(arrays) == 1 else np.concatenate(arrays)), letter

    def tokens(self, trace: FoundTrace, num_states: int, length: int | None, *, has_passes: bool) -> np.ndarray | None:
        """Return the ids of the tokens: as many as states, or one more where that is known (rule 3).

        Ids without padding next to padded states are as many as `length` says.
        """
        found = self.array("tokens", trace, "STG")
        if found is None:
            return None
        ids, letter = found
        place = next(place for place, _ in self.columns.of("tokens"))
        if letter == "G" and place.part == 0 and len(self.plan.layout.addresses["tokens"]) == 1:
            raise InvalidInputError(
                "ids from prompt_length on need those of the prompt: a list of two addresses", field="tokens"
            )
        last = place.address.path[-1] if place.address.path else None
        if place.address.axes is None and isinstance(last, KeyStep) and last.text == "sequences":
            letter = "T"
        # The ids that generate() and vLLM return are always one more: one id less would move the others.
        is_exact = letter == "G" or (letter == "T" and has_passes)
        if self.rows_of_passes(trace) is not None and letter == "T" and len(set(ids[num_states + 1 :].tolist())) < 2:
            ids = ids[: num_states + 1]  # a beam that ended early
        is_unpadded = letter == "S" and ids.shape == (length,) and len(ids) < num_states
        if not is_unpadded:
            check_ids(ids, num_states, is_wider=letter in "TG", is_exact=is_exact)
        return ids

    def texts(self, trace: FoundTrace) -> list[str] | None:
        """Return the text of each token, None without."""
        found = self._cells("tokens_decoded", trace)
        texts: list[Value] = []
        for part in sorted(found):
            cells = found[part]
            _check_first_part(trace, part, len(texts), "tokens_decoded")
            name = next((n for n in ("token", "S", "T") if n in cells[0].bound), None)
            if name is not None:
                texts += [cell.value for cell in one_per_token(cells, name, "tokens_decoded")]
                continue
            fixed = self.fixed_of(trace, cells[0])
            value, axes = descend(cells[0].value, cells[0].axes, fixed)
            if not isinstance(value, Items):
                raise InvalidInputError("the trace has no list of texts, one for each token", field="tokens_decoded")
            texts += list(value)[fixed["NS"]] if axes[:1] == ("NS",) else list(value)
        if not found:
            return None
        if not all(isinstance(text, str) for text in texts):
            raise InvalidInputError("found other values than texts", field="tokens_decoded")
        return [str(text) for text in texts]


def _check_first_part(trace: FoundTrace, part: int, num_before: int, what: str) -> None:
    """Refuse a first part of a field with another number of tokens than that of the states."""
    if part and trace.num_first not in (0, num_before):
        raise InvalidInputError(
            f"found {num_before} values in the first part, and {trace.num_first} states in theirs", field=what
        )


def check_ids(ids: np.ndarray, num_states: int, *, is_wider: bool, is_exact: bool = False) -> None:
    """Rule 3: as many ids as states, or one more where that is known; exactly one more with `is_exact`."""
    if not num_states:
        raise InvalidInputError("found zero tokens, expected at least one", field="hidden_states")
    if ids.ndim == 1 and len(ids) == num_states and not is_exact:
        return
    allowed = [num_states] * (not is_exact) + [num_states + 1] * is_wider
    if ids.ndim != 1 or len(ids) not in allowed:
        found, expected = (
            f"{len(ids)} ids" if ids.ndim == 1 else f"the shape {ids.shape}",
            " or ".join(map(str, allowed)),
        )
        hint = "; -> T says that the last token has no states" if ids.shape[:1] == (num_states + 1,) else ""
        raise InvalidInputError(f"found {found}, expected {expected} for {num_states} states{hint}", field="tokens")


def one_per_token(cells: Sequence[Cell], name: str, what: str) -> list[Cell]:
    """Return the cells of a trace in the order of its tokens; rows of one token, such as those of its layers, are equal."""
    found: dict[int, Cell] = {}
    for cell in cells:
        first = found.setdefault(cell.bound[name], cell)
        if first.value != cell.value:
            raise InvalidInputError(f"found two values of {name} {cell.bound[name]}", field=what)
    return [found[k] for k in sorted(found)]


def joined_attention(blocks: Sequence[Block], num_tokens: int) -> list[np.ndarray]:
    """Return the layers (H, S, S) of passes, each of which attends to the tokens so far.

    Raises
    ------
    InvalidInputError
        If a pass has another number of layers or columns (rule 2).
    """
    what = "attentions"
    if len(blocks) == 1:
        layers = blocks[0].layers
        for layer in layers:
            if layer.shape[-2:] != (num_tokens, num_tokens):
                raise InvalidInputError(
                    f"found the shape {layer.shape}, expected (H, {num_tokens}, {num_tokens}) as states", field=what
                )
        return layers
    joined = []
    for of_layer in zip(*(block.layers for block in blocks), strict=True):
        seen, rows, window = 0, [], 0
        for layer in of_layer:
            seen += layer.shape[1]
            is_of_window = window in (0, layer.shape[2])  # a sliding window is as wide in every later pass
            window = layer.shape[2] if layer.shape[2] < seen else window
            layer = _columns_so_far(layer, seen)
            if layer.shape[2] != seen or not is_of_window:
                raise InvalidInputError(
                    f"found {layer.shape[2]} columns, expected the {seen} tokens so far", field=what
                )
            rows.append(np.pad(layer, ((0, 0), (0, 0), (0, num_tokens - seen))))
        joined.append(np.concatenate(rows, axis=1))
        if seen != num_tokens:
            raise InvalidInputError(f"found {seen} rows, expected {num_tokens} as states", field=what)
    return joined


def _columns_so_far(layer: np.ndarray, seen: int) -> np.ndarray:
    """Return the columns of a pass for the tokens so far, or all columns if the pass does not show which they are.

    A static cache has columns of zeros behind them. A sliding window keeps the last ones, to which one new token attends
    with weights that sum to 1.
    """
    width = layer.shape[2]
    if width > seen and not numbers_of(layer[:, :, seen:]).any():
        return layer[:, :, :seen]
    if width < seen and layer.shape[1] == 1 and _are_one(numbers_of(layer).sum(-1, dtype="f4")):
        return np.pad(layer, ((0, 0), (0, 0), (seen - width, 0)))
    return layer


def check_attention_values(layer: np.ndarray) -> None:
    """Rule 6a: attention lies in [0, 1], and its rows sum to 1 rather than its columns."""
    values = numbers_of(layer)
    if layer.dtype != np.float16 or np.maximum.reduce(layer.view(_BITS), axis=None, initial=0) > _MOST_BITS:
        low, high = float(values.min(initial=0)), float(values.max(initial=0))
        if low < -1e-6 or high > 1 + _TOLERANCE:
            raise InvalidInputError(f"found values from {low:.3g} to {high:.3g}, expected 0 to 1", field="attentions")
    # Of causal attention the first column sums to more: every token attends to the first one.
    if abs(float(np.add.reduce(values[0, :, 0], dtype=_FLOAT)) - 1) > 2 * _TOLERANCE:
        return
    rows, columns = (values.sum(axis, dtype="f4") for axis in (-1, -2))
    if _are_one(columns) and not _are_one(rows):
        raise InvalidInputError("its columns sum to 1 and its rows do not: it is transposed", field="attentions")


def _are_one(sums: np.ndarray) -> bool:
    return bool((abs(sums - 1) <= 2 * _TOLERANCE).all())


def _is_empty(cell: Cell) -> bool:
    """Return whether a value is a list of nothing, as a model that gives no attention leaves it."""
    return isinstance(cell.value, Items) and not cell.value.is_stream and not cell.value.length
