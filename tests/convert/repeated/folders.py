"""Sequences of edits of folders of many forms: samples, tables, layers, batches, scores files, classes, moved sources.

python -m tests.convert.repeated.folders --first 0 --seconds 600 prints the sequences after which the store differs from
a new one, without a refusal or a printed line about it.
"""

import random
import re
import shutil
from unittest import mock

import tracestore
from tests.convert.repeated.folder_forms import Folder
from tests.convert.repeated.sequences import interrupted, search
from tests.helpers import command
from tracestore.convert import cutting

_SCORES = ("is_correct", "f1", "score")
_LINES = re.compile(r"may be of earlier files stay: (.*); --overwrite")
# What else a printed line says: fields of traces that may differ, from then on.
_SAID = {
    "that the sources no longer have: it stays": ("label", "group", "scores"),
    "earlier ones may have given: it stays": ("label", "group", "scores", "text"),
    "stored traces? without a row in": ("label", "group", "scores"),
    "traces? refused, listed in": ("content", "text", "label", "group", "scores"),
    "skipped$": ("content", "text", "label", "group", "scores"),
}


def values(store):
    """Return the fields of each trace of a store, and its default score."""
    with tracestore.open(store) as opened:
        found = {}
        for t in opened:
            fields = {"content": t.hidden_states.tobytes(), "text": t.answer, "label": t.label, "group": t.group}
            fields = {n: None if v is None or v != v or v == "" else v for n, v in fields.items()}
            found[t.question_id, t.sample] = fields | t.scores
        index = opened.internals.index
        paths = [index.source(k).path for k in index.read_column("source")]
        return found, opened.score_name, dict(zip(found, paths, strict=True))


def run(seed, root):
    """Run the sequence of a seed; return its log and the differences that nothing says."""
    rng = random.Random(seed)
    folder, store, fresh = Folder(rng, root / "in/data"), root / "s.zarr", root / "fresh.zarr"
    (root / "link").symlink_to(root / "in/data")
    log, wrong, said = [folder.form], [], set()
    choice = rng.choice(["error", "error", "keep-first", "keep-last", "keep-last"])
    for _ in range(rng.randint(1, 3)):
        folder.add()
    with mock.patch.object(cutting, "MIN_BYTES", rng.choice([1, 10**9])):
        for _ in range(rng.randint(3, 8)):
            log.append([folder.edit() for _ in range(rng.randint(1, 2))])
            folder.write()
            own = [] if rng.random() < 0.15 and store.exists() else folder.lines()
            source = folder.root
            if folder.form in ("pkl", "scores") and rng.random() < 0.2:
                source = rng.choice([root / "in", root / "link"])
            options = ["--on-conflict", choice if rng.random() < 0.8 else "keep-last"]
            options += ["--overwrite"] if rng.random() < 0.07 and store.exists() else []
            options += ["--skip-bad"] if rng.random() < 0.1 else []
            words = ["convert", source, store, *own, *options]
            if rng.random() < 0.15:
                log.append(interrupted(words, rng.randint(1, 8)))
                said |= _said(log[-1][2])
                if rng.random() < 0.5:
                    log.append(["meanwhile", folder.edit()])
                    folder.write()
                    words = ["convert", source, store, *(folder.lines() if own else []), *options]
            shutil.rmtree(fresh, ignore_errors=True)
            if not own and store.exists():  # the kept layouts
                shutil.copytree(store, fresh)
            done = command(*words, *(["--workers", "2"] if rng.random() < 0.07 else []))
            replaces = ["--overwrite"] * (fresh.exists() and "--overwrite" not in options)
            new = command("convert", source, fresh, *(folder.lines() if own else []), *options, *replaces)
            log.append((words[1].name, bool(own), options, done.returncode, done.stderr[-300:], new.returncode))
            log.append(done.stdout.splitlines()[3:])
            if "--overwrite" in options and not done.returncode:
                said.clear()
            said |= _said(done.stdout)
            wrong += _compared(done, new, store, fresh, said, choice, source)
            if wrong:
                break
    return log, wrong


def _said(printed):
    """Return the fields of which printed lines report that they may differ from those of a new store."""
    stays = _LINES.search(printed)
    named = set() if stays is None else set(re.findall(r"(\w+)(?: \([^)]*\))? of ", stays[1]))
    return named.union(*(names for text, names in _SAID.items() if re.search(text, printed, re.MULTILINE)))


def _compared(done, new, store, fresh, said, choice, source):
    if done.returncode not in (0, 2, 3):
        return [("code", done.returncode, done.stderr)]
    if done.returncode:
        explained = any(text in done.stderr for text in ("--on-conflict", "--overwrite", "no line", "no file"))
        return [] if explained or new.returncode else [("a refusal that names no flag", done.stderr)]
    if new.returncode:
        # An id is that of a stored trace; --skip-bad has left out every file, and printed that; another file had the value.
        texts = ("no id of it is that of a trace", "no file could be converted", "the files hold no such value")
        is_left = any(text in new.stderr for text in texts)
        return [] if choice == "keep-first" or is_left else [("accepted", new.stderr)]
    (found, default, owners), (expected, wanted_default, _) = values(store), values(fresh)
    wrong, is_gone_said = [], "stored, but not from the present files" in done.stdout
    for key, wanted in expected.items() if choice != "keep-first" else ():
        own = found.get(key, {})
        if is_gone_said and own and not (source / owners[key]).exists():
            continue
        names = [n for n in wanted.keys() | own.keys() if own.get(n) != wanted.get(n)]
        if unsaid := [n for n in names if n not in said and not (n in _SCORES and "scores" in said)]:
            shown = {n: (own.get(n), wanted.get(n)) for n in unsaid if n != "content"}
            wrong.append((key, unsaid, shown, bool(own), sorted(said)))
    is_used = any(default in trace for trace in found.values())
    if is_used and default != wanted_default and f"{default}: " not in done.stdout:
        wrong.append(("default", default, wanted_default))
    return wrong


if __name__ == "__main__":
    search(run)
