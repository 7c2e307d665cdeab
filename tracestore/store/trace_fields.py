"""The fields of a trace by name, as tensors, and its dense attention."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from tracestore import extras
from tracestore._core import kernels
from tracestore.errors import CorruptStoreError, UsageError
from tracestore.extras import needs
from tracestore.store.format import schema

if TYPE_CHECKING:
    import torch

# Fields that every trace has.
_ALWAYS = (
    *("index", "question_id", "sample", "source", "score", "scores", "label", "group", "num_tokens"),
    *("has_nonfinite", "extras", "last_token"),
)
# Fields of large arrays, whose presence is known without reading them.
_LARGE = ("hidden_states", "attention_layout", "attention")
# Fields that are None if the trace lacks them.
_MAY_BE_NONE = ("provenance", "prompt_length", "question", "answer", "tokens", "tokens_decoded")
# Arrays that have another property with the bits that are stored: its name ends with _bits.
_WITH_BITS = ("hidden_states", "last_token", "attention")


class PackedEdges(NamedTuple):
    """A thresholded edge set as stored: layer l owns the edges ptr[l] .. ptr[l + 1] - 1."""

    ptr: np.ndarray  # (L + 1,) int64
    edge_index: np.ndarray  # (E, 2) int32: source j, target i
    weight: np.ndarray  # (E,)


def dense_attention(
    packed: "np.ndarray | PackedEdges", layout: int, num_layers: int, num_tokens: int, where: str
) -> np.ndarray:
    """Return the stored attention of a trace as (L, S, S) or (L, H, S, S)."""
    if isinstance(packed, PackedEdges):
        out = np.zeros((num_layers, num_tokens, num_tokens), packed.weight.dtype)
        layer = np.repeat(np.arange(num_layers), np.diff(packed.ptr))
        if packed.edge_index.size and not 0 <= packed.edge_index.min() <= packed.edge_index.max() < num_tokens:
            raise CorruptStoreError(f"{where}: an edge leaves the trace")
        out[layer, packed.edge_index[:, 1], packed.edge_index[:, 0]] = packed.weight
        return out
    shape = (*packed.shape[:-1], num_tokens, num_tokens)
    if layout == schema.LAYOUT_SQUARE:
        return packed.reshape(shape).copy()
    out = np.empty(shape, packed.dtype)
    matrices = int(np.prod(packed.shape[:-1]))
    kernels.unpack_triangle(
        packed.reshape(-1).view("u1"), packed.itemsize, matrices, num_tokens, out.reshape(-1).view("u1")
    )
    return out


class TraceFields:
    """Base of traces, whose attributes are also found by name: ``trace["hidden_states"]``.

    A trace is no mapping, but ``name in trace``, ``for name in trace`` and ``dict(trace)`` work as for one.
    """

    if TYPE_CHECKING:

        @property
        def hidden_dtype(self) -> str:
            """Stored dtype of the hidden states."""

        @property
        def attention_dtype(self) -> str:
            """Stored dtype of the attention."""

        @property
        def num_tokens(self) -> int:
            """S."""

        @property
        def attention_layout(self) -> str | None:
            """Layout of the attention."""

        @property
        def optional_fields(self) -> dict[str, Any]:
            """The optional fields."""

    @property
    def hidden_states(self) -> np.ndarray:
        """Hidden states (L, S, D), read-only; a view of the mapped file if uncompressed.

        bfloat16 values have dtype ml_dtypes.bfloat16 if ml_dtypes is installed; otherwise they are copied to float32.
        """
        values: np.ndarray = self._values("hidden_states_bits", self.hidden_dtype)
        return values

    @property
    def last_token(self) -> np.ndarray:
        """Hidden state (L, D) of the last token in every layer; bfloat16 as in hidden_states."""
        values: np.ndarray = self._values("last_token_bits", self.hidden_dtype)
        return values

    @property
    def attention_packed(self) -> np.ndarray | PackedEdges:
        """Attention as stored: (L, A), or (L, H, A) if every head is stored; bfloat16 as in hidden_states.

        A = S (S + 1) / 2 for causal attention (lower triangle with diagonal, row by row), S * S for square
        attention. PackedEdges if only edges are stored.
        """
        values: np.ndarray | PackedEdges = self._values("attention_packed_bits", self.attention_dtype)
        return values

    @property
    def attention(self) -> np.ndarray:
        """Dense attention (L, S, S), or (L, H, S, S) if every head is stored, built on each access.

        The value at [..., i, j] is how much token i attends to token j. bfloat16 as in hidden_states.
        """
        values: np.ndarray = self._values("attention_bits", self.attention_dtype)
        return values

    def _values(self, bits: str, dtype: str) -> Any:
        """Return an array as numbers; see schema.as_values. `bits` is the property with the values as stored."""
        if dtype != "bfloat16":
            return getattr(self, bits)
        # numpy must not convert values in a map, which a truncated file would end with a signal.
        stored = getattr(self if extras.bfloat16_dtype() else self._in_own_memory(), bits)
        if isinstance(stored, PackedEdges):
            return stored._replace(weight=schema.as_values(stored.weight, dtype))
        return None if stored is None else schema.as_values(stored, dtype)  # None: a copy lacks the array

    def keys(self) -> list[str]:
        """Return the names of the fields that the trace has.

        The large arrays are not read.

        Examples
        --------
        >>> import tracestore
        >>> trace = tracestore.open("store.zarr")[3]
        >>> trace.keys()[:4], "attention" in trace, "token_entropy" in trace
        (['index', 'question_id', 'sample', 'source'], True, False)
        >>> trace["hidden_states"].shape
        (3, 4, 8)
        """
        names = [*_ALWAYS, *(name for name in _LARGE if self._has_large(name))]
        names += [name for name in _MAY_BE_NONE if getattr(self, name) is not None]
        present = self.optional_fields
        return [*names, *(name for name in schema.OPTIONAL_FIELDS if name in present)]

    def _has_large(self, name: str) -> bool:
        return self.num_tokens > 0 if name == "hidden_states" else self.attention_layout is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    def _bits_or_value(self, name: str) -> Any:
        """Return a field as `__getitem__`, with the bits of its array unchanged."""
        is_present = name in _WITH_BITS and (name not in _LARGE or self._has_large(name))
        return getattr(self, f"{name}_bits") if is_present else self[name]

    def __getitem__(self, name: str) -> Any:
        known = (*_ALWAYS, *_LARGE, *_MAY_BE_NONE, *schema.OPTIONAL_FIELDS)
        value = getattr(self, name) if name in known and (name not in _LARGE or self._has_large(name)) else None
        if value is None:
            raise KeyError(f"{name}: the trace has {', '.join(self.keys())}")
        return value

    def _in_own_memory(self) -> Self:
        """Return the same trace, whose arrays do not depend on mapped files."""
        return self

    def to_torch(self, *names: str, dtype: str | None = None) -> "dict[str, torch.Tensor]":
        """Return arrays of the trace as tensors, which do not depend on the files of the store.

        Parameters
        ----------
        *names : str
            Fields that are arrays. Default: every array that the trace has, such as hidden_states (L, S, D),
            last_token (L, D), the dense attention (L, S, S) or (L, H, S, S), and tokens (T,).
        dtype : str, optional
            "float32" converts floating-point values: for models with float32 weights. None keeps the stored dtype.

        Returns
        -------
        dict of str to torch.Tensor

        Raises
        ------
        KeyError
            If the trace has no such field.
        UsageError
            If a field is no array, or for another dtype.
        MissingExtraError
            If torch is not installed.

        Examples
        --------
        >>> import tracestore
        >>> trace = tracestore.open("store.zarr")[3]
        >>> tensors = trace.to_torch("hidden_states", "tokens", dtype="float32")
        >>> tensors["hidden_states"].shape, tensors["hidden_states"].dtype, tensors["tokens"].dtype
        (torch.Size([3, 4, 8]), torch.float32, torch.int32)
        """
        with needs("train"):
            import torch
        if dtype not in (None, "float32"):
            raise UsageError(f"found dtype {dtype!r}, expected 'float32' or None for the stored dtype")
        own = self._in_own_memory()
        values = {name: own._bits_or_value(name) for name in names or self.keys()}
        tensors = {}
        for name, value in values.items():
            if isinstance(value, np.ndarray):
                is_bits = name in _WITH_BITS and value.dtype == np.uint16
                tensor = torch.from_numpy(np.require(value.view("i2") if is_bits else value, requirements=["C", "W"]))
                tensor = tensor.view(torch.bfloat16) if is_bits else tensor
                tensors[name] = tensor.to(torch.float32) if dtype and tensor.is_floating_point() else tensor
            elif names:
                raise UsageError(f"{name} is no array; arrays are {', '.join(k for k in self.to_torch())}")
        return tensors
