"""Compare batches with those of another loader."""

import numpy as np
import torch


def fields_of(batch):
    """Return every field of a batch, with tensors as bytes; without the number of nodes, which PyG's collate adds."""
    names = getattr(batch, "__dataclass_fields__", None) or batch.to_dict().keys() - {"num_nodes"}
    values = {name: getattr(batch, name) for name in names if not name.startswith("_")}
    return {
        name: (v.dtype, tuple(v.shape), v.contiguous().view(torch.uint8).numpy().tobytes())
        if isinstance(v, torch.Tensor) and v.ndim
        else v.tobytes()
        if isinstance(v, np.ndarray)
        else v
        for name, v in values.items()
    }


def assert_same_batches(found, expected):
    """Require batches of the same types and fields, at least one."""
    count = 0
    for a, b in zip(found, expected, strict=True):
        assert type(a) is type(b) and fields_of(a) == fields_of(b)
        count += 1
    assert count
