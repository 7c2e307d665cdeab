"""Read sources with the workers of a Dask cluster that shares a file system with the store.

A worker packs a source into a spool file in the folder of the store. The single writer reads
the spool files in order, so that the store has the same bytes as with one process. Sources whose layout joins files of
several sources are read in this process.
"""

import os
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from tracestore.errors import ClusterError, InvalidInputError, TracestoreError, UsageError
from tracestore.extras import needs
from tracestore.ingest.packing import PackOptions, identify, packed_traces
from tracestore.ingest.reading import ordered_prefetch
from tracestore.ingest.sources import Identity, SourceFile
from tracestore.store.format import paths
from tracestore.store.io import fsio
from tracestore.store.write.pack import PackedTrace
from tracestore.store.write.spool import read_spool, write_spool

_POLL_INTERVAL_S = 0.02
_CONNECT_TIMEOUT_S = 10


def _pack_source(options: PackOptions, source: SourceFile, target: str) -> list[InvalidInputError]:
    """Pack a source into a spool file; runs in a worker. Return the traces that were refused."""
    refused: list[InvalidInputError] = []
    # If a worker dies, Dask gives its source to another one, which must not meet the unfinished file.
    unfinished = Path(f"{target}.{secrets.token_hex(4)}")
    packed = packed_traces(source, options, refused=refused)
    with closing(packed) as traces:  # type: ignore[type-var]
        try:
            write_spool(unfinished, traces)
            os.replace(unfinished, target)
        except OSError as error:
            raise ClusterError(f"{target}: {error.strerror or error}") from None
        finally:
            unfinished.unlink(missing_ok=True)
    return refused


class ClusterStream:
    """The packed traces of one source, read by a worker of the cluster if it can; like SourceStream."""

    def __init__(
        self,
        source: SourceFile,
        target: Path,
        options: PackOptions,
        submit: Callable[..., Any],
        is_known: Callable[[str, int, str], bool],
        on_wait: Callable[[], None],
    ) -> None:
        self.source, self.target, self._options, self._on_wait = source, target, options, on_wait
        self._future: Any = None
        self._is_read_here = False
        self.refused: list[InvalidInputError] = []
        try:
            self._identity: Identity | TracestoreError = identify(source)
        except TracestoreError as error:
            self._identity = error
        else:
            if not is_known(source.name, self._identity.size, self._identity.fingerprint):
                portable = source.portable()
                self._is_read_here = portable is None
                self._future = None if portable is None else submit(portable, str(target))

    def identity(self) -> Identity:
        """Return the identity of the source."""
        if isinstance(self._identity, TracestoreError):
            raise self._identity
        return self._identity

    def __iter__(self) -> Iterator[PackedTrace]:
        if self._is_read_here:
            yield from packed_traces(self.source, self._options, refused=self.refused)
        if self._future is None:
            return
        while not self._future.done():
            self._on_wait()
            time.sleep(_POLL_INTERVAL_S)
        try:
            self.refused = self._future.result()
        except TracestoreError:
            raise
        except CancelledError as error:
            raise ClusterError(f"{self.source.name}: the cluster cancelled the work: {error}") from None
        except Exception as error:
            # Several workers died with this source, or they lack this package.
            raise ClusterError(f"{self.source.name}: a worker failed: {type(error).__name__}: {error}") from None
        yield from read_spool(self.target)

    def cancel(self) -> None:
        """Cancel the work in the cluster."""
        if self._future is not None:
            self._future.cancel()

    def discard(self) -> None:
        """Remove the spool file."""
        fsio.try_remove_tree(self.target)


def read_sources_on_cluster(
    sources: list[SourceFile],
    options: PackOptions,
    *,
    address: str,
    workers: int,
    is_known: Callable[[str, int, str], bool],
    on_wait: Callable[[], None],
) -> Iterator[ClusterStream]:
    """Read sources on a cluster; see `reading.read_sources` for the other parameters.

    Parameters
    ----------
    address : str
        Address of a scheduler, or "local" for `workers` processes on this machine.

    Yields
    ------
    ClusterStream
        One per source, in order.

    Raises
    ------
    UsageError
        If there is no scheduler at the address.
    """
    with needs("dask"):
        from distributed import Client, LocalCluster
    assert options.scratch is not None
    spool = options.scratch.absolute() / paths.SPOOL_FOLDER
    fsio.remove_tree(spool)
    spool.mkdir()
    with ExitStack() as stack:
        stack.callback(fsio.try_remove_tree, spool)
        if address == "local":
            cluster = LocalCluster(n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=None)
            stack.callback(cluster.close)
        try:
            client = Client(
                cluster if address == "local" else address, timeout=_CONNECT_TIMEOUT_S, set_as_default=False
            )
        except (OSError, ValueError, TimeoutError) as error:
            raise UsageError(f"no Dask scheduler at {address}: {' '.join(str(error).split())[:200]}") from None
        stack.enter_context(client)
        submit = partial(client.submit, _pack_source, options, pure=False, retries=0)
        started = (
            ClusterStream(source, spool / f"{k:08d}", options, submit, is_known, on_wait)
            for k, source in enumerate(sources)
        )

        def depth() -> int:
            # Spool files take disk space, so at most two sources per thread of the cluster.
            return 2 * max(1, int(sum(client.nthreads().values())))

        with closing(ordered_prefetch(started, depth)) as streams:  # type: ignore[type-var]
            yield from streams
