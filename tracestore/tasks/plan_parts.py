"""The layouts of a plan with their files, as JSON for other processes."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tracestore.errors import UsageError, error_from_json, error_to_json
from tracestore.ingest.builtin.library import builtins
from tracestore.ingest.builtin.parts import Part, PreprocessedFile, UnknownFile, exported_sources
from tracestore.ingest.sources import SourceFile


def part_to_json(part: Part) -> dict[str, Any]:
    """Return a part for other processes, with absolute paths.

    UsageError if a single process must read its sources, because they have something in common.
    """
    builtin = part.builtin
    if part.execution is not None and (builtin is None or not part.execution.is_direct):
        raise UsageError(f"{next(iter(part.files))}: one process reads files of a {part.origin}; leave out --plan")
    others = {
        name: [
            str(s.path.absolute()),
            error_to_json(s.described.error) if isinstance(s.described, UnknownFile) else None,
        ]
        for name, s in part.others.items()
    }
    given = builtin and [builtin.name, dict(builtin.values), dict(builtin.lines), dict(builtin.settings)]
    files = {name: str(path.absolute()) for name, path in part.files.items()}
    return {"builtin": given, "files": files, "has_scores_file": part.has_scores_file, "others": others}


def part_from_json(found: Mapping[str, Any]) -> Part:
    """Return the part that part_to_json() has described."""
    if found["builtin"] is not None:
        name, values, lines, settings = found["builtin"]
        tool = next(builtin for builtin in builtins() if builtin.name == name)
        builtin = replace(tool, values=values, lines=lines, settings=settings)
        files = {name: Path(path) for name, path in found["files"].items()}
        return Part(builtin.layout, files, builtin=builtin, has_scores_file=found["has_scores_file"])
    files = {name: Path(path) for name, (path, _) in found["others"].items()}
    sources, _ = exported_sources(files)
    for name, (_, error) in found["others"].items():
        described = PreprocessedFile(files[name]) if error is None else UnknownFile(error_from_json(error))
        sources.setdefault(name, SourceFile(files[name], name, described=described))
    return Part(None, {}, sources={name: sources[name] for name in files})
