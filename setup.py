"""The extension modules over csrc/; everything else is in pyproject.toml."""

import sys

from Cython.Build import cythonize
from setuptools import Extension, setup

# -ffp-contract=off: products and sums are fused where the source says so, so that every compiler
# makes the same bits.
CFLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"]
# glibc before 2.34 has dlsym and threads in libraries of their own; macOS has no such libraries.
LINK_FLAGS = ["-pthread", "-ldl", "-lm"] if sys.platform == "linux" else []
# In a free-threaded interpreter kernels, gine and arrays declare themselves compatible in their first
# line: they work on their arguments alone. The others do not, and Python then turns the
# GIL on: it is the lock of the block pools, of the list of maps, of jobs, shuffle buffers and
# readers, or nobody has checked that they need none.
MODULES = {
    "kernels": ["crc32c", "half", "attention", "pack", "guard", "simd"],
    "gather": ["gather", "attention", "half", "parallel", "stream", "crew", "map", "crc32c", "guard", "simd"],
    "blocks": ["block"],
    "mapping": ["map", "crc32c", "guard", "simd"],
    "index": ["index", "map", "crc32c", "guard", "simd"],
    "shuffle": ["shuffle"],
    "pickle": ["guard"],
    "arrays": [],
    "spans": ["spans", "team", "stream"],
    "gine": ["gine", "half", "parallel", "simd"],
}
# Included as text: a change rebuilds what includes them.
INCLUDED = ["csrc/gine_kernels.h", "csrc/gine_loops.h", "csrc/gather_kernels.h", "csrc/error.h"]
INCLUDED += ["csrc/platform.h", "csrc/simd.h"]
INCLUDED += ["tracestore/_core/view.pxi", "tracestore/_core/guard.pxi", "tracestore/_core/mapping.pxd", "csrc/map.h"]


def extension(name: str, units: list[str]) -> Extension:
    sources = [f"tracestore/_core/{name}.pyx"] + [f"csrc/{unit}.c" for unit in [*units, "error"]]
    return Extension(
        f"tracestore._core.{name}",
        sources=sources,
        include_dirs=["csrc"],
        depends=[f"csrc/{unit}.h" for unit in units] + INCLUDED,
        extra_compile_args=CFLAGS,
        extra_link_args=LINK_FLAGS,
    )


setup(
    ext_modules=cythonize(
        [extension(name, units) for name, units in MODULES.items()],
        build_dir="build/cython",
        compiler_directives={"language_level": 3, "embedsignature": True},
    )
)
