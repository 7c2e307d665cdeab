"""A pickle read as data: the machine of _core.pickle with the builders' policy."""

from collections.abc import Callable
from typing import Any

from tracestore._core.pickle import ByteReader, PickleMachine
from tracestore.errors import InputRefusedError
from tracestore.ingest import builders

# What finished traces may leave in memory because a later trace could refer to it.
RETAINED_BYTES = 32 << 20


def pickle_reader(
    source: ByteReader,
    *,
    persistent_load: Callable[[Any], Any] | None = None,
    load_bytes: Callable[[Any], Any] | None = None,
) -> PickleMachine:
    """Reads one pickle from a byte source. Iterating gives the items of a list at the
    top as they become complete; afterwards, or from load(), `result` is the object.

    persistent_load turns a persistent id (torch storages) into an object; load_bytes
    reads a legacy torch file held in bytes. Both are refused when None. Every refusal
    is an InputRefusedError.
    """

    def reduce(target: Any, args: Any) -> Any:
        if not isinstance(target, builders.Builder) or not isinstance(args, tuple):
            raise InputRefusedError("the pickle calls something that is not a class it may name")
        if isinstance(target, builders.LoadFromBytes):
            if load_bytes is None or len(args) != 1:
                raise InputRefusedError("a torch file inside a torch file inside a pickle")
            return load_bytes(args[0])
        return target.call(args)

    return PickleMachine(
        source,
        lookup=builders.lookup,
        reduce=reduce,
        new=_new,
        build=_build,
        persistent=persistent_load,
        retained_bytes=RETAINED_BYTES,
        kept=(builders.Builder, builders.DtypeDraft),
    )


def _new(target: Any, args: Any) -> Any:
    if not isinstance(target, builders.Builder) or not isinstance(args, tuple):
        raise InputRefusedError("the pickle makes an object of something that is not a class it may name")
    return target.new(args)


def _build(target: Any, state: Any) -> None:
    if not isinstance(target, builders.Draft):
        raise InputRefusedError(f"the pickle gives a state to a {type(target).__name__}")
    target.build(state)
