"""The plots of docs/gallery.md, on synthetic traces. The site is built from this file."""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.decomposition import PCA

import tracestore
from tracestore.data.order import EpochOrder

rng = np.random.default_rng(0)
with tracestore.create("store.zarr", overwrite=True) as writer:
    for k in range(120):
        tokens, is_right = int(rng.integers(12, 60)), k % 3 > 0
        # Attention falls off with distance, faster in later layers; a wrong answer's is flatter.
        distance = np.subtract.outer(np.arange(tokens), np.arange(tokens))
        layers = [
            np.where(distance >= 0, np.exp(-distance * depth * (0.03 if is_right else 0.01)), 0)
            for depth in range(1, 9)
        ]
        attention = [np.stack([a / a.sum(1, keepdims=True)] * 4).astype("f2") for a in layers]
        drift = rng.standard_normal(64) * 0.3 + (0.5 if is_right else -0.5)
        hidden = [rng.standard_normal((tokens, 64)) * (1 + depth / 4) + drift * depth for depth in range(8)]
        writer.append(
            {
                "question_id": f"q{k}",
                "hidden_states": [h.astype("f2") for h in hidden],
                "attentions": attention,
                "tokens": rng.integers(0, 1000, tokens),
            },
            score=float(np.clip(rng.normal(0.75 if is_right else 0.25, 0.15), 0, 1)),
        )
store = tracestore.open("store.zarr")

# --8<-- [start:lengths]
table = store.to_pandas()
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
left.hist(table.num_tokens, bins=24)
left.set(xlabel="tokens", ylabel="traces")
right.hist([table.score[store.targets() == y] for y in (0, 1)], bins=20, stacked=True, label=["right", "hallucinated"])
right.set(xlabel="score")
right.legend()
figure.savefig("lengths.png")
# --8<-- [end:lengths]

# --8<-- [start:norms]
norms = np.array([np.linalg.norm(trace.last_token.astype("f4"), axis=1) for trace in store])  # (N, L)
figure, axis = plt.subplots(figsize=(6, 3.4), layout="constrained")
for y, name in ((0, "right"), (1, "hallucinated")):
    of_class = norms[store.targets() == y]
    axis.plot(of_class.mean(0), marker="o", label=name)
    axis.fill_between(range(store.num_layers), *np.quantile(of_class, [0.1, 0.9], axis=0), alpha=0.2)
axis.set(xlabel="layer", ylabel="norm of the last token's state")
axis.legend()
figure.savefig("norms.png")
# --8<-- [end:norms]

# --8<-- [start:projection]
points = PCA(2).fit_transform(store.features(layer=-1).astype("f4"))
figure, axis = plt.subplots(figsize=(5, 4), layout="constrained")
drawn = axis.scatter(*points.T, c=store.scores, cmap="RdYlGn", s=18)
figure.colorbar(drawn, label="score")
figure.savefig("projection.png")
# --8<-- [end:projection]

# --8<-- [start:edges]
thresholds = np.geomspace(1e-4, 0.5, 40)
figure, axis = plt.subplots(figsize=(6, 3.4), layout="constrained")
for layer in range(0, store.num_layers, 2):
    values = np.concatenate([trace.attention_layer(layer)[np.tril_indices(trace.num_tokens)] for trace in store])
    axis.plot(thresholds, [(values > t).mean() for t in thresholds], label=f"layer {layer}")
axis.set(xscale="log", xlabel="attention threshold", ylabel="share of causal pairs")
axis.legend()
figure.savefig("edges.png")
# --8<-- [end:edges]

# --8<-- [start:orders]
figure, axes = plt.subplots(1, 4, figsize=(11, 3), sharey=True, layout="constrained")
for axis, mode in zip(axes, ("none", "buffer", "block", "global"), strict=True):
    order = EpochOrder(2000, 0, 0, mode, 200, 200).ids_at(np.arange(2000))
    axis.plot(order, ".", markersize=1.5)
    axis.set(title=mode, xlabel="position in the epoch")
axes[0].set_ylabel("index in the store")
figure.savefig("orders.png")
# --8<-- [end:orders]
