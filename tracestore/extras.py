"""The libraries of each extra, and the error that names the extra of a missing one."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from tracestore.errors import MissingExtraError

_TRAIN = ("torch", "torch_geometric", "matplotlib", "psutil")
# Modules by extra. Of several extras that install a module the first is named, unless the caller knows better.
EXTRAS: dict[str, tuple[str, ...]] = {
    "train": _TRAIN,
    "extract": ("torch", "transformers", "gguf", "accelerate"),
    "remote": ("obstore",),
    "serve": ("bokeh", "sklearn"),
    "dask": ("distributed",),
    "tensorboard": ("tensorboard",),
    "completion": ("shtab",),
    "bridges": (*_TRAIN, "pandas", "lightning", "datasets", "torchdata"),
}
# Where the package has another name than its module.
PACKAGES = {"sklearn": "scikit-learn", "torch_geometric": "torch-geometric"}


@contextmanager
def needs(extra: str | None = None) -> Iterator[None]:
    """Raise MissingExtraError in place of a ModuleNotFoundError for a library of an extra.

    `extra` is the extra to name where several install the library.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        found = [name for name, modules in EXTRAS.items() if module in modules]
        if not found:
            raise
        raise _missing(module, extra if extra in found else found[0]) from None


def require(extra: str) -> None:
    """Raise MissingExtraError unless every library of `extra` is installed. Imports none of them."""
    for module in EXTRAS[extra]:
        try:
            is_there = importlib.util.find_spec(module) is not None
        except (ModuleNotFoundError, ValueError):  # ValueError: sys.modules has None or a stub for it
            is_there = False
        if not is_there:
            raise _missing(module, extra)


def _missing(module: str, extra: str | None) -> MissingExtraError:
    package = PACKAGES.get(module, module)
    return MissingExtraError(f"{package} is not installed; run: pip install 'tracestore[{extra}]'", name=module)
