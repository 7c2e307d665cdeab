"""Compare the loading of batches with other storage systems.

Each system writes the same synthetic traces and then delivers the same random batches of 16: gathered
hidden states and every causal edge with its weight. A system whose values differ is not measured.
Rounds alternate between the systems; the table has medians.

    make bench-peers            both shapes, a table

The peers pin other versions of their dependencies, so they have a separate environment, which runs this
file with `--serve SYSTEM`: one process per system, which answers requests on standard input.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
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


_BASES = {}


def _base(layers, dim):
    if (layers, dim) not in _BASES:
        _BASES[layers, dim] = np.random.default_rng(1).standard_normal((layers, 70, dim), "f4").astype("f2")
    return _BASES[layers, dim]


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


_PAIRS = {}


def _pairs(tokens):
    if tokens not in _PAIRS:
        _PAIRS[tokens] = np.tril_indices(tokens)
    return _PAIRS[tokens]


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
        from functools import lru_cache

        import torch

        self.load = lru_cache(2)(
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


class H5(Peer):
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

    def read(self, k):
        (h0, a0), (h1, a1) = self.offsets[k : k + 2]
        return self.h[h0:h1].reshape(self.layers, -1, self.dim), self.a[a0:a1].reshape(self.layers, -1)


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


class Mds(Peer):
    """MosaicML streaming, read by number."""

    def write(self):
        from streaming import MDSWriter

        columns = {"h": "ndarray:float16", "a": "ndarray:float16"}
        with MDSWriter(out=str(self.folder / "mds"), columns=columns, size_limit=1 << 26) as writer:
            for hidden, attention in self.traces():
                writer.write({"h": hidden, "a": attention})

    def open(self):
        from streaming import StreamingDataset

        self.data = StreamingDataset(local=str(self.folder / "mds"), batch_size=BATCH)

    def read(self, k):
        item = self.data[k]
        return item["h"], item["a"]


class ZarrPython(Peer):
    """zarr-python over a store that tracestore wrote."""

    codec, pipeline = "none", None

    def write(self):
        """Write nothing: the tracestore system writes the store before."""

    def open(self):
        import zarr

        if self.pipeline:
            zarr.config.set({"codec_pipeline.path": self.pipeline})
        self.segments, self.where = [], []
        for number, path in enumerate(sorted((self.folder.parent / f"store-{self.codec}" / "segments").iterdir())):
            group = zarr.open_group(path, mode="r")
            self.segments.append(self.arrays(path, group))
            row = pair = 0
            for tokens in group["num_tokens"][:].tolist():
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


class ZarrZstd(ZarrPython):
    """zarr-python over a store compressed by zstd."""

    codec = "zstd"


class Zarrs(ZarrPython):
    """zarr-python with the codec pipeline of zarrs."""

    pipeline = "zarrs.ZarrsCodecPipeline"


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

    edges, codec = "coo", "none"

    def write(self):
        import tracestore

        for codec in ("none", "zstd"):
            with tracestore.create(self.folder.parent / f"store-{codec}", codec=codec) as writer:
                for k, (hidden, attention) in enumerate(self.traces()):
                    tokens = hidden.shape[1]
                    square = np.zeros((self.layers, 1, tokens, tokens), "f2")
                    square[:, 0, *np.tril_indices(tokens)] = attention
                    writer.append(
                        {"hidden_states": list(hidden), "attentions": list(square), "tokens": np.arange(tokens),
                         "tokens_decoded": [""] * tokens, "generated_answer_clean": "", "question_id": str(k)}
                    )  # fmt: skip

    def open(self):
        self.store = self.folder.parent / f"store-{self.codec}"
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


class TracestoreZstd(Tracestore):
    """TraceLoader over a compressed store."""

    codec = "zstd"


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
    "tracestore, zstd": (TracestoreZstd, None, False, True),
    "tracestore in DataLoader, 2 workers": (TracestoreWorkers, 2, False, False),
    "np.memmap": (Memmap, None, True, True),
    "litdata, reader": (Litdata, None, True, True),
    "litdata loader, 0 workers": (LitdataLoader, 0, True, False),
    "litdata loader, 2 workers": (LitdataLoader, 2, True, False),
    "LMDB": (Lmdb, None, True, True),
    "h5py": (H5, None, True, True),
    "MosaicML streaming, reader": (Mds, None, True, True),
    "tensorstore": (TensorStore, None, True, True),
    "zarrs": (Zarrs, None, True, True),
    "zarr-python": (ZarrPython, None, True, True),
    "zarr-python, zstd": (ZarrZstd, None, True, True),
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


class Server:
    """The process of one system."""

    def __init__(self, name, python, folder, shape):
        self.name, self.rates = name, []
        folder.mkdir(exist_ok=True)
        command = [python, __file__, "--serve", name, "--folder", str(folder), "--shape", shape]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True
        )

    def request(self, **order):
        """Send a request and return the answer."""
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())
        except (json.JSONDecodeError, BrokenPipeError):
            self.log.seek(0)
            raise RuntimeError(f"{self.name}: {self.log.read()[-400:]}") from None

    def close(self):
        """End the process."""
        self.process.stdin.close()
        self.process.wait()


def memcpy_rate(num_bytes):
    """Return a function that returns the bytes per second of two threads that copy `num_bytes`."""
    part = num_bytes // 2
    pairs = [(np.zeros(part, "u1"), np.ones(part, "u1")) for _ in range(2)]

    def run():
        threads = [threading.Thread(target=np.copyto, args=p) for p in pairs]
        began = time.perf_counter()
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        return 2 * part / (time.perf_counter() - began)

    run()
    return run


def compare(shape, peers_python, names, rounds, seconds):
    """Measure some systems on one shape and print the table."""
    layers, dim, count = SHAPES[shape]
    root = Path(tempfile.mkdtemp(prefix="peers-"))
    servers, failed = [], {}
    try:
        sizes = [trace(k, layers, dim) for k in range(count)]
        mean_bytes = sum(h.nbytes + a.nbytes for h, a in sizes) / count
        del sizes
        # Several epochs in a row keep the share of start and end small.
        ids = np.concatenate([np.random.default_rng(s).permutation(count) for s in range(1 + 1000 // count)])
        expected = None
        for name in names:
            cls, _, is_peer, ordered = SYSTEMS[name]
            owner = next(n for n in SYSTEMS if SYSTEMS[n][0] in cls.__mro__ and SYSTEMS[n][0].write is cls.write)
            folder = root / owner.replace(" ", "_").replace(",", "")
            fresh = not folder.exists()
            server = Server(name, peers_python if is_peer else sys.executable, folder, shape)
            try:
                if fresh:
                    server.request(do="write")
                if ordered:
                    found = server.request(do="check", ids=ids[: 3 * BATCH].tolist())
                    expected = expected or found
                    if found != expected:
                        raise RuntimeError(f"{name}: values differ")
                server.request(do="time", ids=ids.tolist(), seconds=seconds)
                servers.append(server)
            except RuntimeError as error:
                failed[name] = str(error).splitlines()[-1]
                server.close()
        copy, copies = memcpy_rate(int(mean_bytes * count)), []
        for _ in range(rounds):
            copies.append(max(copy() for _ in range(3)))  # the first one after a pause is slower
            for server in servers:
                server.rates.append(server.request(do="time", ids=ids.tolist(), seconds=seconds))
    finally:
        for server in servers:
            server.close()
        shutil.rmtree(root, ignore_errors=True)
    limit = statistics.median(copies) / mean_bytes
    print(f"\nL={layers} D={dim}, {count} traces of {mean_bytes / 1e6:.1f} MB, batches of {BATCH}, {rounds} rounds")
    print(f"limit, 2-thread memcpy of the same bytes: {limit:,.0f} traces/s, {limit * mean_bytes / 1e9:.1f} GB/s")
    tracestore_rate = statistics.median(servers[0].rates)
    for server in servers:
        rate = statistics.median(server.rates)
        of_limit = statistics.median(r * mean_bytes / c for r, c in zip(server.rates, copies, strict=True))
        print(
            f"{server.name:38} {rate:10,.0f} traces/s   {of_limit:6.3f} of memcpy   coo is {tracestore_rate / rate:7.1f} times"
        )
    for name, reason in failed.items():
        print(f"{name:38} not measured: {reason[:120]}")


def main():
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", default=".venv-peers/bin/python", help="interpreter with the peers")
    parser.add_argument("--shape", choices=[*SHAPES, "both"], default="both")
    parser.add_argument("--only", action="append", help="systems to run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of one measurement")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.folder, *SHAPES[args.shape])
        return
    names = [n for n in SYSTEMS if args.only is None or n in args.only]
    for shape in SHAPES if args.shape == "both" else [args.shape]:
        compare(shape, args.peers_python, names, args.rounds, args.seconds)


if __name__ == "__main__":
    main()
