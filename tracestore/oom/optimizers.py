"""Adam, the optimizer of every training, AdamW and SGD: subclasses of torch's that do not import torch._dynamo."""

import inspect
from typing import Any

import torch


def _without_dynamo(kind: type[torch.optim.Optimizer]) -> Any:
    """Return a subclass whose methods do not import torch._dynamo, which takes seconds.

    torch wraps these methods so that torch.compile skips them. Nothing is compiled here.
    """
    names = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    step = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (kind,), {**methods, "step": step, "__doc__": f"torch.optim.{kind.__name__}."})


Adam = _without_dynamo(torch.optim.Adam)
AdamW = _without_dynamo(torch.optim.AdamW)
SGD = _without_dynamo(torch.optim.SGD)
