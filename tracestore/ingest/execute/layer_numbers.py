"""The order of the layers of a trace: by their numbers, which names of files and keys, the layout or the file say."""

from collections.abc import Mapping, Sequence
from typing import Any

from tracestore.errors import InvalidInputError
from tracestore.ingest.execute.axes import LayerIds, Layers
from tracestore.ingest.layout.language import Layout


class LayerOrder:
    """Put the layers of states and attention into the order of their numbers (rule 1).

    Parameters
    ----------
    layout : Layout
    is_of_schema : bool
        Whether the numbers are those that `create` takes as `layer_ids`: some traces may lack them, so that they sort no
        layers.
    """

    def __init__(self, layout: Layout, *, is_of_schema: bool) -> None:
        self._stated, self._size = layout.settings.get("L.ids"), layout.settings.get("L.size")
        self._is_of_schema, self._is_of_file = is_of_schema, "L.ids" in layout.addresses
        self._what = "layer_ids" if is_of_schema else "L.ids"

    def sort(self, values: dict[str, Any], names: Mapping[str, LayerIds], of_file: Sequence[int] | None) -> LayerIds:
        """Sort the layers of fields, of which the first has the states; return the numbers of those.

        Parameters
        ----------
        values : dict
            The fields of a trace; the lists of layers are replaced.
        names : Mapping
            For each field that has layers: the increasing numbers that names bind, by which they are sorted, or None.
        of_file : sequence of int, optional
            What the address of `L.ids` gives.
        """
        if of_file is None and self._is_of_file and not self._is_of_schema:
            raise InvalidInputError("the trace has no numbers of layers where the layout says", field=self._what)
        stated = self._stated if of_file is None else of_file
        if stated is None and not any(names.values()):
            return None
        numbers: dict[str, LayerIds] = {}
        for field, own in names.items():
            if values.get(field) is not None:
                values[field], numbers[field] = self._sorted(values[field], own, stated, field)
        ids, *others = numbers.values()
        for other in others:
            self._check_same(ids, other, list(numbers))
        return ids

    def _sorted(
        self, layers: Layers, own: LayerIds, stated: Sequence[int] | None, field: str
    ) -> tuple[Layers, LayerIds]:
        given = own if stated is None else stated
        if given is None:
            return layers, None
        numbers = self._from_the_first(given)
        if own is not None and stated is not None:
            of_names = self._from_the_first(own)
            if sorted(of_names) == sorted(numbers):
                numbers = of_names  # by which the layers are sorted
            elif not (_is_counted(of_names) and numbers == sorted(numbers)):
                found = f"found the layers {of_names!s:.60} in names, expected {numbers!s:.60} as {self._what} says"
                raise InvalidInputError(found, field=field)
        order = sorted(range(len(numbers)), key=numbers.__getitem__)
        if order == list(range(len(order))):
            return layers, tuple(numbers)
        if self._is_of_schema:
            raise InvalidInputError(f"found the layers {numbers!s:.60}, expected them in their order", field=self._what)
        if len(layers) != len(numbers):
            found = f"found {len(layers)} layers, expected {len(numbers)} as {self._what} says, which sorts them"
            raise InvalidInputError(found, field=field)
        return [layers[k] for k in order], tuple(numbers[k] for k in order)

    def _from_the_first(self, numbers: Sequence[int]) -> list[int]:
        """Return numbers of layers, of which negative ones count from the end where `L.size` is known."""
        size, what = self._size, self._what
        if {type(number) for number in numbers} != {int}:  # of a file
            raise InvalidInputError(f"found {list(numbers)!s:.60}, expected integers", field=what)
        if size is None and min(numbers) < 0 <= max(numbers):
            raise InvalidInputError(
                f"found the layers {list(numbers)}; L.size gives the number of the model's layers", field=what
            )
        if size is not None and (wrong := [k for k in numbers if not -size <= k < size]):
            raise InvalidInputError(f"found the layer {wrong[0]}, expected fewer than {size}", field="L.size")
        found = [k if size is None else k % size for k in numbers]
        if len(set(found)) < len(found):
            raise InvalidInputError(f"found the layers {list(numbers)!s:.60}, expected each once", field=what)
        return found

    def _check_same(self, ids: LayerIds, other: LayerIds, fields: list[str]) -> None:
        """Refuse attention of other layers than the states, and numbers of one that say nothing about the other."""
        if ids is None or other is None:
            known = ids or other
            if known is not None and not _is_counted(known):
                one, two = fields if other is None else fields[::-1]
                raise InvalidInputError(
                    f"{one} has the layers {list(known)!s:.60}, {two} has no numbers: L.ids states them in the order of "
                    "its arrays",
                    field="L.ids",
                )
            return
        # The states may have the embeddings in front, or be numbered with them.
        is_shifted = ids[0] == 0 and (other == ids[1:] or (_is_counted(ids) and other == ids[:-1]))
        if other != ids and not is_shifted:
            raise InvalidInputError(f"found the layers {list(other)}, expected {list(ids)}", field=fields[1])


def _is_counted(numbers: Sequence[int]) -> bool:
    """Return whether numbers may be places in a list: they count from 0 or 1."""
    return list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))) and numbers[0] in (0, 1)
