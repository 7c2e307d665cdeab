"""Chunked stores of language-model traces, and loaders that read batches at memory bandwidth.

`import tracestore` imports no torch. Names that need torch are imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

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
from tracestore.extras import needs
from tracestore.store.read.store import TraceStore
from tracestore.store.read.store import open_store as open
from tracestore.store.read.trace import Trace
from tracestore.store.write.create import TraceWriter, create

if TYPE_CHECKING:
    from tracestore.data.collate import collate_graphs, collate_sequences
    from tracestore.data.datasets import ShuffleBufferSampler, TraceDataset, TraceIterableDataset
    from tracestore.data.loader import TraceLoader
    from tracestore.export.batch_loader import TraceBatchLoader, extract_batch_subset, merge_batches

__version__ = "0.1.0"

_LAZY = {
    "TraceBatchLoader": "tracestore.export.batch_loader",
    "merge_batches": "tracestore.export.batch_loader",
    "extract_batch_subset": "tracestore.export.batch_loader",
    "TraceDataset": "tracestore.data.datasets",
    "TraceIterableDataset": "tracestore.data.datasets",
    "ShuffleBufferSampler": "tracestore.data.datasets",
    "TraceLoader": "tracestore.data.loader",
    "collate_sequences": "tracestore.data.collate",
    "collate_graphs": "tracestore.data.collate",
}

__all__ = [
    "CorruptStoreError",
    "DiskFullError",
    "InvalidInputError",
    "MissingExtraError",
    "MissingFieldError",
    "ShuffleBufferSampler",
    "StoreLockedError",
    "Trace",
    "TraceBatchLoader",
    "TraceDataset",
    "TraceIterableDataset",
    "TraceLoader",
    "TraceStore",
    "TraceWriter",
    "TracestoreError",
    "UsageError",
    "collate_graphs",
    "collate_sequences",
    "create",
    "errors",
    "extract_batch_subset",
    "merge_batches",
    "open",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        with needs():
            value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'tracestore' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
