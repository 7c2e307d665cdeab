"""Preprocessed files of sequences and graphs: structures of files that no line of a layout states."""

from collections.abc import Callable, Iterator
from pathlib import Path

from tracestore._core.pickle import BufferReader
from tracestore.errors import InvalidInputError
from tracestore.ingest.files.limits import Limits
from tracestore.ingest.pickles import torch_file
from tracestore.ingest.pickles.pickle_reader import pickle_reader
from tracestore.ingest.preprocessed import read_graphs, read_sequences
from tracestore.store.io.scratch import Scratch
from tracestore.store.write.record import TraceRecord


def read_preprocessed(
    path: Path, scratch: Scratch, on_refused: Callable[[InvalidInputError], None] | None
) -> Iterator[TraceRecord]:
    """Yield the records of a file of sequences or graphs.

    Parameters
    ----------
    path : Path
    scratch : Scratch
        Files for what does not fit into memory.
    on_refused : callable, optional
        Called with the error of each trace that is refused. By default it is raised.
    """
    mapped, _ = torch_file.map_content(path, scratch)
    view = memoryview(mapped)
    if torch_file.is_legacy(view):
        root = torch_file.read_legacy(view)
    elif bytes(view[:4]) == b"PK\x03\x04":
        root = torch_file.read_zip(mapped)
    else:
        root = pickle_reader(BufferReader(mapped), load_bytes=torch_file.load_bytes).load()
    limits = Limits(lambda: len(mapped))

    def refuse(error: InvalidInputError) -> None:
        if on_refused is None:
            raise error
        on_refused(error)

    if isinstance(root, dict) and "sequences" in root:
        yield from read_sequences(limits, root)
    elif isinstance(root, dict) and "graphs" in root:
        yield from read_graphs(limits, root, refuse)
    else:
        raise InvalidInputError("found neither sequences nor graphs")
