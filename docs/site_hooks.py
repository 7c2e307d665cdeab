"""MkDocs hooks that add generated content: the help of every command, benchmark results and gallery images."""

import atexit
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
# Pages of the site that are files in other folders of the repository.
_PAGES = {"results.md": "bench/RESULTS.md", "security.md": "SECURITY.md"}
_MARK = "<!-- the help of every command, inserted by docs/site_hooks.py -->"


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from other folders of the repository, and the images of the gallery."""
    for name, path in _PAGES.items():
        text = re.sub(r"\((\.\./)?docs/", "(", (ROOT / path).read_text(encoding="utf-8"))
        files.append(File.generated(config, name, content=text))
    for picture in draw_gallery():
        files.append(File.generated(config, f"gallery/{picture.name}", abs_src_path=str(picture)))
    return files


def draw_gallery() -> list[Path]:
    """Run the code of docs/gallery.md in a temporary folder, and return the images that it saves."""
    folder = Path(tempfile.mkdtemp(prefix="gallery-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/gallery.md").read_text(), re.MULTILINE | re.DOTALL)
    environment = {**os.environ, "MPLBACKEND": "Agg"}
    (folder / "gallery.py").write_text("\n".join(blocks))
    subprocess.run([sys.executable, "gallery.py"], cwd=folder, env=environment, check=True)
    return sorted(folder.glob("*.png"))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Insert the help of the commands, and correct links to pages from other folders."""
    if page.file.src_path == "commands.md":
        return markdown.replace(_MARK, _commands())
    return markdown.replace("(../bench/RESULTS.md)", "(results.md)").replace("(../SECURITY.md", "(security.md")


def _commands() -> str:
    os.environ["COLUMNS"] = "100"
    from tracestore.cli import COMMANDS, command_parser

    return "\n".join(f"## tracestore {name}\n\n```text\n{command_parser(name).format_help()}```\n" for name in COMMANDS)
