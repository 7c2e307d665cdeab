"""Copy a store to Hugging Face datasets and back."""

import tracestore
from tracestore.bridges.huggingface import from_datasets, to_datasets

with tracestore.open("store.zarr") as store:
    rows = to_datasets(store, arrays=("last_token", "hidden_states", "attention"))
print(rows[0]["question_id"], len(rows))

fields = rows.select_columns(["question_id", "hidden_states", "tokens", "score"])
print(from_datasets(fields, "from_datasets.zarr", attention="none"), "traces")
