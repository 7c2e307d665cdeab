"""Graphs of PyTorch Geometric: a structure of files that no line of a layout states."""

from collections.abc import Callable, Iterator
from pathlib import Path

from tracestore.errors import InvalidInputError
from tracestore.ingest.files.limits import Limits
from tracestore.ingest.pickles import torch_file
from tracestore.ingest.preprocessed import read_graphs
from tracestore.store.io.scratch import Scratch
from tracestore.store.write.record import TraceRecord


def read_graph_file(
    path: Path, scratch: Scratch, on_refused: Callable[[InvalidInputError], None] | None
) -> Iterator[TraceRecord]:
    """Yield the records of a file of graphs.

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
    root = torch_file.read_legacy(view) if torch_file.is_legacy(view) else torch_file.read_zip(mapped)
    if not isinstance(root, dict) or "graphs" not in root:
        raise InvalidInputError("missing key", field="graphs")

    def refuse(error: InvalidInputError) -> None:
        if on_refused is None:
            raise error
        on_refused(error)

    yield from read_graphs(Limits(lambda: len(mapped)), root, refuse)
