"""The layouts that a store keeps, and which of them reads each file of states."""

import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from tracestore.errors import CorruptStoreError, InvalidInputError
from tracestore.ingest.builtin.claiming import claim
from tracestore.ingest.builtin.library import builtins_near
from tracestore.ingest.builtin.parts import exported_sources
from tracestore.ingest.execute.claims import groups_of_states, is_other, named_files
from tracestore.ingest.layout.language import Layout, parse_layout
from tracestore.ingest.layout.places import plan_of
from tracestore.ingest.sources import SourceFile, short_digest, source_fingerprint
from tracestore.store.format.entries import Fingerprint
from tracestore.store.io.files import LocalFiles, ReadableFiles, parse_location
from tracestore.store.read.generation import open_generation

_BUILTIN = ""  # stands for the digest of a layout that is built in
# By the path of a source and the digest of its files, the layout that read them last.
Readers = dict[str, dict[str, str]]


@dataclass(frozen=True)
class KeptLayouts:
    """The layouts that a store keeps.

    Parameters
    ----------
    layouts : Mapping
        By their digests, the newest first; without those of which other layouts have read all sources since.
    readers : Mapping
        The digest of the layout that has read the sources of a path last, by the digests of their files.
    """

    layouts: Mapping[str, Layout]
    readers: Readers

    @classmethod
    def load(cls, store: str) -> "KeptLayouts":
        """Return the layouts of a store, also of a damaged one, or one that does not exist."""
        location = parse_location(store)
        if isinstance(location, Path):
            files: ReadableFiles = LocalFiles(location)
        else:
            from tracestore.store.write.plan_files import open_plan_files  # its imports take as long as a small file

            files = open_plan_files(location).files  # of a store that need not exist
        for number in files.generations():
            with suppress(FileNotFoundError, CorruptStoreError):
                texts = reversed(files.load_manifest(number).attributes.layouts)
                layouts = {
                    short_digest(t.encode()): parse_layout(tomllib.loads(t), "layout of the store") for t in texts
                }
                readers, replaced = _readers(files, number, layouts) if layouts else ({}, set())
                return cls({digest: own for digest, own in layouts.items() if digest not in replaced}, readers)
        return cls({}, {})

    def divide(self, files: Mapping[str, Path]) -> Iterator[tuple[Layout, dict[str, Path]]]:
        """Yield the layouts that read some of the files, with these; tables may belong to several.

        Raises
        ------
        InvalidInputError
            If no source of the store shows by which of several layouts a file is read.
        """
        division = _Division(self, files)
        owners = division.owners()
        for digest, names in division.named.items():
            if digest in owners.values():
                others = {name for name in names.sources if owners[name] != digest}
                own = {name: path for name, path in files.items() if name in names.all and name not in others}
                yield self.layouts[digest], own


def _readers(files: ReadableFiles, number: int, kept: Collection[str]) -> tuple[Readers, set[str]]:
    """Return what has read the sources of a generation, and the layouts that have been replaced for all of theirs."""
    readers: Readers = defaultdict(dict)
    found: set[str] = set()
    with suppress(FileNotFoundError, CorruptStoreError), closing(open_generation(files, number)) as generation:
        unfinished = set(generation.manifest.attributes.open_numbers())
        for k, (path, text) in enumerate(generation.index.fingerprints()):
            fingerprint = Fingerprint.parse(text)
            was_refused = k in unfinished and fingerprint.layout not in (_BUILTIN, *kept)
            if text and not was_refused:  # without a text it is forgotten, or of a program
                readers[path][fingerprint.files] = fingerprint.layout
                found.add(fingerprint.layout)
    return readers, found.difference(*(of_path.values() for of_path in readers.values()))


class _Names:
    """The files that a layout names: all, those of states with the names of their sources, and tables; all states are there."""

    def __init__(self, layout: Layout, files: Mapping[str, Path]) -> None:
        plan = plan_of(layout)
        claimed, of_states = named_files(plan, files), {place.address.files.text for place in plan.states}
        names = {text: {file.name for file in found} for text, found in claimed.items()}
        groups = groups_of_states(plan, claimed).values()
        self.sources = {f.name: group.name for group in groups for found in group.files.values() for f in found}
        self.all = set().union(*names.values())
        self.tables = set().union(*(names[text] for text in names.keys() - of_states - plan.ignored_files))
        self.is_whole = all(names[text] for text in of_states)


class _Division:
    """The division of files among the layouts of a store."""

    def __init__(self, kept: KeptLayouts, files: Mapping[str, Path]) -> None:
        self._kept, self._files = kept, files
        self.named = {digest: _Names(layout, files) for digest, layout in kept.layouts.items()}

    def owners(self) -> dict[str, str]:
        """Return the digest of the layout that reads each file of states."""
        states = dict.fromkeys(name for names in self.named.values() for name in names.sources)
        owners = {name: owner for name in states if (owner := self._reader(name)) is not None}
        active, tables = {*owners.values()}, set().union(*(names.tables for names in self.named.values()))
        # States come first: they show which layouts read tables here.
        for name in sorted(states.keys() - owners.keys(), key=lambda name: (name in tables, name)):
            of_table = next((d for d in active - {_BUILTIN} if name in self.named[d].tables), None)
            owners[name] = self._new_reader(name, active) if of_table is None else of_table
            active.add(owners[name])
        return owners

    def _reader(self, name: str) -> str | None:
        """Return the layout that has read a source of this name, None if there is none."""
        sources = {name, *(names.sources[name] for names in self.named.values() if name in names.sources)}
        by_files = [self._kept.readers[source] for source in sources if source in self._kept.readers]
        found = {digest for of_path in by_files for digest in of_path.values()}
        if len(found) > 1 and len(sources) == 1:  # files of several folders have this name
            _, fingerprint = source_fingerprint(SourceFile(self._files[name], name))
            found &= {by_files[0].get(Fingerprint.parse(fingerprint).files, "changed")}
        owner = next(iter(found), None)
        is_kept = owner in self.named and name in self.named[owner].sources
        if (len(found) == 1 and (owner == _BUILTIN or is_kept)) or not by_files:
            return owner
        raise self._undecided(
            name, "several layouts, or one that the store does not keep, have read files of this name"
        )

    def _new_reader(self, name: str, active: Collection[str]) -> str:
        """Return the layout that reads a file that the store does not have; it may be built in."""
        fitting = [digest for digest, names in self.named.items() if names.is_whole and name in names.sources]
        if not fitting:
            return _BUILTIN
        if len({replace(self._kept.layouts[digest], ignore=()).to_toml() for digest in fitting}) > 1:
            raise self._undecided(name, "layouts of this store that differ fit it")
        if name in self._builtin:
            way = "convert it to another store for that, and tracestore merge joins them"
            raise self._undecided(name, f"a layout that is built in fits it, too: {way}")
        return next((digest for digest in fitting if digest in active), fitting[0])

    @cached_property
    def _builtin(self) -> set[str]:
        """The files that exports or built-in layouts describe, if the store has sources of those."""
        if not any(_BUILTIN in of_path.values() for of_path in self._kept.readers.values()):
            return set()
        sources, _ = exported_sources(self._files)
        left = {n: path for n, path in self._files.items() if not (n in sources or is_other(n))}
        return {*sources, *(name for own in claim(left, builtins_near(left)).owned.values() for name in own)}

    def _undecided(self, name: str, why: str) -> InvalidInputError:
        """Return the error of a file that several layouts may read."""
        fitting = [digest for digest, names in self.named.items() if name in names.sources]
        read = {digest: path for path, of_path in self._kept.readers.items() for digest in of_path.values()}
        lines = (f"{' '.join(self._kept.layouts[d].flags())} as for {read.get(d, 'no file yet')}" for d in fitting)
        return InvalidInputError(f"{why}; state its own layout: {', or '.join(lines)}", source=name)
