"""Read a pickle as data: the unpickler of _core.pickle with the names that are accepted."""

from collections.abc import Callable
from typing import Any

from tracestore._core.pickle import ByteReader, SafeUnpickler
from tracestore.errors import InvalidInputError
from tracestore.ingest.pickles import joblib_arrays, pickled_objects, pickled_torch, pickled_values, sparse
from tracestore.ingest.pickles import pickled_frames as frames
from tracestore.ingest.pickles.pickled_values import PickledArray, PickledDtype, PickledValue, SafeGlobal

# Memory for objects of finished traces that a later trace could refer to.
RETAINED_BYTES = 32 << 20
# (module, name) -> stand-in. Of the other names, those of the standard library and of numpy and torch are refused.
ALLOWED: dict[tuple[str, str], SafeGlobal] = pickled_objects.GLOBALS | pickled_values.GLOBALS | pickled_torch.GLOBALS
ALLOWED |= sparse.GLOBALS | frames.GLOBALS


def pickle_reader(
    source: ByteReader,
    *,
    persistent_load: Callable[[Any], Any] | None = None,
    load_bytes: Callable[[Any], Any] | None = None,
) -> SafeUnpickler:
    """Return a reader of one pickle.

    Iterating yields the items of a top-level list as they become complete; afterwards, or
    from load(), `result` is the object.

    Parameters
    ----------
    source : ByteReader
        The bytes of the pickle.
    persistent_load : callable, optional
        Turns a persistent id (a torch storage) into an object. Refused by default.
    load_bytes : callable, optional
        Reads a legacy torch file held in bytes. Refused by default.

    Returns
    -------
    SafeUnpickler
        It raises InvalidInputError for whatever it refuses.
    """
    # One loader for the whole pickle, however often a file names it.
    allowed = ALLOWED | {
        ("torch.storage", "_load_from_bytes"): pickled_torch.nested_loader(load_bytes),
        joblib_arrays.WRAPPER: joblib_arrays.joblib_wrapper(source),
    }

    def find_class(module: Any, name: Any) -> SafeGlobal:
        if not isinstance(module, str) or not isinstance(name, str):
            raise InvalidInputError("a class is named by a value that is not a string")
        known = allowed.get((module, name)) or sparse.scipy_class(module, name) or frames.pandas_class(module, name)
        known = known or pickled_objects.unknown_class(module, name)
        if known is None:
            raise InvalidInputError(
                f"names {f'{module}.{name}'[:200]!r}, which is not among the classes that a trace file may have"
            )
        return known

    return SafeUnpickler(
        source,
        find_class=find_class,
        global_type=SafeGlobal,
        value_type=PickledValue,
        persistent_load=persistent_load,
        retained_bytes=RETAINED_BYTES,
        retained_types=(SafeGlobal, PickledDtype),
    )


def load_objects(source: ByteReader, name: str) -> list[Any]:
    """Return the pickled values of an array of objects, whose rows are lists.

    Parameters
    ----------
    source : ByteReader
        The pickle that follows the header of the array.
    name : str
        Name of the array in messages.
    """
    try:
        root = pickle_reader(source).load()
    except InvalidInputError as error:
        raise InvalidInputError(f"Python objects: {error.reason}", field=name[:60]) from None
    if not source.is_eof():
        raise InvalidInputError("trailing bytes after the pickle of an array", field=name)
    if not isinstance(root, PickledArray) or not isinstance(root.array, list):
        raise InvalidInputError("found Python objects that are no array of objects", field=name)
    return root.array
