"""Triton kernels that run on CPU tensors, in Triton's interpreter."""

import importlib.util
import sys

import pytest


def interpreted(name, check):
    """Return a copy of a module whose kernels are interpreted; skip the test if `check(module)` shows that none run."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    found = importlib.util.find_spec(name)
    copy = f"interpreted_{name.replace('.', '_')}"
    spec = importlib.util.spec_from_file_location(copy, found.origin)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        # Triton reads the variable when a kernel is defined.
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setitem(sys.modules, copy, module)
        spec.loader.exec_module(module)
    try:
        check(module)
    except triton.runtime.errors.InterpreterError as error:
        # The interpreter calls int() on an array of one element, which numpy 2.4 refuses.
        if "0-dimensional" in str(error):
            pytest.skip("this Triton's interpreter needs an older numpy")
        raise
    return module
