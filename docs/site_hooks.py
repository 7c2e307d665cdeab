"""MkDocs hooks that add generated content: help of commands, tables of fields, pages of other folders, plots."""

import atexit
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = "https://github.com/tracestore/tracestore"
# Pages of the site that are files in other folders of the repository.
_PAGES = {
    "results.md": "bench/RESULTS.md",
    "leaderboard_tables.md": "bench/LEADERBOARD.md",
    "security.md": "SECURITY.md",
    "contributing.md": "CONTRIBUTING.md",
    "builtin_layout.md": "tracestore/ingest/builtin/tools/README.md",
}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from other folders of the repository, and the images of the gallery."""
    for name, path in _PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text(encoding="utf-8")))
    for picture in draw_gallery():
        files.append(File.generated(config, f"gallery/{picture.name}", abs_src_path=str(picture)))
    return files


def draw_gallery() -> list[Path]:
    """Run docs/examples/plots.py in a temporary folder, and return the images that it saves."""
    folder = Path(tempfile.mkdtemp(prefix="gallery-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    environment = {**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, ROOT / "docs/examples/plots.py"], cwd=folder, env=environment, check=True)
    return sorted(folder.glob("*.png"))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Insert what is made from the code, and correct the links between folders of the repository."""
    for what, make in MADE.items():
        mark = f"<!-- {what}, inserted by docs/site_hooks.py -->"
        if mark in markdown:
            markdown = markdown.replace(mark, make())
    folder = posixpath.dirname(_PAGES.get(page.file.src_path, "docs/"))
    return re.sub(r"\]\(([\w./-]+)(#[\w-]*)?\)", lambda link: f"]({_target(folder, link[1])}{link[2] or ''})", markdown)


def _target(folder: str, link: str) -> str:
    """Return the link of the site for a link of a file in a folder of the repository."""
    path = posixpath.normpath(posixpath.join(folder, link))
    names = {path: name for name, path in _PAGES.items()}
    if path.startswith("docs/") or path in names:
        return names.get(path, path.removeprefix("docs/"))
    return f"{REPOSITORY}/blob/main/{path}" if (ROOT / path).exists() else link


def commands() -> str:
    """Return the help of every command."""
    os.environ["COLUMNS"] = "100"
    from tracestore.cli import COMMANDS, command_parser

    return "\n".join(f"## tracestore {name}\n\n```text\n{command_parser(name).format_help()}```\n" for name in COMMANDS)


def fields() -> str:
    """Return the table of the fields that a layout may state."""
    from tracestore.ingest.layout.fields import FIELDS
    from tracestore.store import vocabulary

    known = [(rule, vocabulary.FIELDS[name]) for name, rule in FIELDS.items() if rule.kind != "known"]
    rows = (f"| `{f.name}` | {' '.join(rule.axes)} | {f.meaning} | {f.stored} |" for rule, f in known)
    return "\n".join(("| field | axes | value | in the store |", "|---|---|---|---|", *rows))


def score_names() -> str:
    """Return the table of the names of scores and of the words of labels, by meaning."""
    from tracestore.store.vocabulary import SCORES, WORDS

    directions = sorted(set(SCORES.values()))
    names = {d: ", ".join(f"`{n}`" for n, found in SCORES.items() if found == d) for d in directions}
    words = {
        d: ", ".join(f"`{w}`" for w, is_right in WORDS.items() if is_right == (d == "correct")) for d in directions
    }
    rows = (f"| {d} | {names[d]} | {words[d]} |" for d in directions)
    return "\n".join(("| high | names of scores | words of labels |", "|---|---|---|", *rows))


def detectors() -> str:
    """Return the table of the published detectors, with the descriptions of their classes."""
    from tracestore.detectors.registry import registry

    rows = ["| name | kind | score | layers | paper |", "|---|---|---|---|---|"]
    for name, entry in registry().items():
        if entry.model is None and not entry.is_foreign:
            found = entry.make()
            text = " ".join((type(found).__doc__ or "").partition("Parameters")[0].split()).replace("|", "\\|")
            options = ", ".join(f"{key} = {value}" for key, value in found.parameters.items())
            text += f" ({options})" if options else ""
            rows.append(f"| `{name}` | {found.kind} | {text} | {found.layers} | {found.reference} |")
    return "\n".join(rows)


def models() -> str:
    """Return the table of the models that `train` trains."""
    from tracestore.detectors.registry import MODELS

    rows = (f"| {name} | {spec.view} | {spec.summary} |" for name, spec in MODELS.items())
    return "\n".join(("| model | view | architecture |", "|---|---|---|", *rows))


def builtin_layouts() -> str:
    """Return the table of the built-in layouts, with the files of each."""
    from tracestore.ingest.builtin.library import builtins

    rows = dict.fromkeys(f"| `{builtin.name}` | {builtin.source['files']} |" for builtin in builtins())
    return "\n".join(("| layout | files |", "|---|---|", *rows))


MADE = {
    "the models": models,
    "the published detectors": detectors,
    "the help of every command": commands,
    "the table of fields": fields,
    "the names of scores": score_names,
    "the table of built-in layouts": builtin_layouts,
}
