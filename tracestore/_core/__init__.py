"""Thin Cython bindings of csrc/: no policy, no file names, no numpy objects kept.

One shared library, `_native`, contains the C library and the initialization functions of all Cython
modules. The process thus has one SIGBUS handler, and each file of csrc/ is compiled once. The modules
are compiled separately, which takes less time than one large module and lets each declare its bounds
checks and its compatibility with free-threaded Python.
"""

import sys
from importlib import import_module
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader

try:
    _LIBRARY = import_module("tracestore._core._native").__file__
except ModuleNotFoundError:
    raise ImportError(
        f"{__file__}: source code that is not compiled, of which Python has imported the package because it runs in "
        "this folder; run it in another one, or `make install`"
    ) from None
# `mapping` comes first: other modules import from it.
for _name in ("mapping", "blocks", "gather", "gine", "index", "kernels", "pickle", "shuffle"):
    _loader = ExtensionFileLoader(f"{__name__}.{_name}", str(_LIBRARY))
    _spec = spec_from_loader(_loader.name, _loader)
    assert _spec is not None
    globals()[_name] = sys.modules[_spec.name] = module_from_spec(_spec)
    _loader.exec_module(globals()[_name])
