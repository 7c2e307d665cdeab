"""A page with every element and every plot, and malicious texts in all of them."""

import numpy as np

from tracestore.pages.document import Section, document
from tracestore.pages.elements import card, cards, command, details, element, join, number, paragraph, table, tokens
from tracestore.pages.plots import Series, heat_map, histogram, plot

MALICIOUS = (
    "</script><script>window.hacked=1</script>",
    '<img src=x onerror="window.hacked=2">',
    "$$\\href{javascript:window.hacked=3}{x}$$ \\(x\\) \\[y\\]",
    "\u202etxt.exe @{window.hacked=4} {{7*7}} \ud800",  # codespell:ignore etxt
    "\"><svg onload='window.hacked=5'>",
)


def example_plots(name=MALICIOUS[0]):
    """Return one plot of each kind; `name` is in every text of them."""
    rng = np.random.default_rng(0)
    epochs = np.arange(1, 8)
    loss, two = np.exp(-epochs / 5), [0.6, 0.8]
    probabilities = np.linspace(0, 1, 21)
    return [
        plot(
            f"Loss {name}",
            [
                Series("train", epochs, loss, has_marks=True),
                Series(name, epochs, loss + 0.1, low=loss, high=loss + 0.2, is_dashed=True),
            ],
            x_label=f"epoch {name}",
            y_label="loss",
            is_integer_x=True,
            references=[(f"probe {name}", "y", 0.5)],
            note=name,
        ),
        plot(
            "ROC",
            [Series("gnn", [0, 0.2, 1], [0, 0.7, 1], "step")],
            x_label="false positive rate",
            y_label="true positive rate",
            x_range=(0, 1),
            y_range=(0, 1),
            is_square=True,
            references=[("chance", "diagonal", 0)],
        ),
        plot(
            "By group",
            [Series("gnn", [0, 1], two, "points", [0.5, 0.7], [0.7, 0.9], texts=[name, name])],
            x_label="group",
            y_label="AUROC",
            x_names=[name, "b"],
            is_horizontal=True,
        ),
        plot(
            "Bars",
            [Series("gnn", [0, 1], two, "bars", [0.5, 0.7], [0.7, 0.9]), Series("lstm", [0, 1], two, "bars")],
            x_label="model",
            y_label="AUROC",
            x_names=["a", name],
        ),
        histogram(
            "Scores",
            probabilities,
            {"correct": rng.integers(0, 30, 20), "hallucinated": rng.integers(0, 30, 20)},
            x_label="probability",
            colors={"correct": "correct", "hallucinated": "hallucinated"},
            references=[("threshold", "x", 0.5)],
        ),
        heat_map(
            "Attention",
            np.where(rng.random((12, 20)) < 0.05, np.nan, rng.normal(size=(12, 20))),
            x_label="token",
            y_label="layer",
            value_label=f"attention {name}",
            x_names=[name] * 20,
        ),
        heat_map("Norms", rng.random((12, 20)), x_label="token", y_label="layer", value_label="norm"),
    ]


def example_page(**options):
    """Return the page."""
    rows = [[text, 0.5 + k / 100, number(k / 7), k * 1_000, text] for k, text in enumerate(MALICIOUS * 3)]
    rows.append(["without a value", None, number(None), 0, ""])
    trace = card(
        MALICIOUS[0],
        *map(paragraph, MALICIOUS),
        tokens([*MALICIOUS, "\n"], [-0.1, -2, -5, -1, -3, float("nan")], label=MALICIOUS[0], low=0, high=-6),
        command("tracestore view store.zarr 3"),
        details(MALICIOUS[1], MALICIOUS[2]),
        badge="hallucinated",
        kind="hallucinated",
    )
    sections = [
        Section(
            "Result",
            join([
                paragraph("gnn is better than lstm.", kind="verdict"),
                table(["model", "AUROC", "p", "traces", MALICIOUS[1]], rows, caption="Models"),
            ]),
        ),
        Section("Plots", element("div", *example_plots(), class_="plots"), note=MALICIOUS[1]),
        Section("Mistakes " + MALICIOUS[1], cards([trace, trace, trace])),
    ]  # fmt: skip
    return document(f"Example {MALICIOUS[0]}", facts={"store": "s.zarr", "traces": 600, "path": MALICIOUS[3]},
                    sections=sections, **options)  # fmt: skip
