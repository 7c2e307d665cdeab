"""A pickle read as data: the machine of _core.pickle with the builders' policy."""

from collections.abc import Callable
from typing import Any

from tracestore._core.pickle import ByteReader, SafeUnpickler
from tracestore.ingest import pickled_values

# What finished traces may leave in memory because a later trace could refer to it.
RETAINED_BYTES = 32 << 20


def pickle_reader(
    source: ByteReader,
    *,
    persistent_load: Callable[[Any], Any] | None = None,
    load_bytes: Callable[[Any], Any] | None = None,
) -> SafeUnpickler:
    """Reads one pickle from a byte source. Iterating gives the items of a list at the
    top as they become complete; afterwards, or from load(), `result` is the object.

    persistent_load turns a persistent id (torch storages) into an object; load_bytes
    reads a legacy torch file held in bytes. Both are refused when None. Every refusal
    is an InvalidInputError.
    """

    # One for the whole pickle: however often a file names it, it takes its room once.
    loader = pickled_values.NestedTorchLoader(load_bytes)

    def lookup(module: Any, name: Any) -> pickled_values.SafeGlobal:
        builder = pickled_values.lookup(module, name)
        return loader if isinstance(builder, pickled_values.NestedTorchLoader) else builder

    return SafeUnpickler(
        source,
        lookup=lookup,
        builder=pickled_values.SafeGlobal,
        draft=pickled_values.PickledValue,
        persistent=persistent_load,
        retained_bytes=RETAINED_BYTES,
        kept=(pickled_values.SafeGlobal, pickled_values.PickledDtype),
    )
