"""Selection of layers, positions and heads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tracestore.errors import UsageError

HEADS = ("all", "mean", "none")


@dataclass(frozen=True)
class Select:
    """Select what is recorded. What is left out is not copied from the device of the model.

    Attributes
    ----------
    layers : sequence of int or of str, optional
        Numbers of blocks, counted from 1, or from the end as -1, in ascending order. Or names of modules, in the
        order in which they are to be stored: plain forward hooks record their outputs ``(B, s, D)``, and the model
        may be any module. Default: all blocks.
    positions : "all", "answer" or int
        "answer": the tokens after those of the first forward pass of a text, which is the prompt in generate().
        An integer k: the last k tokens.
    heads : "all", "mean" or "none"
        Attention of each head, its mean over the heads as one head, or no attention.

    Raises
    ------
    UsageError
        A value is not one of these.
    """

    layers: Sequence[int] | Sequence[str] | None = None
    positions: Literal["all", "answer"] | int = "all"
    heads: Literal["all", "mean", "none"] = "all"

    def __post_init__(self) -> None:
        if self.heads not in HEADS:
            raise UsageError(f"heads: found {self.heads!r}, expected one of {', '.join(HEADS)}")
        is_count = type(self.positions) is int and self.positions > 0
        if not is_count and self.positions not in ("all", "answer"):
            raise UsageError(f"positions: found {self.positions!r}, expected all, answer or a number of tokens")
        if self.layers is not None and not len(self.layers):
            raise UsageError("layers: found none, expected at least one")
        if self.names and self.heads != "none":
            raise UsageError("layers: modules by name have no attention; pass heads='none'")

    @property
    def names(self) -> list[str]:
        """Names of modules, if layers are selected by name."""
        return [layer for layer in self.layers or () if isinstance(layer, str)]

    def layer_ids(self, num_layers: int) -> list[int]:
        """Return the numbers of the selected blocks of a model, counted from 1.

        Raises
        ------
        UsageError
            The model has no such block, or the order is not ascending.
        """
        if self.layers is None:
            return list(range(1, num_layers + 1))
        ids = [layer + num_layers + 1 if isinstance(layer, int) and layer < 0 else layer for layer in self.layers]
        for given, layer in zip(self.layers, ids, strict=True):
            if not isinstance(layer, int) or not 1 <= layer <= num_layers:
                raise UsageError(f"layers: found {given!r}, expected 1 to {num_layers}, or -{num_layers} to -1")
        if ids != sorted(set(ids)):
            raise UsageError(f"layers: found {', '.join(map(str, self.layers))}, expected an ascending order")
        return ids  # type: ignore[return-value]


EVERYTHING = Select()
