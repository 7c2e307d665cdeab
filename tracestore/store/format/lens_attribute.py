"""The attribute `lens`, which describes the final norm and the unembedding matrix of the language model."""

from dataclasses import dataclass, fields

NORMS = ("rms", "layer", "none")
# Upper limit for V; no tokenizer comes near it.
MAX_VOCABULARY = 1 << 24
_DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class LensField:
    """Properties of the lens of a store, and the segment that holds it.

    Attributes
    ----------
    segment : int
        Number of the segment without rows that holds the arrays.
    num_tokens : int
        V: number of tokens in the vocabulary.
    dtype : str
        Dtype of the unembedding matrix.
    norm : {"rms", "layer", "none"}
    eps : float
        Added to the mean square or the variance, 0 to 1.
    provenance : int or None
        Position in the attribute `provenance`; None: unknown.
    """

    segment: int
    num_tokens: int
    dtype: str
    norm: str
    eps: float
    provenance: int | None

    @classmethod
    def from_json(cls, data: object, num_provenances: int) -> "LensField | None":
        """Return the lens in a JSON value, None for null; raise ValueError if it is not valid in this format."""
        if data is None:
            return None
        if not isinstance(data, dict) or data.keys() != {f.name for f in fields(cls)}:
            raise ValueError("attributes: lens: the keys are not those of this format")
        limits = {"segment": (0, 1 << 31), "num_tokens": (1, MAX_VOCABULARY), "provenance": (0, num_provenances - 1)}
        for name, (least, most) in limits.items():
            value = data[name]
            if value is None and name == "provenance":
                continue
            if type(value) is not int or not least <= value <= most:
                raise ValueError(f"attributes: lens: {name}: found {value!r:.40}, expected {least} to {most}")
        for name, allowed in (("dtype", _DTYPES), ("norm", NORMS)):
            if data[name] not in allowed:
                raise ValueError(f"attributes: lens: {name}: found {data[name]!r:.40}")
        if type(data["eps"]) not in (int, float) or not 0 <= data["eps"] <= 1:
            raise ValueError(f"attributes: lens: eps: found {data['eps']!r:.40}, expected 0 to 1")
        return cls(**data)
