"""Train the detectors without tracestore, like the scripts that users have. The peer of end_to_end.py.

Whole pickles in memory, edges from a loop in Python, two .pt files in memory, PyG one layer at a time.

python bench/baseline_scripts.py TRACES_DIR WORK_DIR --scores CSV [--epochs 3]
"""

import argparse
import csv
import gzip
import json
import pickle
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GINEConv, global_mean_pool

from tracestore.split import split_keys

BATCH = 16
MAX_CACHED_FILES = 2


def graph_of(hidden: np.ndarray, attention: np.ndarray) -> Data:
    """Return the graph of one layer: an edge for each causal pair with attention."""
    mean = attention.astype(np.float32).mean(0)
    edges, weights = [], []
    for i in range(len(mean)):
        for j in range(i + 1):
            if mean[i, j] > 0:
                edges.append([j, i])
                weights.append(mean[i, j])
    return Data(
        x=torch.from_numpy(hidden.astype(np.float16)),
        edge_index=torch.tensor(edges, dtype=torch.long).t().contiguous(),
        edge_attr=torch.tensor(np.array(weights, np.float16)).unsqueeze(1),
    )


def preprocess(source: Path, folder: Path, labels: dict[str, float]) -> list[Path]:
    """Write a .pt file for each pickle. Return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for path in sorted(source.glob("*.pkl*")):
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            traces = [t for t in pickle.load(file) if t["question_id"] in labels]
        value = {
            "sequences": torch.from_numpy(
                np.stack([[h[-1] for h in map(np.asarray, t["hidden_states"])] for t in traces]).astype(np.float16)
            ),
            "graphs": [
                [
                    graph_of(np.asarray(h), np.asarray(a))
                    for h, a in zip(t["hidden_states"], t["attentions"], strict=True)
                ]
                for t in traces
            ],
            "labels": torch.tensor([labels[t["question_id"]] for t in traces]),
            "question_ids": [t["question_id"] for t in traces],
        }
        written.append(folder / f"preprocessed_{path.name.split('.')[0]}.pt")
        torch.save(value, written[-1])
    return written


class LruDataset(Dataset[Any]):
    """Traces of the .pt files, with an LRU cache of two files."""

    def __init__(self, locations: list[tuple[Path, int]], view: str) -> None:
        self.locations, self.view = locations, view
        self.cache: OrderedDict[Path, dict[str, Any]] = OrderedDict()

    def __len__(self) -> int:
        return len(self.locations)

    def __getitem__(self, index: int) -> tuple[Any, float]:
        path, row = self.locations[index]
        if path not in self.cache:
            while len(self.cache) >= MAX_CACHED_FILES:
                self.cache.popitem(last=False)
            self.cache[path] = torch.load(path, weights_only=False)
        self.cache.move_to_end(path)
        value = self.cache[path]
        return value["sequences" if self.view == "sequence" else "graphs"][row], float(value["labels"][row])


class Reader(nn.Module):
    """A bidirectional LSTM over the layers, and a classification head."""

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(in_channels, 128, 2, batch_first=True, bidirectional=True, dropout=0.3)
        self.head = nn.Sequential(
            nn.Linear(256, 128),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(128, 64),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(64, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits (B,) of vectors (B, L, C)."""
        _, (h, _) = self.lstm(x)
        return self.head(torch.cat([h[-2], h[-1]], dim=1)).squeeze(1)


class Model(nn.Module):
    """One of the three detectors, computed one layer at a time."""

    def __init__(self, name: str, dim: int) -> None:
        super().__init__()
        self.name = name
        if name != "lstm_solo":
            self.conv1 = GINEConv(nn.Sequential(nn.Linear(dim, 128), nn.ReLU(), nn.Linear(128, 128)), edge_dim=1)
            self.conv2 = GINEConv(nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128)), edge_dim=1)
        if name == "gvae_lstm":
            self.mu, self.logvar = nn.Linear(128, 128), nn.Linear(128, 128)
            self.decoder = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
        self.reader = Reader(dim if name == "lstm_solo" else 128)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Return logits (B,) and the auxiliary loss."""
        if self.name == "lstm_solo":
            return self.reader(batch.float()), 0.0
        pooled = []
        for layer in batch:
            weight = layer.edge_attr.float()
            x = F.dropout(F.relu(self.conv1(layer.x.float(), layer.edge_index, weight)), 0.2, self.training)
            pooled.append(global_mean_pool(self.conv2(x, layer.edge_index, weight), layer.batch))
        vectors = torch.stack(pooled, 1)
        if self.name == "gnn_det_lstm":
            return self.reader(vectors), 0.0
        mu, logvar = self.mu(vectors), self.logvar(vectors).clamp(-10, 10)
        z = mu + torch.exp(logvar / 2) * torch.randn_like(mu) if self.training else mu
        kl = -0.5 * (1 + logvar - mu.square() - logvar.exp()).sum(-1).mean()
        return self.reader(z), 0.1 * ((self.decoder(z) - vectors).square().sum(-1).mean() + 0.01 * kl)


def collate(items: list[tuple[Any, float]]) -> tuple[Any, torch.Tensor]:
    """Return the batch and the labels of some items."""
    values, labels = zip(*items, strict=True)
    if isinstance(values[0], torch.Tensor):
        return torch.stack(values), torch.tensor(labels)
    return [Batch.from_data_list(list(layer)) for layer in zip(*values, strict=True)], torch.tensor(labels)


@torch.no_grad()
def score(model: Model, data: LruDataset) -> tuple[list[float], list[float]]:
    """Return labels and logits of a dataset."""
    model.eval()
    labels, logits = [], []
    for batch, y in DataLoader(data, BATCH, collate_fn=collate):
        logits += model(batch)[0].tolist()
        labels += y.tolist()
    return labels, logits


def train(name: str, splits: dict[str, list[tuple[Path, int]]], dim: int, epochs: int) -> dict[str, list[float]]:
    """Train a detector, select the best epoch on validation, and return labels and logits of the test split."""
    view = "sequence" if name == "lstm_solo" else "graph"
    data = {split: LruDataset(locations, view) for split, locations in splits.items()}
    torch.manual_seed(42)
    model = Model(name, dim)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001, weight_decay=1e-5)
    best, weights = -1.0, model.state_dict()
    for _ in range(epochs):
        model.train()
        for batch, y in DataLoader(data["train"], BATCH, shuffle=True, collate_fn=collate):
            optimizer.zero_grad()
            logits, extra = model(batch)
            (F.binary_cross_entropy_with_logits(logits, y) + extra).backward()
            optimizer.step()
        found = float(roc_auc_score(*score(model, data["val"])))
        if found > best:
            best, weights = found, {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(weights)
    labels, logits = score(model, data["test"])
    return {"label": labels, "logit": logits}


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--scores", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    random.seed(42)
    with args.scores.open(newline="") as file:
        labels = {row["question_id"]: float(float(row["score"]) < 0.5) for row in csv.DictReader(file)}
    files = preprocess(args.source, args.work, labels)
    locations: dict[str, list[tuple[Path, int]]] = {"train": [], "val": [], "test": []}
    split_of = split_keys(list(labels), list(labels.values()), 42)
    dim = 0
    for path in files:
        value = torch.load(path, weights_only=False)
        dim = value["sequences"].shape[2]
        for row, question in enumerate(value["question_ids"]):
            locations[split_of[question]].append((path, row))
    names = ("lstm_solo", "gnn_det_lstm", "gvae_lstm")
    print(json.dumps({name: train(name, locations, dim, args.epochs) for name in names}))


if __name__ == "__main__":
    main()
