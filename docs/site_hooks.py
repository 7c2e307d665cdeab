"""What the site has that is written elsewhere: the help of every command, and the figures."""

import argparse
import io
import os
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
_MARK = "<!-- the help of every command, put here by docs/site_hooks.py -->"


def on_files(files: Files, config: Any) -> Files:
    text = (ROOT / "bench" / "RESULTS.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "results.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_path == "commands.md":
        return markdown.replace(_MARK, _commands())
    return markdown.replace("(../bench/RESULTS.md)", "(results.md)")


def _commands() -> str:
    os.environ["COLUMNS"] = "100"
    from tracestore import convert
    from tracestore.cli import make_parser

    texts = {"convert": _help_of(convert.main)}
    for action in make_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            # convert's own parser is elsewhere.
            texts |= {name: parser.format_help() for name, parser in action.choices.items() if name != "convert"}
    return "\n".join(f"## tracestore {name}\n\n```text\n{text}```\n" for name, text in texts.items())


def _help_of(main: Any) -> str:
    out = io.StringIO()
    with redirect_stdout(out), suppress(SystemExit):
        main(["--help"])
    return out.getvalue()
