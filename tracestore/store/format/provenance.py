"""The model, layers and prompt that the traces of a source come from."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from tracestore.errors import UsageError, escape_unprintable

ALLOW_FLAG = "--allow-mixed-provenance"
ALLOW_HELP = "accept traces whose models, layers or prompts differ"
# Limits, because a store may come from an untrusted source. They bound the size of the root zarr.json.
MAX_PROVENANCES = 64
_MAX_TEXT = 1024
_MAX_BYTES = 4096
_MAX_LAYER_ID = (1 << 20) - 1
_TYPES = {
    **dict.fromkeys(("model", "model_revision", "tokenizer", "prompt_sha256", "hidden_states_at"), str),
    **dict.fromkeys(("attention_kind", "compute_dtype", "tool", "positions"), str),
    "layer_ids": list,
    "final_norm": bool,
    "sampling": dict,
}


@dataclass(frozen=True)
class Provenance:
    """Origin of the traces of a source. A value of None means that it is unknown.

    Parameters
    ----------
    model : str, optional
        Id of the language model.
    model_revision : str, optional
        Commit of the model's repository, or a hash of its files.
    tokenizer : str, optional
        Id of the tokenizer.
    prompt_sha256 : str, optional
        SHA-256 of the chat template or prompt, 64 hexadecimal digits.
    layer_ids : tuple of int, optional
        The layer of the model that each stored layer comes from, as the source counts. Length L. In `extract` and
        transformers, 0 is the embeddings and k the k-th block.
    hidden_states_at : str, optional
        Place in the layer that the hidden states are taken from, such as "block output".
    final_norm : bool, optional
        Whether the hidden states of the last layer come after the final norm.
    attention_kind : str, optional
        Kind of the attention weights, such as "softmax".
    compute_dtype : str, optional
        Dtype of the model when it ran.
    sampling : mapping, optional
        Parameters of generation, such as do_sample, temperature and top_p: values of JSON, or lists of them.
    tool : str, optional
        Name and version of the program that recorded the traces. Programs of different versions do not conflict.
    positions : str, optional
        The tokens that were recorded, as in `extract`: "all", "answer", or "16" for the last 16.

    Raises
    ------
    ValueError
        If a value is invalid.

    Examples
    --------
    >>> import tracestore
    >>> one = tracestore.Provenance(model="SmolLM2-135M-Instruct", layer_ids=(0, 15, 30))
    >>> one.differences(tracestore.Provenance(model="Llama-3.2-1B"))
    {'model': 'model: found SmolLM2-135M-Instruct, expected Llama-3.2-1B'}
    """

    model: str | None = None
    model_revision: str | None = None
    tokenizer: str | None = None
    prompt_sha256: str | None = None
    layer_ids: tuple[int, ...] | None = None
    hidden_states_at: str | None = None
    final_norm: bool | None = None
    attention_kind: str | None = None
    compute_dtype: str | None = None
    sampling: Mapping[str, Any] | None = None
    tool: str | None = None
    positions: str | None = None

    def __post_init__(self) -> None:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        try:
            # A copy in JSON's own types, which the caller cannot change. Sorted keys give the same bytes everywhere.
            known = {name: value for name, value in given.items() if value is not None}
            text = json.dumps(known, allow_nan=False, sort_keys=True)
            values = json.loads(text)
        except (TypeError, ValueError, RecursionError):
            raise ValueError("provenance: the values are not JSON") from None
        for name, value in values.items():
            if type(value) is not _TYPES[name] or (isinstance(value, str) and not 0 < len(value) <= _MAX_TEXT):
                raise ValueError(f"provenance: {name}: found {value!r:.80}")
        if len(text) > _MAX_BYTES:
            raise ValueError(f"provenance: found {len(text):,} bytes, expected at most {_MAX_BYTES:,}")
        for name, value in values.get("sampling", {}).items():
            if any(isinstance(item, list | dict) for item in (value if isinstance(value, list) else [value])):
                raise ValueError(
                    f"provenance: sampling: {name}: found {value!r:.80}, expected a value or a list of values"
                )
        if re.fullmatch("[0-9a-f]{64}", values.get("prompt_sha256", "0" * 64)) is None:
            raise ValueError("provenance: prompt_sha256: expected 64 hexadecimal digits")
        if "layer_ids" in values:
            ids = values["layer_ids"] = tuple(values["layer_ids"])
            if not ids or any(type(k) is not int or not 0 <= k <= _MAX_LAYER_ID for k in ids):
                raise ValueError(f"provenance: layer_ids: found {list(ids)!r:.80}, expected numbers of layers")
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_json(cls, data: object) -> "Provenance":
        """Return the provenance in a JSON object.

        Parameters
        ----------
        data : mapping
            Names of Provenance as keys, of which some may be missing.

        Raises
        ------
        ValueError
            If a key or value is invalid.
        """
        if not isinstance(data, Mapping) or not data.keys() <= _TYPES.keys():
            raise ValueError(f"provenance: found {data!r:.80}, expected an object with keys of {', '.join(_TYPES)}")
        return cls(**data)

    def to_json(self) -> dict[str, Any]:
        """Return all values as a JSON object, without `positions` if they are unknown."""
        values = asdict(self) | {"layer_ids": None if self.layer_ids is None else list(self.layer_ids)}
        return {name: value for name, value in values.items() if name != "positions" or value is not None}

    def __str__(self) -> str:
        return ", ".join(f"{name} {_text(value)}" for name, value in self.to_json().items() if value is not None)

    def agreement(self, other: "Provenance") -> "Provenance":
        """Return the values that are the same in both.

        Parameters
        ----------
        other : Provenance
        """
        return Provenance(**{name: value for name, value in vars(self).items() if value == getattr(other, name)})

    def differences(self, other: "Provenance") -> dict[str, str]:
        """Return the keys that are known in both and differ, except `tool`.

        Parameters
        ----------
        other : Provenance

        Returns
        -------
        dict of str to str
            For each key a text that names both values.
        """
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in _TYPES if name != "tool"}
        return {
            name: f"{name}: found {_text(one)}, expected {_text(two)}"
            for name, (one, two) in pairs.items()
            if one is not None and two is not None and one != two
        }


def _text(value: object) -> str:
    if isinstance(value, list | tuple) and list(value) == list(range(value[0], value[0] + len(value))):
        return f"{value[0]}-{value[-1]}"  # layer_ids
    return escape_unprintable(value if isinstance(value, str) else json.dumps(value), 200)


def with_layers(known: Provenance | None, layer_ids: tuple[int, ...] | None) -> Provenance | None:
    """Return a provenance with the layers that a trace names, unless it has its own."""
    if layer_ids is None or (known is not None and known.layer_ids is not None):
        return known
    return replace(known or Provenance(), layer_ids=layer_ids)


def equals_but_layers(committed: Provenance | None, known: Provenance | None) -> bool:
    """Return whether a committed provenance is the known one, perhaps with layers that traces named."""
    if committed is not None and (known is None or known.layer_ids is None):
        committed = replace(committed, layer_ids=None)
    return (committed or Provenance()) == (known or Provenance())


def require_compatible(known: Iterable[Provenance], added: Iterable[Provenance], where: str) -> None:
    """Raise UsageError unless the provenances `added` conflict neither with `known` nor with each other.

    One that equals a known provenance is accepted, so that stores that were mixed deliberately can grow. The
    message begins with `where`.
    """
    accepted = list(known)
    for new in added:
        if new in accepted:
            continue
        for old in accepted:
            if found := new.differences(old):
                raise UsageError(f"{where}: other provenance: {'; '.join(found.values())}; {ALLOW_FLAG} permits it")
        accepted.append(new)
