"""JSON that is parsed as a whole, if its values fit into memory."""

import json
from collections import Counter
from typing import Any

from tracestore.errors import InvalidInputError

# Memory for the values of a text, and what Python needs for them at most: by byte, and by each of some characters.
_MAX_MEMORY_BYTES = 224 << 20
_MEMORY_PER_BYTE = 3
_MEMORY_OF = {b",": 40, b"[": 88, b"{": 240, b'"': 30}


def parse_json(data: bytes, context: str) -> Any:
    """Return a value of JSON.

    Parameters
    ----------
    data : bytes
        The text in UTF-8.
    context : str
        What the refusal begins with.

    Raises
    ------
    InvalidInputError
        If it is not JSON, a key of an object appears twice, or the values may need too much memory.
    """
    memory = _MEMORY_PER_BYTE * len(data) + sum(size * data.count(mark) for mark, size in _MEMORY_OF.items())
    if memory > _MAX_MEMORY_BYTES:
        raise InvalidInputError(
            f"found {len(data):,} bytes of JSON whose values may need more than {_MAX_MEMORY_BYTES >> 20} MiB of "
            "memory; write JSON Lines, one trace per line, or save arrays as .npz or .safetensors"
        )
    try:
        return json.loads(data, object_pairs_hook=_unique)
    except RecursionError:
        raise InvalidInputError(f"{context}: nested deeper than a trace file") from None
    except ValueError as error:
        raise InvalidInputError(f"{context}: {' '.join(str(error).split())[:100]}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        name = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the name {name[:60]!r} appears twice")
    return found
