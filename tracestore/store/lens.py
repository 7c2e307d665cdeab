"""The logit lens: logits of hidden states, by the final norm and the unembedding matrix that a store holds."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from tracestore import extras
from tracestore.errors import UsageError
from tracestore.store.format import schema
from tracestore.store.format.lens_attribute import LensField
from tracestore.store.format.provenance import Provenance
from tracestore.store.format.ragged import checked_indices
from tracestore.words import plural

# Values of the matrix that are converted to float32 at once: 16 MiB.
_BLOCK_VALUES = 4 << 20


def block_rows(hidden_dim: int) -> int:
    """Return the number of rows of the unembedding matrix that are held in memory at once."""
    return max(1, _BLOCK_VALUES // hidden_dim)


class LensArrays(NamedTuple):
    """A final norm and an unembedding matrix to be stored.

    Attributes
    ----------
    shape : (int, int)
        (V, D).
    dtype : str
        Name of the dtype of the matrix.
    blocks : callable
        Returns an iterator over consecutive rows of the matrix, in this dtype.
    norm, eps : str, float
        See LensField.
    small : mapping
        Those of schema.LENS_ARRAYS that there are.
    """

    shape: tuple[int, int]
    dtype: str
    blocks: Callable[[], Iterator[np.ndarray]]
    norm: str
    eps: float
    small: Mapping[str, np.ndarray]

    def new_digest(self) -> Any:
        """Return a SHA-256 object of everything but the matrix, to which the caller adds the blocks."""
        digest = hashlib.sha256(repr((self.shape, self.dtype, self.norm, float(self.eps))).encode())
        for name in sorted(self.small):
            digest.update(name.encode())
            digest.update(self.small[name].tobytes())
        return digest

    def digest(self) -> bytes:
        """Return a digest of all values. It reads the whole matrix."""
        digest = self.new_digest()
        for block in self.blocks():
            digest.update(block.reshape(-1).view("u1"))
        return bytes(digest.digest())


class _Rows(Protocol):
    """The stored matrix."""

    def rows(self, begin: int, end: int) -> np.ndarray: ...
    def copy(self, begin: int, end: int) -> np.ndarray: ...


class Lens:
    """Final norm and unembedding matrix of the language model, as `TraceStore.lens` returns them.

    V tokens in the vocabulary, D hidden size. The logits of a hidden state h are ``W norm(h) + c`` with the
    unembedding matrix W (V, D) and its bias c (V,), if there is one. With the weight g and the bias b of the
    norm, each of shape (D,):

    - "rms": ``norm(h) = h / sqrt(mean(h ** 2) + eps) * g`` [1]_, equation 4, with eps in the root as models have it
    - "layer": ``norm(h) = (h - mean(h)) / sqrt(var(h) + eps) * g + b`` [2]_
    - "none": ``norm(h) = h``

    Applied to the states of an earlier layer, these are the logits of the logit lens [3]_.

    Attributes
    ----------
    num_tokens : int
        V.
    hidden_dim : int
        D.
    dtype : str
        Stored dtype of the matrix.
    norm : {"rms", "layer", "none"}
    eps : float
    norm_weight, norm_bias : np.ndarray or None
        g and b, (D,) float32.
    bias : np.ndarray or None
        c, (V,) float32.
    provenance : Provenance or None
        That of the model; None: unknown.

    References
    ----------
    .. [1] B. Zhang and R. Sennrich, "Root Mean Square Layer Normalization", 2019.
    .. [2] J. L. Ba, J. R. Kiros and G. E. Hinton, "Layer Normalization", 2016.
    .. [3] nostalgebraist, "interpreting GPT: the logit lens", 2020.
    """

    def __init__(
        self,
        field: LensField,
        hidden_dim: int,
        small: Mapping[str, np.ndarray],
        provenance: Provenance | None,
        matrix: Callable[[], _Rows],
    ) -> None:
        self.num_tokens, self.hidden_dim = field.num_tokens, hidden_dim
        self.dtype, self.norm, self.eps = field.dtype, field.norm, float(field.eps)
        self.norm_weight, self.norm_bias = small.get("final_norm_weight"), small.get("final_norm_bias")
        self.bias, self.provenance = small.get("unembedding_bias"), provenance
        self._small, self._matrix = small, matrix

    def __repr__(self) -> str:
        return f"Lens({plural(self.num_tokens, 'token')}, {plural(self.hidden_dim, 'value')}, {self.dtype}, norm {self.norm})"

    @property
    def unembedding(self) -> np.ndarray:
        """W (V, D), read-only: a view of the file, or a copy for a compressed store; bfloat16 as Trace.hidden_states."""
        matrix, is_converted = self._matrix(), self.dtype == "bfloat16" and extras.bfloat16_dtype() is None
        bits = (matrix.copy if is_converted else matrix.rows)(0, self.num_tokens)
        return schema.as_values(bits, self.dtype)

    @np.errstate(over="ignore", invalid="ignore", divide="ignore")
    def normalize(self, hidden: np.ndarray) -> np.ndarray:
        """Return norm(h) in float32 for hidden states (..., D) of any floating-point dtype.

        Values that are not finite give NaN, without a warning.
        """
        states = self._as_float32(hidden)
        if self.norm == "none":
            return states
        if self.norm == "layer":
            states = states - states.mean(-1, keepdims=True)
        # The mean square of centered states is their variance.
        normed: np.ndarray = states / np.sqrt(np.square(states).mean(-1, keepdims=True) + np.float32(self.eps))
        if self.norm_weight is not None:
            normed *= self.norm_weight
        if self.norm_bias is not None:
            normed += self.norm_bias
        return normed

    @np.errstate(over="ignore", invalid="ignore")
    def logits(
        self, hidden: np.ndarray, ids: Sequence[int] | np.ndarray | None = None, *, normalized: bool = False
    ) -> np.ndarray:
        """Return the logits of hidden states.

        The matrix is converted to float32 in blocks of 16 MiB.

        Parameters
        ----------
        hidden : np.ndarray
            (..., D) of any floating-point dtype, also ml_dtypes.bfloat16.
        ids : sequence of int, optional
            The K tokens of which the logits are returned. Default: all.
        normalized : bool
            The states come after the final norm, which is then left out. If `provenance.final_norm` is
            true, this holds for the states of the last layer.

        Returns
        -------
        np.ndarray
            (..., V) float32, or (..., K) with `ids`.

        Raises
        ------
        UsageError
            If the shape or the dtype of the states is not valid, or ids are no integers.
        IndexError
            If the vocabulary lacks one of the ids.

        Examples
        --------
        >>> store.lens.logits(trace.hidden_states[-1], normalized=True).argmax(-1)  # the most likely next tokens
        """
        states = self._as_float32(hidden) if normalized else self.normalize(hidden)
        flat = states.reshape(-1, self.hidden_dim)
        chosen = None if ids is None else checked_indices(ids, "ids")
        if chosen is not None and len(chosen) and not 0 <= chosen.min() <= chosen.max() < self.num_tokens:
            raise IndexError(f"tokens {chosen.min()} to {chosen.max()} of {self.num_tokens}")
        count, step = self.num_tokens if chosen is None else len(chosen), block_rows(self.hidden_dim)
        out, matrix = np.empty((len(flat), count), "<f4"), self._matrix()
        for begin in range(0, count, step):
            end = min(count, begin + step)
            if chosen is None:
                block = matrix.copy(begin, end)
            else:
                block = np.concatenate([matrix.copy(k, k + 1) for k in chosen[begin:end].tolist()])
            np.matmul(flat, schema.as_float32(block, self.dtype).T, out=out[:, begin:end])
        if self.bias is not None:
            out += self.bias if chosen is None else self.bias[chosen]
        return out.reshape(*states.shape[:-1], count)

    def arrays(self) -> LensArrays:
        """Return everything to be stored in another store."""
        is_bits, step = self.dtype == "bfloat16", block_rows(self.hidden_dim)

        def blocks() -> Iterator[np.ndarray]:
            matrix = self._matrix()
            for begin in range(0, self.num_tokens, step):
                block = matrix.copy(begin, min(self.num_tokens, begin + step))
                yield block.view(schema.BFLOAT16) if is_bits else block

        shape = (self.num_tokens, self.hidden_dim)
        return LensArrays(shape, self.dtype, blocks, self.norm, self.eps, self._small)

    def _as_float32(self, hidden: np.ndarray) -> np.ndarray:
        states = np.asarray(hidden)
        if states.dtype.kind != "f" and states.dtype.name != "bfloat16":
            raise UsageError(f"hidden: found {states.dtype}, expected floating-point numbers")
        if states.ndim == 0 or states.shape[-1] != self.hidden_dim:
            raise UsageError(f"hidden: found the shape {states.shape}, expected (..., {self.hidden_dim})")
        return states.astype("<f4", copy=False)
