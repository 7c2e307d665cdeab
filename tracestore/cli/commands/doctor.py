"""Check versions, processor, memory, limits and disk of this machine, with advice.

Example: tracestore doctor --folder /data
"""

import argparse
import contextlib
import importlib.metadata
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from tracestore._core.kernels import simd_level, simd_name
from tracestore.console import Output, Parser
from tracestore.errors import UsageError
from tracestore.platform_support import (
    cgroup_limit,
    evict_from_page_cache,
    max_maps,
    memory_info,
    num_processors,
    processor_features,
    shared_memory_folder,
)
from tracestore.store.io.fsio import map_os_errors
from tracestore.store.io.local_folders import cache_dir
from tracestore.words import format_size

_MIB, _GIB = 1 << 20, 1 << 30
_LIBRARIES = (
    "numpy", "zarr", "numcodecs", "isal", "torch", "torch-geometric", "scikit-learn", "matplotlib",
    "transformers", "distributed", "tensorboard", "wandb", "mlflow-skinny", "triton", "bokeh", "obstore",
)  # fmt: skip
# The instruction sets that the kernels select from at run time.
_INSTRUCTIONS = ("avx512f", "avx512vl", "avx512dq", "avx512bw", "vpclmulqdq", "avx2", "fma", "f16c", "sse4_2")
_DISK_BYTES = 256 * _MIB
_CHUNK_BYTES = 4 * _MIB


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--folder", type=Path, default=".", metavar="DIR", help="folder for stores")


def run(args: argparse.Namespace, output: Output) -> None:
    """Check this machine and print the results by topic."""
    if not args.folder.is_dir():
        raise UsageError(f"{args.folder}: no such folder")
    results = [*_versions(), *_processor(), *_memory(), *_limits(), *_disk(args.folder), *_remote()]
    output.print_json(results)
    for topic, group in groupby(results, key=lambda result: result.topic) if not args.json else ():
        output.info(topic)
        for result in group:
            output.info(f"  {result.name:18} {result.value}")
            if result.advice:
                output.info(f"  {'':18} advice: {result.advice}")


@dataclass(frozen=True)
class CheckResult:
    """The result of one check. `advice` is empty if nothing needs to be done."""

    topic: str
    name: str
    value: str
    advice: str = ""


def _versions() -> Iterator[CheckResult]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield CheckResult("versions", "python", version)
    yield CheckResult("versions", "system", f"{platform.system()} {platform.release()} {platform.machine()}")
    for name in ("tracestore", *_LIBRARIES):
        try:
            yield CheckResult("versions", name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield CheckResult("versions", name, "not installed")


def _processor() -> Iterator[CheckResult]:
    yield CheckResult("processor", "processors", f"{num_processors()} of {os.cpu_count()}")
    features = processor_features()
    if features is not None and platform.machine() == "x86_64":
        found = [name for name in _INSTRUCTIONS if name in features]
        advice = "" if "avx2" in found else "without AVX2 training on the processor takes several times as long"
        yield CheckResult("processor", "instructions", " ".join(found) or "none that the kernels use", advice)
    yield CheckResult("processor", "kernels", f"{simd_name()} (level {simd_level()})")
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is not None:
        yield CheckResult("processor", "OMP_NUM_THREADS", threads)


def _memory() -> Iterator[CheckResult]:
    found = memory_info()
    if "MemTotal" in found:
        available = found.get("MemAvailable", 0)
        advice = "less than 4 GiB: train with --memory-budget" if available < 4 * _GIB else ""
        yield CheckResult(
            "memory", "memory", f"{format_size(found['MemTotal'])}, {format_size(available)} available", advice
        )
        yield CheckResult("memory", "swap", format_size(found.get("SwapTotal", 0)))
    limit = cgroup_limit()
    if limit is not None:
        advice = "less than 4 GiB: train with --memory-budget" if limit < 4 * _GIB else ""
        yield CheckResult("memory", "memory cgroup", f"{format_size(limit)} for this container", advice)
    shared = shared_memory_folder()
    if shared is not None:
        free = shutil.disk_usage(shared).free
        advice = "" if free >= _GIB else (
            "DataLoader workers send batches through it: give the container more (docker run --shm-size=2g) "
            "or use the threads of TraceLoader (--num-workers 0)"
        )  # fmt: skip
        yield CheckResult("memory", "shared memory", f"{format_size(free)} free", advice)


def _limits() -> Iterator[CheckResult]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    advice = f"a store of thousands of segments maps many files: ulimit -n {min(hard, 65536)}" if soft < 1024 else ""
    yield CheckResult("limits", "open files", f"{soft:,} of at most {hard:,}", advice)
    for name, limit in (("address space", resource.RLIMIT_AS), ("data", resource.RLIMIT_DATA)):
        soft = resource.getrlimit(limit)[0]
        if soft != resource.RLIM_INFINITY:
            advice = "stores are mapped whole: ulimit -v unlimited" if limit == resource.RLIMIT_AS else ""
            yield CheckResult("limits", name, format_size(soft), advice)
    maps = max_maps()
    if maps is not None:
        advice = "" if maps >= 65530 else "sysctl vm.max_map_count=65530"
        yield CheckResult("limits", "maps of a process", f"{maps:,}", advice)


def _disk(folder: Path) -> Iterator[CheckResult]:
    free = shutil.disk_usage(folder).free
    advice = "" if free >= 4 * _GIB else "a store needs about as much space as its .pkl.gz files"
    yield CheckResult("disk", "free", f"{format_size(free)} in {folder.resolve()}", advice)
    chunk = os.urandom(_CHUNK_BYTES)
    with map_os_errors(folder), tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        if free < 2 * _DISK_BYTES:
            return
        start = time.perf_counter()
        for _ in range(_DISK_BYTES // _CHUNK_BYTES):
            file.write(chunk)
        os.fsync(file.fileno())
        write = _DISK_BYTES / (time.perf_counter() - start)
        evict_from_page_cache(file.fileno())
        start = time.perf_counter()
        for begin in range(0, _DISK_BYTES, _CHUNK_BYTES):
            os.pread(file.fileno(), _CHUNK_BYTES, begin)
        read = _DISK_BYTES / (time.perf_counter() - start)
    yield CheckResult("disk", "write and sync", f"{write / 1e6:,.0f} MB/s")
    advice = "" if read >= 100e6 else "training waits for a disk this slow: copy stores to a local disk"
    yield CheckResult(
        "disk", "read", f"{read / 1e6:,.0f} MB/s (after evicting the file from the page cache, where possible)", advice
    )


def _remote() -> Iterator[CheckResult]:
    """Report the size of the cache for remote stores."""
    folder = cache_dir()
    cached = 0
    with contextlib.suppress(OSError):  # other processes add and remove files
        cached = sum(item.stat().st_size for item in os.scandir(folder) if item.is_file())
    yield CheckResult("remote stores", "cache", f"{format_size(cached)} in {folder}")
