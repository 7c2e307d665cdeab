"""The data set card of a store: README.md with metadata in YAML."""

import html
from collections.abc import Sequence
from typing import Any

from tracestore.errors import UsageError, escape_unprintable
from tracestore.extras import needs
from tracestore.store.read.store import TraceStore
from tracestore.words import format_size, plural

with needs("hub"):
    from huggingface_hub import DatasetCard

TAGS = ("tracestore", "hidden-states", "interpretability")
# The part of the card that a push replaces.
_BEGIN, _END = "<!-- tracestore: begin -->", "<!-- tracestore: end -->"
_SIZES = (("n<1K", 10**3), ("1K<n<10K", 10**4), ("10K<n<100K", 10**5), ("100K<n<1M", 10**6), ("1M<n<10M", 10**7))
_CARD = """# {title}

Traces of a language model that answers questions: the hidden states and the attention of its layers, in a \
[tracestore](https://github.com/tracestore/tracestore) store (Zarr v3).

## Contents

{contents}

{scores}## Provenance

{provenance}

## How to open

```sh
pip install 'tracestore[hub]' && tracestore pull {repo_id} {name}.zarr
```

```python
import tracestore

store = tracestore.open("{name}.zarr")
print(len(store), store[0].hidden_states.shape)
```"""
_MEANINGS = {"correct": "correct answer", "hallucination": "hallucinated answer"}


def make_card(store: TraceStore, repo_id: str, license: str | None, old: str = "") -> str:
    """Return the card of a store.

    Parameters
    ----------
    store : TraceStore
        The store.
    repo_id : str
        The data set.
    license : str or None
        Identifier of the license; None keeps that of the old card.
    old : str
        The card to update: its text and metadata stay, except what tracestore writes.

    Raises
    ------
    UsageError
        The metadata of the old card is not valid YAML, or not that of a card.
    """
    try:
        card = DatasetCard(old or "---\n---\n", ignore_metadata_errors=True)
        tags = card.data.get("tags") or []
        if not isinstance(tags, list):
            raise ValueError(f"tags: found {tags!r:.40}, expected a list")
    except Exception as error:  # of YAML, or of the library's own checks
        reason = escape_unprintable(str(error), 100)
        raise UsageError(f"{repo_id}: README.md: the metadata is not valid: {reason}; correct it on the Hub") from None
    data = card.data
    if license is not None:
        data["license"] = license
    data["tags"] = [*tags, *(tag for tag in TAGS if tag not in tags)]
    count = len(store)
    data["size_categories"] = [next((name for name, limit in _SIZES if count < limit), "10M<n<100M")]
    data["viewer"] = False  # which would take the metadata of arrays for a table
    generated = "\n".join([_BEGIN, _generated(store, repo_id), _END])
    before, begin, rest = card.text.partition(_BEGIN)
    after = rest.partition(_END)[2] if begin else ""
    card.text = "\n".join(part for part in (before.strip(), generated, after.strip()) if part) + "\n"
    return str(card)


def _generated(store: TraceStore, repo_id: str) -> str:
    info, name = store.info(), repo_id.rpartition("/")[2]
    heads = f"{store.attention_mode} ({plural(store.num_heads, 'head')})" if store.num_heads else store.attention_mode
    optional = {n for k in range(info["num_segments"]) for n in store.internals.segment(k).optional_names}
    contents = {
        "traces": f"{len(store):,}",
        "tokens": f"{info['num_tokens']:,}",
        "layers": info["num_layers"],
        "hidden size": info["hidden_dim"],
        "dtype of hidden states": info["hidden_dtype"],
        "attention": heads if info["attention_layout"] else "none",
        "fields": ", ".join([*info["fields"], *sorted(optional)]),
        "scored, labeled": f"{info['num_scored']:,}, {info['num_labeled']:,}",
        "lens": "final norm and unembedding matrix" if info["lens"] else None,
        "size": f"{format_size(info['bytes'])} in {plural(info['num_segments'], 'segment')}",
        "generation": info["generation"],
    }
    scores = [
        (score, _MEANINGS[field.direction], field.source, field.version, "yes" if score == info["score"] else "")
        for score, field in sorted(store.score_fields.items())
    ]
    score_header = ("name", "a high value marks a", "source", "version", "default")
    origins = [
        _table(("", ""), [(key, value) for key, value in provenance.to_json().items() if value is not None])
        for provenance in store.provenance
    ]
    return _CARD.format(
        title=_escape(name),
        contents=_table(("", ""), [(key, value) for key, value in contents.items() if value not in (None, "")]),
        scores=f"## Scores\n\n{_table(score_header, scores)}\n\n" if scores else "",
        provenance="\n\n".join(origins) or "Unknown.",
        repo_id=repo_id,
        name=name,
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    cells = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(_escape(cell) for cell in row)} |" for row in cells)


def _escape(value: Any) -> str:
    """Return a value as text in which Markdown and HTML have no effect."""
    text = html.escape(escape_unprintable("" if value is None else str(value), 300), quote=False)
    return "".join(f"\\{c}" if c in "\\`*_[]|!" else c for c in text)
