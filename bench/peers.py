"""The storage systems of compare_peers.py, which runs this file as one process per system.

    python bench/peers.py SYSTEM FOLDER SHAPE

The process answers requests on standard input, one JSON object per line. The peers pin other versions of their
dependencies, so they have a separate environment, and this file imports only numpy before a system is chosen.
"""

import functools
import json
import sys
import time
import zlib
from pathlib import Path

import numpy as np

SHAPES = {"small": (30, 576, 600), "large": (32, 4096, 96)}
BATCH = 16
# The copies of all systems must fit into the page cache together, because the warm case is measured.
PT_FILES = 6


def trace(k, layers, dim):
    """Return hidden states (L, S, D) and packed attention (L, A) of trace k, float16, 30 to 70 tokens."""
    rng = np.random.default_rng(k)
    tokens = int(rng.integers(30, 71))
    hidden = np.roll(_base(layers, dim)[:, :tokens], k, axis=2)
    rows = np.tril_indices(tokens)[0]
    weight = (rng.random((layers, len(rows)), "f4") + 1e-3) / (rows + 1)
    return np.ascontiguousarray(hidden), weight.astype("f2")


@functools.cache
def _base(layers, dim):
    return np.random.default_rng(1).standard_normal((layers, 70, dim), "f4").astype("f2")


def collate(items):
    """Return the batch of some traces. All peers use this function, which computes pairs once per length."""
    x = np.concatenate([h.reshape(-1, h.shape[-1]) for h, _ in items])
    sources, targets, weights, node = [], [], [], 0
    for hidden, attention in items:
        layers, tokens = hidden.shape[:2]
        i, j = _pairs(tokens)
        first = node + np.arange(layers)[:, None] * tokens
        keep = attention > 0
        if keep.all():
            sources.append((first + j).reshape(-1))
            targets.append((first + i).reshape(-1))
            weights.append(attention.reshape(-1))
        else:
            sources.append((first + j)[keep])
            targets.append((first + i)[keep])
            weights.append(attention[keep])
        node += layers * tokens
    return x, np.stack([np.concatenate(sources), np.concatenate(targets)]), np.concatenate(weights)


_pairs = functools.cache(np.tril_indices)


def digest(batch):
    """Return a checksum of the arrays of a batch."""
    crc = 0
    for array in batch:
        crc = zlib.crc32(np.ascontiguousarray(array).view("u1").reshape(-1), crc)
    return crc


class Peer:
    """A system that writes traces into a folder and reads one by its number.

    Subclasses implement `write`, `open` and `read`, or `batches` instead of `read`.
    """

    workers = None

    def __init__(self, folder, layers, dim, count):
        self.folder, self.layers, self.dim, self.count = Path(folder), layers, dim, count

    def traces(self):
        """Yield all traces."""
        return (trace(k, self.layers, self.dim) for k in range(self.count))

    def batches(self, ids):
        """Yield batches of the traces with these numbers, in this order."""
        for begin in range(0, len(ids), BATCH):
            yield collate([self.read(int(k)) for k in ids[begin : begin + BATCH]])


class Memmap(Peer):
    """np.memmap of two flat files."""

    def write(self):
        offsets = [(0, 0)]
        with (self.folder / "h").open("wb") as h, (self.folder / "a").open("wb") as a:
            for hidden, attention in self.traces():
                hidden.tofile(h)
                attention.tofile(a)
                offsets.append((h.tell() // 2, a.tell() // 2))
        np.save(self.folder / "offsets.npy", offsets)

    def open(self):
        self.offsets = np.load(self.folder / "offsets.npy")
        self.h, self.a = (np.memmap(self.folder / n, "f2", "r") for n in ("h", "a"))

    def read(self, k):
        (h0, a0), (h1, a1) = self.offsets[k : k + 2]
        return self.h[h0:h1].reshape(self.layers, -1, self.dim), self.a[a0:a1].reshape(self.layers, -1)


class Pt(Peer):
    """preprocessed_*.pt files of PyG graphs with two files in memory, like the scripts that users have."""

    def write(self):
        import torch
        from torch_geometric.data import Data

        part = []
        per_file = self.count // PT_FILES
        for k, (hidden, attention) in enumerate(self.traces()):
            i, j = _pairs(hidden.shape[1])
            index = torch.from_numpy(np.stack([j, i]))
            part.append(
                [
                    Data(x=torch.from_numpy(h), edge_index=index.clone(), edge_attr=torch.from_numpy(a).unsqueeze(1))
                    for h, a in zip(hidden, attention, strict=True)
                ]
            )
            if len(part) == per_file or k == self.count - 1:
                torch.save({"graphs": part}, self.folder / f"preprocessed_{k // per_file}.pt")
                part = []

    def open(self):
        import torch

        self.load = functools.lru_cache(2)(
            lambda n: torch.load(self.folder / f"preprocessed_{n}.pt", weights_only=False)["graphs"]
        )

    def batches(self, ids):
        from torch_geometric.data import Batch

        n = self.count // PT_FILES
        for begin in range(0, len(ids), BATCH):
            graphs = [self.load(int(k) // n)[int(k) % n] for k in ids[begin : begin + BATCH]]
            batch = Batch.from_data_list([layer for trace in graphs for layer in trace])
            yield batch.x, batch.edge_index, batch.edge_attr


class Lmdb(Peer):
    """LMDB, one value per trace."""

    def write(self):
        import lmdb

        env = lmdb.open(str(self.folder / "db"), map_size=1 << 37)
        for k, (hidden, attention) in enumerate(self.traces()):
            with env.begin(write=True) as txn:
                txn.put(b"%d" % k, hidden.tobytes() + attention.tobytes())
        env.close()

    def open(self):
        import lmdb

        self.env = lmdb.open(str(self.folder / "db"), readonly=True, lock=False, readahead=False)
        self.txn = self.env.begin(buffers=True)

    def read(self, k):
        flat = np.frombuffer(self.txn.get(b"%d" % k), "f2")
        # L S D + L S (S + 1) / 2 items: solve for S.
        per_layer = len(flat) // self.layers
        tokens = int((-(2 * self.dim + 1) + ((2 * self.dim + 1) ** 2 + 8 * per_layer) ** 0.5) / 2 + 0.5)
        cut = self.layers * tokens * self.dim
        return flat[:cut].reshape(self.layers, tokens, self.dim), flat[cut:].reshape(self.layers, -1)


class H5(Memmap):
    """h5py, contiguous datasets."""

    def write(self):
        import h5py

        pairs = list(self.traces())
        with h5py.File(self.folder / "f.h5", "w") as f:
            f["h"] = np.concatenate([h.reshape(-1, self.dim) for h, _ in pairs])
            f["a"] = np.concatenate([a.reshape(-1) for _, a in pairs])
            f["offsets"] = np.cumsum([(0, 0), *[(h.shape[0] * h.shape[1], a.size) for h, a in pairs]], axis=0)

    def open(self):
        import h5py

        self.f = h5py.File(self.folder / "f.h5")
        self.h, self.a, self.offsets = self.f["h"], self.f["a"], self.f["offsets"][:]


class Litdata(Peer):
    """litdata's dataset, read by number."""

    def write(self):
        import litdata
        from litdata.streaming.writer import BinaryWriter

        out = self.folder / "lit"
        out.mkdir()
        writer = BinaryWriter(str(out), chunk_bytes="64MB")
        for k, (hidden, attention) in enumerate(self.traces()):
            writer.add_item(k, {"h": hidden, "a": attention})
        writer.done()
        writer.merge()
        assert litdata.__version__

    def open(self):
        import litdata

        self.data = litdata.StreamingDataset(str(self.folder / "lit"))

    def read(self, k):
        item = self.data[k]
        return item["h"], item["a"]


class LitdataLoader(Litdata):
    """litdata's loader with its own shuffling."""

    def batches(self, ids):
        import litdata

        data = litdata.StreamingDataset(str(self.folder / "lit"), shuffle=True)
        yield from litdata.StreamingDataLoader(
            data, batch_size=BATCH, num_workers=self.workers, collate_fn=_collate_dicts
        )


def _collate_dicts(items):
    import torch

    return [torch.from_numpy(a) for a in collate([(i["h"], i["a"]) for i in items])]


class ZarrPython(Peer):
    """zarr-python over a store that tracestore wrote."""

    def write(self):
        """Write nothing: the tracestore system writes the store before."""

    def open(self):
        import zarr

        self.segments, self.where = [], []
        # Segments are named by their content; they were written one after the other.
        segments = (self.folder.parent / "store" / "segments").iterdir()
        for number, path in enumerate(sorted(segments, key=lambda path: (path / "rows.zip").stat().st_mtime_ns)):
            group = zarr.open_group(path, mode="r")
            self.segments.append(self.arrays(path, group))
            row = pair = 0
            rows = zarr.open_group(zarr.storage.ZipStore(path / "rows.zip", mode="r"), mode="r")
            for tokens in rows["num_tokens"][:].tolist():
                size = self.layers * tokens * (tokens + 1) // 2
                self.where.append((number, row, row + self.layers * tokens, pair, pair + size))
                row, pair = row + self.layers * tokens, pair + size

    def arrays(self, path, group):
        """Return the arrays of hidden states and attention of a segment."""
        return group["hidden_states"], group["attention"]

    def read(self, k):
        number, h0, h1, a0, a1 = self.where[k]
        h, a = self.segments[number]
        return self.rows(h, h0, h1).reshape(self.layers, -1, self.dim), self.rows(a, a0, a1).reshape(self.layers, -1)

    def rows(self, array, begin, end):
        """Return some rows of an array."""
        return array[begin:end]


class TensorStore(ZarrPython):
    """tensorstore over a store that tracestore wrote."""

    def arrays(self, path, group):
        import tensorstore

        spec = {"driver": "zarr3"}
        return [
            tensorstore.open(spec | {"kvstore": f"file://{path / name}/"}, read=True).result()
            for name in ("hidden_states", "attention")
        ]

    def rows(self, array, begin, end):
        return array[begin:end].read().result()


class Tracestore(Peer):
    """TraceLoader in the given order, coo edges."""

    edges = "coo"

    def write(self):
        import tracestore

        with tracestore.create(self.folder.parent / "store") as writer:
            for k, (hidden, attention) in enumerate(self.traces()):
                tokens = hidden.shape[1]
                square = np.zeros((self.layers, 1, tokens, tokens), "f2")
                square[:, 0, *np.tril_indices(tokens)] = attention
                writer.append(
                    {"hidden_states": list(hidden), "attentions": list(square), "tokens": np.arange(tokens),
                     "tokens_decoded": [""] * tokens, "generated_answer_clean": "", "question_id": str(k)}
                )  # fmt: skip

    def open(self):
        self.store = self.folder.parent / "store"
        self.loaders = {}

    def batches(self, ids):
        import tracestore

        key = ids.tobytes()
        if key not in self.loaders:
            self.loaders = {
                key: tracestore.TraceLoader(
                    self.store, "graph", batch_size=BATCH, shuffle="none", indices=ids, edge_format=self.edges
                )
            }
        for batch in self.loaders[key]:
            if self.edges == "packed":
                yield batch.x, batch.attention
            else:
                yield batch.x, batch.edge_index, batch.edge_attr


class TracestorePacked(Tracestore):
    """TraceLoader, packed edges."""

    edges = "packed"


class TracestoreSequence(Tracestore):
    """TraceLoader, last tokens only."""

    def batches(self, ids):
        import tracestore

        if not self.loaders:
            self.loaders = {0: tracestore.TraceLoader(self.store, batch_size=BATCH)}
        for batch in self.loaders[0]:
            yield (batch.sequences,)


class TracestoreWorkers(Tracestore):
    """torch's DataLoader with worker processes."""

    def batches(self, ids):
        from torch.utils.data import DataLoader

        import tracestore

        if not self.loaders:
            data = tracestore.TraceIterableDataset(self.store, "graph", batch_size=BATCH, shuffle="global")
            self.loaders = {0: DataLoader(data, batch_size=None, num_workers=self.workers, persistent_workers=True)}
        for batch in self.loaders[0]:
            yield batch.x, batch.edge_index, batch.edge_attr


# name: (class, workers, runs in the peers' environment, delivers the given order)
SYSTEMS = {
    "tracestore, coo": (Tracestore, None, False, True),
    "tracestore, packed": (TracestorePacked, None, False, False),
    "tracestore, sequence": (TracestoreSequence, None, False, False),
    "tracestore in DataLoader, 2 workers": (TracestoreWorkers, 2, False, False),
    "np.memmap": (Memmap, None, True, True),
    "litdata, reader": (Litdata, None, True, True),
    "litdata loader, 0 workers": (LitdataLoader, 0, True, False),
    "litdata loader, 2 workers": (LitdataLoader, 2, True, False),
    "LMDB": (Lmdb, None, True, True),
    "h5py": (H5, None, True, True),
    "tensorstore": (TensorStore, None, True, True),
    "zarr-python": (ZarrPython, None, True, True),
    ".pt files, two kept": (Pt, None, True, True),
}


def serve(name, folder, layers, dim, count):
    """Answer requests from standard input, one JSON object per line: {"do": "write" | "check" | "time", ...}."""
    cls, workers, _, _ = SYSTEMS[name]
    peer = cls(folder, layers, dim, count)
    peer.workers = workers
    opened = False
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "write":
            peer.write()
            answer = 0
        else:
            if not opened:
                peer.open()
                opened = True
            ids = np.array(order["ids"], np.int64)
            if order["do"] == "check":
                answer = [digest([np.asarray(a) for a in batch]) for batch in peer.batches(ids)]
            else:
                # Warm up for as long as the measurement, because an idle process loses cached pages.
                warm_until = time.perf_counter() + order["seconds"]
                began, traces, over = None, 0, False
                while not over:
                    for k, batch in enumerate(peer.batches(ids)):
                        del batch
                        now = time.perf_counter()
                        if began is None:
                            began = now if now > warm_until else None
                            continue
                        traces += min(BATCH, len(ids) - k * BATCH)
                        over = now - began > order["seconds"]
                        if over:
                            break
                answer = traces / (now - began)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], *SHAPES[sys.argv[3]])
