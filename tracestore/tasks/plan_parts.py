"""The layouts of a plan with their files, as JSON for other processes, and what tells these files from changed ones."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tracestore.errors import InvalidInputError, error_from_json, error_to_json
from tracestore.ingest.builtin.library import builtins
from tracestore.ingest.builtin.parts import Part, exported_sources, preprocessed_file, unknown_file
from tracestore.ingest.exports import EXPORT_FILE, STORE_FILE
from tracestore.ingest.layout.language import parse_layout
from tracestore.ingest.packing import identify
from tracestore.ingest.sources import SourceFile, SourceIdentity, fingerprint


def part_to_json(part: Part) -> dict[str, Any]:
    """Return a part for other processes, with absolute paths. Mappings are lists of pairs: their order counts."""
    builtin, layout = part.builtin, part.layout
    return {
        "builtin": None
        if builtin is None
        else [builtin.name, *map(_pairs, (builtin.values, builtin.lines, builtin.settings))],
        "layout": layout.to_toml() if layout is not None and builtin is None else None,
        "files": [[name, str(path.absolute())] for name, path in part.files.items()],
        "owned": [str(path.absolute()) for path in part.owned],
        "has_scores_file": part.has_scores_file,
        "others": [[name, str(source.path.absolute()), _error_of(source)] for name, source in part.others.items()],
    }


def _pairs(found: Mapping[str, Any]) -> list[Any]:
    return list(found.items())


def _error_of(source: SourceFile) -> dict[str, Any] | None:
    error = None if source.described is None else source.described.error
    return None if error is None else error_to_json(error)


def part_from_json(found: Mapping[str, Any]) -> Part:
    """Return the part that part_to_json() has described."""
    files, owned = {name: Path(path) for name, path in found["files"]}, tuple(map(Path, found["owned"]))
    if found["builtin"] is not None:
        name, *given = found["builtin"]
        values, lines, settings = map(dict, given)
        tool = next(builtin for builtin in builtins() if builtin.name == name)
        builtin = replace(tool, values=values, lines=lines, settings=settings)
        return Part(builtin.layout, files, owned, builtin=builtin, has_scores_file=found["has_scores_file"])
    if found["layout"] is not None:
        layout = parse_layout(tomllib.loads(found["layout"]), "layout of the plan")
        return Part(layout, files, owned, has_scores_file=found["has_scores_file"])
    others = {name: Path(path) for name, path, _ in found["others"]}
    sources, _ = exported_sources(others)
    for name, path, error in found["others"]:
        described = preprocessed_file(Path(path)) if error is None else unknown_file(error_from_json(error))
        sources.setdefault(name, SourceFile(Path(path), name, described=described))
    return Part(None, {}, others={name: sources[name] for name in others})


def fingerprints_of(files: Iterable[Path]) -> list[Any]:
    """Return the absolute paths of files, with what differs once one is written to."""
    return [[str(path.absolute()), list(fingerprint(path))] for path in files]


def facts_of_exports(sources: Sequence[SourceFile]) -> list[Path]:
    """Return the files that state the facts of the exports among the sources."""
    folders = dict.fromkeys(s.export.facts.folder for s in sources if s.export is not None)
    return [folder / name for folder in folders for name in (EXPORT_FILE, STORE_FILE)]


def identity_of(source: SourceFile) -> SourceIdentity:
    """Return the identity of a source; an empty one if it cannot be read, so that its task refuses it."""
    try:
        return identify(source)
    except InvalidInputError:
        return SourceIdentity(0, "", 0)
