"""Chunked stores of language-model traces, and loaders that read batches at memory bandwidth.

`import tracestore` imports neither torch nor NumPy: names are imported on first use, so that a command, or a training
script that sets the threads of libraries first, starts at once.
"""

from typing import TYPE_CHECKING

from tracestore import errors
from tracestore.errors import (
    CorruptStoreError,
    DiskFullError,
    InvalidInputError,
    MissingExtraError,
    MissingFieldError,
    StoreLockedError,
    TracestoreError,
    UsageError,
)
from tracestore.extras import import_on_use

if TYPE_CHECKING:
    from tracestore.data.collate import ShuffleBufferSampler, collate_graphs, collate_sequences
    from tracestore.data.datasets import TraceDataset, TraceIterableDataset
    from tracestore.data.loader import TraceLoader
    from tracestore.export.batch_loader import TraceBatchLoader, extract_batch_subset, merge_batches
    from tracestore.store.format.provenance import Provenance
    from tracestore.store.read.store import TraceStore
    from tracestore.store.read.store import open_store as open
    from tracestore.store.read.subset import TraceSubset
    from tracestore.store.read.trace import Trace
    from tracestore.store.write.create import TraceWriter, create
    from tracestore.tasks.convert_files import convert_files

__version__ = "0.1.0"

__all__ = [
    "CorruptStoreError",
    "DiskFullError",
    "InvalidInputError",
    "MissingExtraError",
    "MissingFieldError",
    "Provenance",
    "ShuffleBufferSampler",
    "StoreLockedError",
    "Trace",
    "TraceBatchLoader",
    "TraceDataset",
    "TraceIterableDataset",
    "TraceLoader",
    "TraceStore",
    "TraceSubset",
    "TraceWriter",
    "TracestoreError",
    "UsageError",
    "collate_graphs",
    "collate_sequences",
    "convert_files",
    "create",
    "errors",
    "extract_batch_subset",
    "merge_batches",
    "open",
]


__getattr__ = import_on_use(
    __name__,
    {
        "tracestore.export.batch_loader": ("TraceBatchLoader", "extract_batch_subset", "merge_batches"),
        "tracestore.data.datasets": ("TraceDataset", "TraceIterableDataset"),
        "tracestore.data.loader": ("TraceLoader",),
        "tracestore.tasks.convert_files": ("convert_files",),
        "tracestore.data.collate": ("ShuffleBufferSampler", "collate_graphs", "collate_sequences"),
        "tracestore.store.format.provenance": ("Provenance",),
        "tracestore.store.read.store": ("TraceStore", "open_store as open"),
        "tracestore.store.read.subset": ("TraceSubset",),
        "tracestore.store.read.trace": ("Trace",),
        "tracestore.store.write.create": ("TraceWriter", "create"),
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
