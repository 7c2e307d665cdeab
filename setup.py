"""Build the extension modules over csrc/; all other settings are in pyproject.toml."""

import copy
import os
import sys
from glob import glob

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# -ffp-contract=off: compilers fuse a product and a sum only where the source does, so that all of them
# give the same bits.
CFLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"]
# glibc before 2.34 has separate libraries for threads and mathematics; macOS has neither.
LINK_FLAGS = ["-pthread", "-lm"] if sys.platform == "linux" else []
# The C files that each extension module compiles. kernels and gine only access their arguments and
# declare that they do not need the GIL. The other modules do not, so that a free-threaded Python enables
# the GIL: it protects memory pools, the list of mappings, jobs, shuffle buffers and readers.
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
# A change of any of these files rebuilds every module.
INCLUDED = [*glob("csrc/*.h"), *glob("tracestore/_core/*.pxi"), *glob("tracestore/_core/*.pxd")]


def extension(name: str, units: list[str]) -> Extension:
    """Return an extension module and the C files that it compiles."""
    sources = [f"tracestore/_core/{name}.pyx"] + [f"csrc/{unit}.c" for unit in [*units, "error"]]
    return Extension(
        f"tracestore._core.{name}",
        sources=sources,
        include_dirs=["csrc"],
        depends=INCLUDED,
        extra_compile_args=CFLAGS,
        extra_link_args=LINK_FLAGS,
    )


class BuildExtensions(build_ext):
    """Build extensions in parallel, each in a separate folder because they compile the same files of csrc/."""

    def finalize_options(self) -> None:
        """Use all processors unless the command line sets a number of jobs."""
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def build_extension(self, ext: Extension) -> None:
        """Build one extension in its folder."""
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
