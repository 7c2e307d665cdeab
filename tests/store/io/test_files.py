"""Opening of files: only regular files, and only up to the expected size."""

import errno
import os
import re

import pytest

from tests.helpers import command, segment_of, tree_digest, write_scores
from tracestore.errors import CorruptStoreError, DiskFullError
from tracestore.store.io import fsio
from tracestore.store.io.files import LocalFiles


@pytest.mark.parametrize("kind", ["link", "fifo", "folder", "device"])
@pytest.mark.parametrize("name", ["hidden_states/c/0/0", "columns", "manifest/0000000002", "zarr.json"])
def test_only_regular_files_are_opened(single_generation, source, tmp_path, kind, name):
    name = f"{segment_of(single_generation)}/{name}" if name.startswith("hidden_states") else name
    path, kept = single_generation / name, tmp_path / "kept"
    os.rename(path, kept)
    if kind == "link":
        path.symlink_to(kept)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        if os.geteuid() != 0:
            pytest.skip("only root makes devices")
        os.mknod(path, 0o20666, os.makedev(1, 5))
    before = tree_digest(kept) if kept.is_dir() else kept.read_bytes()
    command("info", single_generation)
    done = command("verify", single_generation)
    assert done.returncode in (2, 3)
    for words in (
        ["score", single_generation, "--scores", write_scores(tmp_path / "s.csv", {"q1": 0.5})],
        ["convert", source, single_generation],
    ):
        assert command(*words).returncode in (0, 2, 3)
    assert before == (tree_digest(kept) if kept.is_dir() else kept.read_bytes())
    if kind == "link":
        assert "cp -rL" in done.stdout + done.stderr


def test_small_files_are_read_up_to_a_limit(single_generation):
    files = LocalFiles(single_generation)
    with pytest.raises(CorruptStoreError, match="expected at most 10"):
        files.read_small("zarr.json", 10)
    with pytest.raises(FileNotFoundError):
        files.read_small("manifest/0000000099", 10)


@pytest.mark.parametrize(("needed", "shown"), [(None, "more"), (700, "more"), (7000, "about 7,000")])
def test_a_full_disk_never_needs_less_than_what_is_free(tmp_path, monkeypatch, needed, shown):
    monkeypatch.setattr(fsio, "free_bytes", lambda path: 1000)
    with (
        pytest.raises(DiskFullError, match=re.escape(f"{tmp_path}: 1,000 bytes are free, {shown} were needed")),
        fsio.map_os_errors(tmp_path, None if needed is None else lambda: needed),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
