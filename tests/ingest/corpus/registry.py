"""The kinds of input folders: their names, functions and needs."""

import functools
import importlib
import importlib.util
import inspect
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.ingest.corpus.samples import make_samples, write_rows

MODULES = ("pickles", "records", "torch_files", "hooks", "outputs", "generated", "renamed", "scores", "arrays")
MODULES += ("tensors", "hdf5", "tables", "parts.joined", "parts.objects", "parts.answers")
MODULES += (
    "containers.experiments",
    "containers.notebooks",
    "containers.hierarchies",
    "containers.long_tables",
    "containers.services",
    "containers.spellings",
)
# The layouts of kinds that a layout describes, by their names.
LAYOUTS = tomllib.loads((Path(__file__).parent / "layouts.toml").read_text())


@dataclass(frozen=True)
class Kind:
    """One kind of input folder.

    Attributes
    ----------
    name : str
        Name of the folder.
    write : callable
        Function of the folder that writes the files and returns the expected traces.
    needs : tuple of str
        Optional libraries that `write` imports.
    refused : bool
        True if the folder does not hold traces, or not enough of them: the command has to refuse it.

    A kind without one of LAYOUTS is read by a built-in layout, or refused.
    """

    name: str
    write: Callable[[Path], list[dict]]
    needs: tuple[str, ...] = ()
    refused: bool = False

    def missing(self):
        """Return the names of the libraries that are needed and not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


MAIN: dict[str, Kind] = {}
UNSEEN: dict[str, Kind] = {}
# Containers that no layout of the issue names: a refusal with a proposal is enough.
UNSEEN_MODULES = (
    "unusual_containers",
    "notebooks_and_repositories",
    "trainers_and_servers",
    "probing_papers",
    "published_code",
    "research_scripts",
    "hooks_and_sampled_answers",
)
OUTSIDE: dict[str, Kind] = {}
PARTS = {"main": MAIN, "unseen": UNSEEN, "outside": OUTSIDE}


def kind(*needs, refused=False, register=MAIN, expect=None, expect_last=None, rows=None, **options):
    """Register a function as a kind. Its name is the name of the folder, its docstring describes the files.

    A function with the parameter `samples` gets those of `make_samples` with the options. It returns or yields the
    expected traces, or `expect` or `expect_last` name the fields that are expected of each sample; see `Sample`. If
    `rows` is the name of a file, which holds a list of rows, the function returns the row of one sample, or yields
    pairs of a row and an expected trace.
    """

    def decorate(write):
        assert not any(write.__name__ in part for part in PARTS.values()), write.__name__
        assert write.__doc__, write.__name__

        parameters = inspect.signature(write).parameters
        is_row = rows is not None and not inspect.isgeneratorfunction(write)

        @functools.wraps(write)
        def write_folder(folder):
            samples = make_samples(**options) if is_row or "samples" in parameters else []
            given = {"folder": folder, "samples": samples}
            found = None if is_row else write(**{name: given[name] for name in parameters})
            if inspect.isgenerator(found):
                found = list(found)
            if rows is not None:
                pairs = [(write(sample), None) for sample in samples] if is_row else found
                write_rows(folder / rows, [row for row, _ in pairs])
                found = [trace for _, trace in pairs]
            if expect is not None:
                return [sample.expect(expect) for sample in samples]
            return found if expect_last is None else [sample.expect_last(expect_last) for sample in samples]

        register[write.__name__] = Kind(write.__name__, write_folder, needs, refused)
        return write

    return decorate


def load(part="all"):
    """Return the kinds of a part of the corpus ("main", "unseen", "outside" or "all") by name."""
    for name in MODULES:
        importlib.import_module(f"tests.ingest.corpus.kinds.{name}")
    importlib.import_module("tests.ingest.corpus.outside")
    for name in UNSEEN_MODULES:
        importlib.import_module(f"tests.ingest.corpus.unseen_sets.{name}")
    return MAIN | UNSEEN | OUTSIDE if part == "all" else PARTS[part]
