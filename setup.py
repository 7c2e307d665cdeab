"""Build the extension module over csrc/; all other settings are in pyproject.toml."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path
from typing import Any

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

# -ffp-contract=off: compilers fuse a product and a sum only where the source does, so that all of them
# give the same bits.
CFLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"]
# glibc before 2.34 has separate libraries for threads and mathematics; macOS has neither.
LINK_FLAGS = ["-pthread", "-lm"] if sys.platform == "linux" else []
HEADERS = glob("csrc/*.h")
# One shared library with all Cython modules and the C library; tracestore/_core/__init__.py loads the modules
# from it. The module of its own name holds the code that Cython otherwise generates into each module.
NATIVE = "tracestore._core._native"


class BuildExtension(build_ext):
    """Compile the files of the extension in parallel, and only those that changed."""

    def finalize_options(self) -> None:
        """Use all processors unless the command line sets a number of jobs."""
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def build_extensions(self) -> None:
        """Build with a compiler that accepts several files at once."""
        compile_files = self.compiler.compile

        def compile_in_parallel(sources: list[str], output_dir: str, **options: Any) -> list[str]:
            def compile_file(source: str) -> str:
                (target,) = self.compiler.object_filenames([source], output_dir=output_dir)
                if self.force or newer_group([source, *HEADERS], target):
                    compile_files([source], output_dir, **options)
                return target

            with ThreadPoolExecutor(self.parallel) as pool:
                return list(pool.map(compile_file, sources))

        self.compiler.compile = compile_in_parallel
        super().build_extensions()


modules = cythonize(
    [
        Extension(NATIVE, ["tracestore/_core/_native.c"]),
        *(Extension(f"tracestore._core.{Path(path).stem}", [path]) for path in glob("tracestore/_core/*.pyx")),
    ],
    build_dir="build/cython",
    compiler_directives={"language_level": 3, "embedsignature": True},
    nthreads=os.cpu_count() or 1,
    shared_utility_qualified_name=NATIVE,
)
setup(
    cmdclass={"build_ext": BuildExtension},
    ext_modules=[
        Extension(
            NATIVE,
            sources=[*(source for module in modules for source in module.sources), *glob("csrc/*.c")],
            include_dirs=["csrc"],
            depends=HEADERS,
            extra_compile_args=CFLAGS,
            extra_link_args=LINK_FLAGS,
        )
    ],
)
