"""Stores with one change and recomputed checksums.

The generator uses the tables of the format (`tracestore.store.format.manifest`, `schema`), so
that it follows changes of the format. A seed determines the change: the same seed always makes
the same store from the same valid store.
"""

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

import tracestore
from tests.helpers import make_graphs, make_optional, make_traces, write_pickle, write_store
from tracestore._core.kernels import crc32c
from tracestore._core.mapping import MappedFile
from tracestore.store.format import manifest as mf
from tracestore.store.format import schema
from tracestore.store.format.ragged import encode_strings
from tracestore.store.format.zip_group import ZipGroup, pack_group
from tracestore.store.maintain.merge import merge_stores

NUMBERS = [-(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 7, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63, 2**64]
NUMBERS += [10**400]
VALUES = [*NUMBERS, 0.5, -1.0, 1e308, True, None, "", "x", "../../../etc/passwd", "/etc/passwd", "\0", [], [[]], {}]
VALUES += [{"a": 1}]
PATHS = ["../escape", "/etc/passwd", "segments/../../../escape", "zarr.json", "lock", "segments/00000000/evil.pth", "",
         "segments/00000000/hidden_states/c/0/../../../../x", "a\nb", "manifest/0000000001"]  # fmt: skip


def valid_stores(folder: Path) -> list[Path]:
    """Write one valid store of each kind; return the paths."""
    made = []

    def new(name: str, **options: object) -> Path:
        made.append(folder / f"{name}.zarr")
        traces = make_traces(8, layers=2, dim=8, tokens=4)
        traces = [t | {"question": f"why {k}?", "rare": {"a": [1.5, None]}} for k, t in enumerate(traces)]
        traces = [t | (make_optional(4, k) if k % 2 else {}) for k, t in enumerate(traces)]
        return write_store(
            made[-1], traces, score=lambda k: k / 8, group=lambda k: f"g{k % 3}", commit_after=(3, 7), **options
        )

    known = {"model": "m", "layer_ids": [1, 2], "sampling": {"top_p": 0.5}, "final_norm": True}
    new("mean", provenance=known)
    new("heads", attention="heads")
    for name, codec in (("lens", "none"), ("lens-zstd", "zstd")):
        new(name, codec=codec, provenance=known)
        with tracestore.create(made[-1], append=True, codec=codec, provenance=known) as writer:
            rng = np.random.default_rng(0)
            parts = {"norm_weight": rng.random(8), "norm_bias": rng.random(8), "bias": rng.random(40)}
            writer.set_lens(rng.random((40, 8), "f4"), **parts, norm="layer", eps=1e-5)
    for codec in ("blosc-zstd", "blosc-lz4", "zstd"):
        new(codec, codec=codec, dtype="keep")
    new("none", attention="none")
    many = new("generations")
    for k in range(3):
        with tracestore.create(many, append=True, provenance=known | {"tool": f"program {k}"}) as writer:
            writer.define_score("judge", direction="hallucination", source="a judge", version="1")
            writer.append(make_traces(20, layers=2, dim=8)[10 + k], label=float(k % 2), scores={"judge": k / 4})
    edges = folder / "graphs.pt"
    import torch

    traces = make_traces(6, layers=2, dim=8, tokens=4)
    torch.save({"graphs": [make_graphs(t) for t in traces], "question_ids": [t["question_id"] for t in traces]}, edges)
    from tests.helpers import convert

    made.append(folder / "edges.zarr")
    convert(edges, made[-1])
    made.append(folder / "merged.zarr")
    merge_stores([many, folder / "mean.zarr"], made[-1])
    write_pickle(
        folder / "more.pkl", [t | {"question_id": f"more {k}"} for k, t in enumerate(make_traces(3, layers=2, dim=8))]
    )
    return made


class Store:
    """A store whose files and checksums are changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = max(int(n) for n in os.listdir(path / "manifest"))
        text = (path / f"manifest/{self.generation:010d}").read_bytes()[:-10]
        self.manifest = json.loads(text)

    def write(self, name: str, data: bytes) -> None:
        """Replace a file, even if it is read-only."""
        path = self.path / name
        if path.is_file() or path.is_symlink():
            path.unlink()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def group(self, path: str, dtypes: dict[str, str]) -> ZipGroup:
        """Open a file of small arrays."""
        return ZipGroup(MappedFile(self.path / path), dtypes, schema.OPTIONAL_ROW_ARRAYS | dtypes.keys())

    def arrays(self, path: str, dtypes: dict[str, str]) -> dict[str, np.ndarray]:
        """Return writable copies of the arrays of a file of small arrays."""
        group = self.group(path, dtypes)
        return {name: np.array(group.view(name)) for name in dtypes if name in group}

    def part(self, k: int) -> dict[str, np.ndarray]:
        """Return writable copies of the arrays of an index part."""
        return self.arrays(self.manifest["index"][k]["path"], mf.PART_DTYPES)

    def set_part(self, k: int, arrays: dict[str, np.ndarray]) -> None:
        """Write an index part and update its size and checksum in the manifest."""
        self.replace("index", k, pack_group(arrays, {}))

    def replace(self, kind: str, k: int, data: bytes) -> None:
        """Replace a file that the manifest names and update its size and checksum there."""
        ref = self.manifest[kind][k]
        self.write(ref["path"], data)
        ref["size"], ref["crc32c"] = len(data), crc32c(data)

    def segments(self) -> list[str]:
        """Return the paths of all segments."""
        return [
            f"segments/{name}"
            for k in range(len(self.manifest["index"]))
            for name in strings(self.part(k), "segment_name")
        ]

    def row_files(self) -> list[str]:
        """Return the paths of the small arrays of all segments."""
        return [f"{segment}/rows.zip" for segment in self.segments()]

    def listed(self, segment: str) -> list[str]:
        """Return the paths of the files that a segment lists."""
        attributes = self.group(f"{segment}/rows.zip", schema.ROW_DTYPES).attributes()
        return [f"{segment}/{name}" for name, _, _ in attributes["tracestore"]["files"]]

    def small_files(self) -> list[tuple[str, dict[str, str]]]:
        """Return path and dtypes of each file of small arrays."""
        found = [(p["path"], mf.PART_DTYPES) for p in self.manifest["index"]]
        scores = {f"{schema.SCORE_PREFIX}{name}": schema.SCORE_DTYPE for name in self.manifest["attributes"]["scores"]}
        found += [(c["path"], schema.COLUMN_DTYPES | scores) for c in self.manifest["columns"]]
        return found + [(path, schema.ROW_DTYPES) for path in self.row_files()]

    def files(self) -> list[str]:
        """Return the paths of all committed files."""
        found = [path for path, _ in self.small_files()]
        return found + [path for segment in self.segments() for path in self.listed(segment)]

    def set_rows(self, segment: str, arrays: dict[str, np.ndarray], attributes: object = None) -> None:
        """Write the small arrays of a segment; `attributes` replaces those of the group."""
        path = f"{segment}/rows.zip"
        if attributes is None:
            attributes = self.group(path, schema.ROW_DTYPES).attributes()
        self.write(path, pack_group(arrays, attributes))

    def reseal(self) -> None:
        """Update all sizes and checksums below the manifest."""
        for kind in ("index", "columns"):
            for k, ref in enumerate(self.manifest[kind]):
                if kind == "index":
                    with contextlib.suppress(ValueError, OSError):  # the change may have left no group
                        self._reseal_part(k)
                path = self.path / ref["path"]
                if path.is_file() and not path.is_symlink():
                    self.replace(kind, k, path.read_bytes())

    def _reseal_part(self, k: int) -> None:
        arrays = self.part(k)
        for row, name in enumerate(strings(arrays, "segment_name")):
            with contextlib.suppress(ValueError, KeyError, TypeError, OSError):
                self._reseal_segment(f"segments/{name}")
            path = self.path / "segments" / name / "rows.zip"
            if path.is_file() and not path.is_symlink():
                data = path.read_bytes()
                arrays["segment_size"][row], arrays["segment_crc32c"][row] = len(data), crc32c(data)
        self.set_part(k, arrays)

    def _reseal_segment(self, segment: str) -> None:
        group = self.group(f"{segment}/rows.zip", schema.ROW_DTYPES)
        attributes = group.attributes()
        listed = attributes["tracestore"]["files"]
        for entry in listed:
            path = self.path / segment / entry[0]
            if path.is_file() and not path.is_symlink():
                data = path.read_bytes()
                entry[1:] = [len(data), crc32c(data)]
        self.set_rows(segment, {name: np.array(group.view(name)) for name in group.names}, attributes)

    def seal(self) -> None:
        """Write the manifest and its copy."""
        text = json.dumps(self.manifest, sort_keys=True, separators=(",", ":")).encode()
        data = text + b"\n%08x\n" % crc32c(text)
        self.write(f"manifest/{self.generation:010d}", data)
        self.write(f"index/{self.generation:010d}.manifest", data)


def strings(arrays: dict[str, np.ndarray], name: str) -> list[str]:
    """Return the texts of an array of strings."""
    data, offsets = arrays[name].tobytes(), arrays[f"{name}_offsets"]
    return [data[a:b].decode("utf-8", "replace") for a, b in itertools.pairwise(offsets)]


def changed_value(rng: random.Random, value: object) -> object:
    """Return a value to replace another one in a JSON document."""
    if isinstance(value, int) and rng.random() < 0.5:
        return value + rng.choice([-1, 1, 2, 1000, -value, value])
    if isinstance(value, str) and rng.random() < 0.4:
        return rng.choice([value + "x", value[:-1], value.upper(), *PATHS])
    if isinstance(value, list) and value and rng.random() < 0.5:
        return rng.choice([value[:-1], value + value[-1:], value[::-1], []])
    return rng.choice(VALUES)


def change_json(rng: random.Random, document: object) -> None:
    """Change, rename or remove one entry of a JSON document."""
    places: list[tuple[object, object]] = []

    def walk(item: object) -> None:
        pairs = item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ()
        for key, value in pairs:
            places.append((item, key))
            walk(value)

    walk(document)
    item, key = rng.choice(places)
    if isinstance(item, dict) and rng.random() < 0.1:
        item[f"{key}x"] = item.pop(key)
    elif rng.random() < 0.1:
        del item[key]
    else:
        item[key] = changed_value(rng, item[key])


def change_array(rng: random.Random, array: np.ndarray) -> None:
    """Change one or several values of a writable array."""
    if array.size == 0:
        return
    flat = array.reshape(-1)
    for _ in range(rng.choice([1, 1, 1, 3, len(flat)])):
        k = rng.randrange(len(flat))
        if flat.dtype.kind == "f":
            with np.errstate(over="ignore"):
                flat[k] = rng.choice([np.nan, np.inf, -1.0, 1e300])
            continue
        info = np.iinfo(flat.dtype)
        value = rng.choice([int(flat[k]) + rng.choice([-1, 1, 100]), *NUMBERS])
        flat[k] = min(max(value, info.min), info.max)


# Each function below changes a store; the caller seals it afterwards.


def change_manifest(rng: random.Random, store: Store) -> None:
    """Change an entry of the manifest."""
    change_json(rng, store.manifest)


def change_index_value(rng: random.Random, store: Store) -> None:
    """Change values of an array of an index part."""
    k = rng.randrange(len(store.manifest["index"]))
    arrays = store.part(k)
    change_array(rng, arrays[rng.choice([n for n in arrays if arrays[n].size])])
    store.set_part(k, arrays)


def _write_group(store: Store, path: str, data: bytes) -> None:
    """Replace a file of small arrays and update the checksums of files above it."""
    for kind in ("index", "columns"):
        for k, ref in enumerate(store.manifest[kind]):
            if ref["path"] == path:
                return store.replace(kind, k, data)
    store.write(path, data)
    return store.reseal()


def change_row_value(rng: random.Random, store: Store) -> None:
    """Change values of a small array of a segment or of the columns, such as offsets, rows, scores or texts."""
    path, dtypes = rng.choice([file for file in store.small_files() if not file[0].startswith("index/")])
    arrays = store.arrays(path, dtypes)
    change_array(rng, arrays[rng.choice([n for n in arrays if arrays[n].size])])
    attributes = store.group(path, dtypes).attributes()
    _write_group(store, path, pack_group(arrays, attributes))


def change_group_length(rng: random.Random, store: Store) -> None:
    """Remove, rename, shorten or lengthen a small array."""
    path, dtypes = rng.choice(store.small_files())
    arrays, attributes = store.arrays(path, dtypes), store.group(path, dtypes).attributes()
    name = rng.choice(list(arrays))
    array = arrays.pop(name)
    if rng.random() < 0.8:
        arrays[rng.choice([name, name, f"{name}x"])] = rng.choice(
            [array[:-1], np.concatenate([array, array]), array[:0]]
        )
    _write_group(store, path, pack_group(arrays, attributes))


def change_zip(rng: random.Random, store: Store) -> None:
    """Change bytes of the structure of a ZIP archive, or of a zarr.json in it."""
    path, _ = rng.choice(store.small_files())
    data = bytearray((store.path / path).read_bytes())
    end = len(data) - 22
    directory = struct.unpack_from("<I", data, end + 16)[0]
    begins = [k.start() for k in re.finditer(b"PK\x01\x02", data[directory:])]
    row = directory + rng.choice(begins)
    local = struct.unpack_from("<I", data, row + 42)[0]
    at, size = rng.choice(
        [(end, 4), (end + 8, 2), (end + 10, 2), (end + 12, 4), (end + 16, 4), (end + 20, 2), (row + 8, 2), (row + 10, 2),
         (row + 20, 4), (row + 24, 4), (row + 28, 2), (row + 30, 2), (row + 32, 2), (row + 42, 4), (row + 46, 3),
         (local, 4), (local + 26, 2), (local + 28, 2), (local + 40, 20), (len(data) // 3, 30)]
    )  # fmt: skip
    data[at : at + size] = rng.choice([rng.randbytes(size), b"\xff" * size, bytes(size), b"\1" + bytes(size - 1)])
    store.write(path, bytes(data))
    for kind in ("index", "columns"):
        for k, ref in enumerate(store.manifest[kind]):
            if ref["path"] == path:
                return store.replace(kind, k, bytes(data))
    for k in range(len(store.manifest["index"])):
        arrays = store.part(k)
        for number, name in enumerate(strings(arrays, "segment_name")):
            if path == f"segments/{name}/rows.zip":
                arrays["segment_size"][number], arrays["segment_crc32c"][number] = len(data), crc32c(bytes(data))
        store.set_part(k, arrays)
    return None


def change_segment_list(rng: random.Random, store: Store) -> None:
    """Change the name of a segment in an index part, or an entry of the list of files of a segment."""
    if rng.random() < 0.5:
        segment = rng.choice(store.segments())
        path = f"{segment}/rows.zip"
        attributes = store.group(path, schema.ROW_DTYPES).attributes()
        change_json(rng, attributes)
        store.set_rows(segment, store.arrays(path, schema.ROW_DTYPES), attributes)
        for k in range(len(store.manifest["index"])):
            arrays, data = store.part(k), (store.path / path).read_bytes()
            for number, name in enumerate(strings(arrays, "segment_name")):
                if segment == f"segments/{name}":
                    arrays["segment_size"][number], arrays["segment_crc32c"][number] = len(data), crc32c(data)
            store.set_part(k, arrays)
        return
    k = rng.randrange(len(store.manifest["index"]))
    arrays = store.part(k)
    names = strings(arrays, "segment_name")
    if names:
        names[rng.randrange(len(names))] = rng.choice([*PATHS, rng.choice(names), "..", "."])
        arrays["segment_name"], arrays["segment_name_offsets"] = encode_strings(names)
        store.set_part(k, arrays)


def change_metadata(rng: random.Random, store: Store) -> None:
    """Change an entry of a zarr.json."""
    name = rng.choice(["zarr.json", *(f for f in store.files() if f.endswith("zarr.json"))])
    document = json.loads((store.path / name).read_text())
    change_json(rng, document)
    store.write(name, json.dumps(document).encode())
    store.reseal()


def _shards(store: Store) -> list[str]:
    return [f for f in store.files() if "/c/" in f]


def change_values(rng: random.Random, store: Store) -> None:
    """Change values of a large array."""
    name = rng.choice(_shards(store))
    path = store.path / name
    meta = json.loads((store.path / name.split("/c/")[0] / "zarr.json").read_text())
    data = bytearray(path.read_bytes())
    dtype = np.dtype(meta["data_type"])
    count = min(int(np.prod(meta["shape"])), len(data) // dtype.itemsize)
    change_array(rng, np.frombuffer(data, dtype, count))
    store.write(name, bytes(data))
    store.reseal()


def change_shard_index(rng: random.Random, store: Store) -> None:
    """Change the index of a shard."""
    name = rng.choice(_shards(store))
    data = bytearray((store.path / name).read_bytes())
    entries = max(1, min(rng.choice([1, 1, 2]), (len(data) - 4) // 16))
    at = len(data) - 4 - 16 * entries
    struct.pack_into("<Q", data, at + rng.choice([0, 8]), rng.choice([0, 1, 17, len(data), 2**31, 2**63, 2**64 - 1]))
    meta = json.loads((store.path / name.split("/c/")[0] / "zarr.json").read_text())
    chunk = meta["codecs"][0]["configuration"]["chunk_shape"][0]
    index = data[-4 - 16 * max(1, -(-meta["shape"][0] // chunk)) : -4]
    data[-4:] = struct.pack("<I", crc32c(bytes(index)))
    store.write(name, bytes(data))
    store.reseal()


def change_chunk(rng: random.Random, store: Store) -> None:
    """Change bytes of a compressed chunk, mostly of its header."""
    name = rng.choice(_shards(store))
    data = bytearray((store.path / name).read_bytes())
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(min(len(data), rng.choice([8, 20, 64, len(data)])))
        width = min(rng.choice([1, 1, 4]), len(data) - at)
        data[at : at + width] = rng.choice([rng.randbytes(width), b"\xff" * width, bytes(width), b"\x7f" * width])
    store.write(name, bytes(data))
    store.reseal()


def change_file(rng: random.Random, store: Store) -> None:
    """Replace a file or folder by a link, FIFO, device, folder or nothing, or change the length of a file."""
    name = rng.choice(["zarr.json", "lock", f"manifest/{store.generation:010d}", *store.files(),
                       "segments", "columns", "index", "manifest", f"segments/{os.listdir(store.path / 'segments')[0]}"])  # fmt: skip
    path = store.path / name
    store.seal()
    if rng.random() < 0.25 and path.is_file():
        data = path.read_bytes()
        store.write(name, rng.choice([b"", data[:-1], data[: len(data) // 2], data + b"\0" * 5, data * 2]))
        if rng.random() < 0.5:
            store.reseal()
            store.seal()
        return
    kept = store.path.parent / "elsewhere" / path.name
    kept.parent.mkdir(exist_ok=True)
    if path.exists():
        shutil.move(path, kept)
    kind = rng.choice(["link", "link outside", "fifo", "device", "folder", "nothing", "loop"])
    if kind == "link":
        path.symlink_to(kept)
    elif kind == "link outside":
        path.symlink_to(store.path.parent / "canary")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "device" and os.geteuid() == 0:
        os.mknod(path, 0o20666, os.makedev(1, 5))  # /dev/zero
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)


CHANGES: list[tuple[int, Callable[[random.Random, Store], None]]] = [
    (4, change_manifest), (5, change_index_value), (5, change_row_value), (1, change_group_length), (3, change_zip),
    (2, change_segment_list), (4, change_metadata), (2, change_values), (2, change_shard_index), (4, change_chunk),
    (3, change_file),
]  # fmt: skip


def change_store(rng: random.Random, store: Store) -> str:
    """Make one random change and seal the store; return the name of the change."""
    change = rng.choices([c for _, c in CHANGES], [w for w, _ in CHANGES])[0]
    if change is not change_file and rng.random() < 0.9:
        # Keep one generation, so that a reader cannot fall back to another one.
        for name in sorted(os.listdir(store.path / "manifest"))[:-1]:
            (store.path / "manifest" / name).unlink()
    change(rng, store)
    if change is not change_file:
        store.seal()
    return change.__name__


def malicious_store(sources: list[Path], seed: int, path: Path) -> str:
    """Make the store of a seed at `path`; return its source and the name of the change."""
    source = sources[seed % len(sources)]
    shutil.copytree(source, path)
    return f"{source.stem}: {change_store(random.Random(seed), Store(path))}"
