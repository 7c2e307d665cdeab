"""Read pickles and files of torch.save as records, one at a time; other containers through `containers`."""

import contextlib
import struct
from collections.abc import Callable, Iterator, Sequence
from operator import gt
from pathlib import Path
from typing import Any

import numpy as np

from tracestore._core.pickle import BufferReader, ByteReader, ChunkReader
from tracestore.errors import InvalidInputError, TruncatedFileError, error_location
from tracestore.ingest import torch_file
from tracestore.ingest.byte_source import TRUNCATED_WHILE_READING, GzipChunks, check_regular, map_file
from tracestore.ingest.containers.registry import folder_reader, read_container, reader_of
from tracestore.ingest.containers.tables import TableReference
from tracestore.ingest.pickle_reader import pickle_reader
from tracestore.ingest.pickled_torch import PickledGraph, PickledTensor
from tracestore.ingest.pickled_values import PickledArray, PickledValue, SafeGlobal
from tracestore.store.format import schema
from tracestore.store.io.scratch import Scratch
from tracestore.store.write.record import TraceRecord, question_id_text, record_from_dict
from tracestore.store.write.values import field_error

# Limits of the values that a file's traces hold, where a value counts each time it is named: a fixed
# allowance and a multiple of the bytes read, for the number of values, the bytes of text and the bytes of
# arrays. A value takes at least one byte. Text is encoded again each time it is named; an array is not. The
# multiple of arrays is large because in files made by hand one array may stand for all layers.
_ALLOWANCES = ((20_000, 4), (16 << 20, 4), (64 << 20, 200))
_MAX_BYTES_VALUE = 4 << 20
_GZIP_RESERVED = 0xE0


def resolve(value: Any, limits: "_Limits") -> Any:
    """Replace pickled values inside a value by arrays, charge them to the limits and return the value."""
    kind = type(value)
    if kind is str or kind is bytes:
        limits.charge(len(value))
        return value
    if kind is PickledArray or kind is PickledTensor:
        array = value.resolve()
        if isinstance(array, list):
            return [resolve(v, limits) for v in array]
        limits.charge(0, array.nbytes)
        return array
    limits.charge(len(value) if kind is memoryview else 0)
    if kind is dict:
        return {k: resolve(v, limits) for k, v in value.items()}
    if kind is list or kind is tuple:
        return _resolve_all(value, limits)
    if kind is memoryview:
        if len(value) > _MAX_BYTES_VALUE:
            raise InvalidInputError(f"found {len(value):,} bytes that are not an array")
        return bytes(value)
    if isinstance(value, PickledValue | SafeGlobal):
        kind_name = type(value).__name__.removeprefix("Pickled")
        raise InvalidInputError(f"found a {kind_name} object, expected a value")
    return value


def _resolve_all(values: Sequence[Any], limits: "_Limits") -> list[Any]:
    """Resolve a sequence, with shortcuts for the common cases of only texts or only arrays."""
    kinds = set(map(type, values))
    if kinds == {str}:
        limits.charge(sum(map(len, values)), count=len(values))
        return list(values)
    if kinds == {PickledArray}:
        arrays = [v.array for v in values]
        if set(map(type, arrays)) == {np.ndarray}:
            limits.charge(0, sum(a.nbytes for a in arrays), count=len(arrays))
            return arrays
    return [resolve(v, limits) for v in values]


class _Limits:
    """Limits on values and bytes of the traces of one file.

    A file exceeds them only by naming the same values many times. `read_bytes` returns the
    number of bytes of the file that have been read so far.
    """

    def __init__(self, read_bytes: Callable[[], int]) -> None:
        self._read_bytes = read_bytes
        self._used: tuple[int, ...] = (0, 0, 0)
        self._limits: tuple[int, ...] = (0, 0, 0)

    def charge(self, text_bytes: int = 0, array_bytes: int = 0, count: int = 1) -> None:
        """Add values and their bytes; raise InvalidInputError beyond a limit."""
        num_values, all_text, all_arrays = self._used
        self._used = (num_values + count, all_text + text_bytes, all_arrays + array_bytes)
        if any(map(gt, self._used, self._limits)):
            read_bytes = self._read_bytes()
            self._limits = tuple(allowance + ratio * read_bytes for allowance, ratio in _ALLOWANCES)
            if any(map(gt, self._used, self._limits)):
                raise InvalidInputError(
                    "traces whose values, counted each time they are named, exceed the file many times"
                )


def read_traces(
    path: Path,
    name: str,
    *,
    need_attention: bool | None = True,
    scratch: Scratch | None = None,
    is_ahead: Callable[[], bool] = lambda: True,
    parts: tuple[Path, ...] = (),
    table: TableReference | None = None,
) -> Iterator[TraceRecord]:
    """Read the traces of one source in order.

    Parameters
    ----------
    path : Path
        A regular file in one of the formats of docs/ingest.md and docs/containers.md, or the folder of `parts`.
    name : str
        Name of the file in error messages.
    need_attention : bool or None
        Whether a trace without attention is refused; None accepts both.
    scratch : Scratch, optional
        Files for what exceeds some MiB of a trace of a compressed file. By default they are
        in the system's temporary folder.
    is_ahead : callable, optional
        Return whether a thread inflates ahead; called before each chunk.
    parts, table
        As for `read_container`.

    Yields
    ------
    TraceRecord
        If the file is not compressed, the arrays are views of the mapped file.

    Raises
    ------
    InvalidInputError
        Names file, position and field. The caller must discard the traces it got before.
    """
    position, scratch = 0, scratch or Scratch()
    try:
        if parts:
            records = read_container(
                folder_reader(parts),
                path,
                name,
                parts=parts,
                table=table,
                scratch=scratch,
                need_attention=need_attention,
            )
        else:
            records = _records(path, name, need_attention, scratch, is_ahead, table)
        for position, record in enumerate(records):
            yield record
            position += 1
        if position == 0:
            raise InvalidInputError("found no trace")
    except InvalidInputError as error:
        raise error.with_location(source=name) from None
    except TruncatedFileError:
        raise InvalidInputError(TRUNCATED_WHILE_READING, source=name, position=position) from None
    except RecursionError:
        raise InvalidInputError("nested deeper than a trace file", source=name) from None
    except (ValueError, TypeError, OverflowError, IndexError, KeyError, struct.error) as error:
        # A fault that the checks above missed must end as a refusal too, never as a traceback.
        reason = f"not a trace file: {type(error).__name__}: {error}"
        raise InvalidInputError(reason, source=name, position=position) from None


def _records(
    path: Path,
    name: str,
    need_attention: bool | None,
    scratch: Scratch,
    is_ahead: Callable[[], bool],
    table: TableReference | None,
) -> Iterator[TraceRecord]:
    status = check_regular(path)
    if status.st_size == 0:
        raise InvalidInputError("the file is empty")
    mapped = map_file(path)
    view = memoryview(mapped)
    head = bytes(view[:4])
    gzipped = head[:2] == b"\x1f\x8b"
    limits = _Limits(lambda: status.st_size)
    if gzipped:
        if view[3] & _GZIP_RESERVED:
            raise InvalidInputError("damaged gzip: reserved flags are set")
        with contextlib.closing(GzipChunks(path, is_ahead)) as chunks:
            limits = _Limits(lambda: chunks.inflated_bytes)
            yield from _from_pickle(limits, chunks.reader(scratch), name, need_attention)
    elif (reader := reader_of(mapped)) is not None:
        yield from read_container(reader, path, name, table=table, scratch=scratch, need_attention=need_attention)
    elif head == b"PK\x03\x04":
        yield from _from_object(limits, torch_file.read_zip(mapped), name, need_attention)
    elif torch_file.is_legacy(view):
        yield from _from_object(limits, torch_file.read_legacy(view), name, need_attention)
    else:
        yield from _from_pickle(limits, BufferReader(mapped), name, need_attention)


def _from_pickle(limits: _Limits, source: ByteReader, name: str, need_attention: bool | None) -> Iterator[TraceRecord]:
    reader = pickle_reader(source, load_bytes=torch_file.load_bytes)
    for position, item in enumerate(reader):
        record = _trace(limits, item, name, position, need_attention)
        item = None
        record.is_borrowed = isinstance(source, ChunkReader)
        yield record
        del record
    if not source.is_eof():
        raise InvalidInputError("trailing bytes after the pickle")
    if reader.num_yielded == 0:
        yield from _from_object(limits, reader.result, name, need_attention)


def _trace(limits: _Limits, item: Any, name: str, position: int, need_attention: bool | None) -> TraceRecord:
    with error_location(position=position):
        values = resolve(item, limits)
        return record_from_dict(values, source_name=name, position=position, need_attention=need_attention)


def _from_object(limits: _Limits, root: Any, name: str, need_attention: bool | None) -> Iterator[TraceRecord]:
    if isinstance(root, list):
        for position, item in enumerate(root):
            yield _trace(limits, item, name, position, need_attention)
        return
    if not isinstance(root, dict):
        found = "a tensor or array" if isinstance(root, PickledValue) else type(root).__name__
        raise InvalidInputError(f"found {found}, expected a list of traces or a dict of sequences or graphs")
    if "hidden_states" in root:
        yield _trace(limits, root, name, 0, need_attention)
    elif "graphs" in root:
        yield from _graphs(limits, root)
    elif "sequences" in root:
        yield from _sequences(limits, root)
    elif isinstance(root.get("traces"), list):
        yield from _from_object(limits, root["traces"], name, need_attention)
    elif root and all(isinstance(value, dict) and "hidden_states" in value for value in root.values()):
        traces = ({"question_id": key} | value for key, value in root.items())
        yield from _from_object(limits, list(traces), name, need_attention)
    else:
        yield _trace(limits, root, name, 0, need_attention)


def _ids(limits: _Limits, root: dict[str, Any], count: int, unit: str) -> list[str]:
    if "question_ids" not in root:
        raise InvalidInputError("missing key", field="question_ids")
    ids = resolve(root["question_ids"], limits)
    if isinstance(ids, np.ndarray) and ids.ndim == 1:
        ids = ids.tolist()
    if not isinstance(ids, list):
        raise field_error("question_ids", type(ids).__name__, "a list of ids")
    if len(ids) != count:
        raise field_error("question_ids", f"{len(ids)} ids", f"{count}, one per {unit}")
    texts = []
    for position, value in enumerate(ids):
        with error_location(position=position):
            texts.append(question_id_text(value, "question_ids"))
    return texts


def _labels(limits: _Limits, root: dict[str, Any], count: int) -> list[float | None]:
    labels = resolve(root["labels"], limits)
    try:
        values = np.asarray(labels, dtype="<f8")
    except (TypeError, ValueError):
        raise field_error("labels", type(labels).__name__, f"({count},) numbers") from None
    if values.size != count or max(values.shape, default=0) not in (0, count):
        raise field_error("labels", _found(values), f"({count},)")
    return [None if np.isnan(v) else float(v) for v in values.reshape(-1)]


def _found(value: Any) -> str:
    """Return the shape of an array or the type of another value, for error messages."""
    return f"shape {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__


def _float_array(value: Any, field: str, ndim: int, text: str) -> np.ndarray:
    if not isinstance(value, np.ndarray) or value.ndim != ndim:
        raise field_error(field, _found(value), text)
    try:
        schema.dtype_name(value.dtype)
    except ValueError:
        raise field_error(field, f"dtype {value.dtype.name}", "float16, float32 or bfloat16") from None
    return value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))


def _sequences(limits: _Limits, root: dict[str, Any]) -> Iterator[TraceRecord]:
    """Read a dict of `sequences`, the last token of every layer."""
    sequences = _float_array(resolve(root["sequences"], limits), "sequences", 3, "(N, L, D)")
    if 0 in sequences.shape:
        raise field_error("sequences", f"shape {sequences.shape}", "(N, L, D) with no axis of length 0")
    if "labels" not in root:
        raise InvalidInputError("missing key", field="labels")
    labels = _labels(limits, root, len(sequences))
    for position, question_id in enumerate(_ids(limits, root, len(sequences), "sequence")):
        yield TraceRecord(
            question_id=question_id, position=position, last_token=sequences[position], label=labels[position]
        )


def _graphs(limits: _Limits, root: dict[str, Any]) -> Iterator[TraceRecord]:
    """Read a dict of `graphs`, one PyG Data per layer, with or without labels."""
    graphs = root["graphs"]
    if not isinstance(graphs, list | tuple) or len(graphs) == 0:
        raise field_error("graphs", type(graphs).__name__, "a list with one list of layers per trace")
    ids = _ids(limits, root, len(graphs), "trace")
    labels = _labels(limits, root, len(graphs)) if "labels" in root else [None] * len(graphs)
    for position, layers in enumerate(graphs):
        with error_location(position=position):
            record = _graph_record(limits, layers)
        record.question_id, record.position, record.label = ids[position], position, labels[position]
        yield record


def _graph_record(limits: _Limits, layers: Any) -> TraceRecord:
    """Return the record of one trace, without its id, position and label."""
    if not isinstance(layers, list | tuple) or len(layers) == 0:
        raise field_error("graphs", type(layers).__name__, "a list of at least one layer")
    hidden: list[np.ndarray] = []
    edges: list[tuple[np.ndarray, np.ndarray]] = []
    extras: dict[str, list[Any]] = {}
    for k, layer in enumerate(layers):
        where = f"graphs[{k}]"
        if not isinstance(layer, PickledGraph | dict):
            raise field_error(where, type(layer).__name__, "a PyG Data")
        fields = layer.fields() if isinstance(layer, PickledGraph) else layer
        if not all(isinstance(name, str) for name in fields):
            raise field_error(where, "a key that is not a string", "the fields of a PyG Data")
        fields = {name: resolve(v, limits) for name, v in fields.items()}
        for name in ("x", "edge_index", "edge_attr"):
            if fields.get(name) is None:
                raise InvalidInputError("missing key", field=f"{where}.{name}")
        x = _float_array(fields.pop("x"), f"{where}.x", 2, "(S, D)")
        if 0 in x.shape:
            raise field_error(f"{where}.x", f"shape {x.shape}", "at least one token and one column")
        first = hidden[0] if hidden else x
        if x.shape != first.shape or x.dtype != first.dtype:
            raise field_error(f"{where}.x", f"{x.dtype} {x.shape}", f"{first.dtype} {first.shape} as in layer 0")
        index, weight = fields.pop("edge_index"), fields.pop("edge_attr")
        if not isinstance(index, np.ndarray) or index.ndim != 2 or index.shape[0] != 2 or index.dtype.kind not in "iu":
            raise field_error(f"{where}.edge_index", _found(index), "(2, E) integers")
        if not isinstance(weight, np.ndarray) or weight.shape not in ((index.shape[1], 1), (index.shape[1],)):
            raise field_error(f"{where}.edge_attr", _found(weight), f"({index.shape[1]}, 1)")
        weight = _float_array(weight.reshape(-1), f"{where}.edge_attr", 1, "(E, 1)")
        nodes = fields.pop("num_nodes", len(x))
        if nodes is not None and (not isinstance(nodes, int | np.integer) or int(nodes) != len(x)):
            raise field_error(f"{where}.num_nodes", str(nodes)[:40], str(len(x)))
        hidden.append(x)
        edges.append((index, weight))
        for name, value in fields.items():
            extras.setdefault(name, [None] * len(layers))[k] = value
    return TraceRecord(question_id="", hidden=hidden, edges=edges, extras=extras)
