"""The libraries of each extra, and the error for a missing library."""

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

from tracestore.errors import MissingExtraError

if TYPE_CHECKING:
    import numpy as np

_TRAIN = ("torch", "torch_geometric", "bokeh", "psutil", "sklearn")
# Modules of each extra. If several extras contain a module, errors name the first one unless the
# caller names another.
EXTRAS: dict[str, tuple[str, ...]] = {
    "train": _TRAIN,
    "extract": ("torch", "transformers", "gguf", "accelerate"),
    "inputs": ("h5py", "pyarrow", "backports.zstd"),
    "remote": ("obstore",),
    "hub": ("huggingface_hub", "pyarrow"),
    "serve": ("bokeh", "tornado"),
    "pictures": ("matplotlib",),
    "dask": ("distributed",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "completion": ("shtab",),
    "bridges": (*_TRAIN, "pandas", "lightning", "datasets", "torchdata"),
}
# Modules whose package has another name.
PACKAGES = {
    "huggingface_hub": "huggingface-hub",
    "mlflow": "mlflow-skinny",
    "sklearn": "scikit-learn",
    "torch_geometric": "torch-geometric",
}


@contextmanager
def needs(extra: str | None = None) -> Iterator[None]:
    """Convert a ModuleNotFoundError for a library of an extra into MissingExtraError.

    Parameters
    ----------
    extra : str, optional
        The extra to name if several extras contain the library. Default: the first in EXTRAS.

    Raises
    ------
    MissingExtraError
        A library of an extra is not installed. Other missing modules propagate unchanged.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        found = [name for name, modules in EXTRAS.items() if module in modules]
        if not found:
            raise
        raise _missing(module, extra if extra in found else found[0]) from None


@cache
def bfloat16_dtype() -> "np.dtype | None":
    """Return the dtype that the package ml_dtypes has for bfloat16; None without the package."""
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        return None
    import numpy as np

    dtype: np.dtype = np.dtype(bfloat16)
    return dtype


def import_on_use(package: str, modules: Mapping[str, Sequence[str]], extra: str | None = None) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package that imports some names when they are first used.

    Parameters
    ----------
    package : str
        The full name of the package.
    modules : mapping of str to sequence of str
        The names by their modules; "name as other" has another name in the package.
    extra : str, optional
        See `needs`.
    """

    def import_name(name: str) -> Any:
        for module, entries in modules.items():
            for entry in entries:
                attribute, _, other = entry.partition(" as ")
                if name == (other or attribute):
                    with needs(extra):
                        value = getattr(importlib.import_module(module), attribute)
                    setattr(sys.modules[package], name, value)
                    return value
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return import_name


def require(extra: str) -> None:
    """Raise MissingExtraError unless every library of `extra` is installed. Import none of them."""
    for module in EXTRAS[extra]:
        require_module(module, extra)


def require_module(module: str, extra: str) -> ModuleSpec:
    """Return where a library of `extra` is, without importing it; raise MissingExtraError unless it is installed."""
    try:
        spec = importlib.util.find_spec(module)
    except (ModuleNotFoundError, ValueError):  # ValueError: sys.modules holds None or a stub for it
        spec = None
    if spec is None:
        raise _missing(module, extra)
    return spec


def _missing(module: str, extra: str | None) -> MissingExtraError:
    package = PACKAGES.get(module, module)
    return MissingExtraError(f"{package} is not installed; run: pip install 'tracestore[{extra}]'", name=module)
