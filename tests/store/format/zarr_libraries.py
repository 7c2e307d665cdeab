"""Comparison of zarr-python, tensorstore and zarrs, which must read the same values from the arrays of a store."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import zarr


def read_with_tensorstore(kvstores: Mapping[str, Mapping[str, str]]) -> dict[str, np.ndarray]:
    """Return the arrays at the key-value stores, read concurrently."""
    import tensorstore

    opened = {n: tensorstore.open({"driver": "zarr3", "kvstore": dict(k)}, read=True) for n, k in kvstores.items()}
    reads = {name: future.result().read() for name, future in opened.items()}
    return {name: read.result() for name, read in reads.items()}


def assert_identical(found: np.ndarray, expected: np.ndarray, where: str) -> None:
    """Compare dtype, shape and bytes of two arrays."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
    assert found.tobytes() == expected.tobytes(), where


def compare_large_arrays(store: Path) -> int:
    """Read every large array with the three libraries; return the number of arrays."""
    folders = [path.parent for path in store.glob("segments/*/*/zarr.json")]
    others = read_with_tensorstore({str(p): {"driver": "file", "path": f"{p}/"} for p in folders})
    for folder in folders:
        with_zarr = zarr.open_array(folder, mode="r")[...]
        assert_identical(others[str(folder)], with_zarr, str(folder))
        with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
            assert_identical(zarr.open_array(folder, mode="r")[...], with_zarr, str(folder))
    return len(folders)


def compare_small_arrays(store: Path, read_zip: Callable[[Path], dict[str, np.ndarray]]) -> int:
    """Read the arrays in the ZIP archives of the newest generation with `read_zip` and tensorstore.

    `read_zip` returns the arrays of an archive, read with zarr-python. Return the number of archives.
    """
    newest = max(path for path in store.glob("manifest/*") if path.name.isdigit())
    manifest = json.loads(newest.read_text().splitlines()[0])
    files = [store / entry["path"] for entry in manifest["index"] + manifest["columns"]]
    files += store.glob("segments/*/rows.zip")
    for path in files:
        arrays = read_zip(path)
        kvstores = {n: {"driver": "zip", "base": f"file://{path}", "path": f"{n}/"} for n in arrays}
        others = read_with_tensorstore(kvstores)
        for name, with_zarr in arrays.items():
            assert_identical(others[name], with_zarr, f"{path}, {name}")
    return len(files)
