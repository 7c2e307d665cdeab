"""The extension modules over csrc/; everything else is in pyproject.toml."""

import copy
import os
import sys

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# -ffp-contract=off: products and sums are fused where the source says so, so that every compiler
# makes the same bits.
CFLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"]
# glibc before 2.34 has threads in a library of its own; macOS has no such libraries.
LINK_FLAGS = ["-pthread", "-lm"] if sys.platform == "linux" else []
# In a free-threaded interpreter kernels and gine declare themselves compatible in their first
# line: they work on their arguments alone. The others do not, and Python then turns the
# GIL on: it is the lock of the block pools, of the list of maps, of jobs, shuffle buffers and
# readers, or it has not been checked that they need none.
MODULES = {
    "kernels": ["crc32c", "float_convert", "attention", "pack", "sigbus_guard", "simd"],
    "gather": [
        "gather",
        "attention",
        "float_convert",
        "parallel",
        "stream",
        "thread_pool",
        "map",
        "crc32c",
        "sigbus_guard",
        "simd",
    ],
    "blocks": ["huge_alloc", "shared_memory"],
    "mapping": ["map", "crc32c", "sigbus_guard", "simd"],
    "index": ["index", "map", "crc32c", "sigbus_guard", "simd"],
    "shuffle": ["shuffle"],
    "pickle": ["sigbus_guard"],
    "gine": ["gine", "float_convert", "parallel", "simd"],
}
# Included as text: a change rebuilds what includes them.
INCLUDED = ["csrc/gine_kernels.h", "csrc/gine_loops.h", "csrc/gather_kernels.h", "csrc/error.h"]
INCLUDED += ["csrc/platform.h", "csrc/simd.h"]
INCLUDED += [
    "tracestore/_core/buffer_view.pxi",
    "tracestore/_core/sigbus_guard.pxi",
    "tracestore/_core/mapping.pxd",
    "csrc/map.h",
]


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


class BuildExtensions(build_ext):
    """Build extensions side by side, each in a folder of its own: they share units of csrc/."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def build_extension(self, ext: Extension) -> None:
        own = copy.copy(self)
        own.build_temp = os.path.join(self.build_temp, ext.name)
        super(BuildExtensions, own).build_extension(ext)


setup(
    cmdclass={"build_ext": BuildExtensions},
    ext_modules=cythonize(
        [extension(name, units) for name, units in MODULES.items()],
        build_dir="build/cython",
        compiler_directives={"language_level": 3, "embedsignature": True},
        nthreads=os.cpu_count() or 1,
    ),
)
