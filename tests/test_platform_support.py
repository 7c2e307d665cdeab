"""Test the interfaces of Linux and, with those removed, their fallbacks."""

import errno
import json
import os
import sys
import threading

import numpy as np
import pytest

from tests.helpers import ROOT
from tracestore import platform_support
from tracestore.cli import main
from tracestore.store.io import fsio
from tracestore.store.io.fsio import atomic_write
from tracestore.store.io.scratch import Scratch


@pytest.fixture
def no_linux(monkeypatch, tmp_path):
    """Remove /proc, /dev/shm and the system calls that only Linux has."""
    for name in ("sched_getaffinity", "posix_fallocate", "posix_fadvise", "memfd_create"):
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(platform_support, "_PROC", tmp_path / "no-proc")
    monkeypatch.setattr(platform_support, "_SHARED_MEMORY", tmp_path / "no-shm")


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_interfaces_of_linux():
    assert platform_support.num_processors() == len(os.sched_getaffinity(0))
    assert platform_support.memory_info()["MemTotal"] > 0
    assert platform_support.processor_features()
    assert min(platform_support.memory_use()) > 0
    assert platform_support.has_memory_files()
    assert len(platform_support.boot_id()) >= 32 and platform_support.boot_id() == platform_support.boot_id()
    waits = platform_support.run_queue_waits()
    assert str(threading.get_native_id()) in waits and min(waits.values()) >= 0
    idle = platform_support.idle_processor_s()
    assert 0 <= idle <= platform_support.idle_processor_s()
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert platform_support.idle_processor_s() <= idle + 1
    finally:
        os.sched_setaffinity(0, before)


def test_fallbacks_of_queries(no_linux):
    assert platform_support.num_processors() == os.cpu_count()
    assert platform_support.processor_features() is None and platform_support.memory_info() == {}
    assert platform_support.max_maps() is None and platform_support.shared_memory_folder() is None
    assert platform_support.boot_id() is None
    found = platform_support.memory_use()
    assert found.anonymous == found.data > 1 << 20 and found.file == 0
    assert not platform_support.has_memory_files()
    assert platform_support.run_queue_waits() == {} and platform_support.idle_processor_s() is None


@pytest.mark.parametrize("num_bytes", [1, 5_000_000])
def test_fallbacks_of_file_operations(no_linux, tmp_path, num_bytes):
    with open(tmp_path / "file", "w+b") as file:
        platform_support.preallocate(file.fileno(), num_bytes)
        platform_support.evict_from_page_cache(file.fileno())
        assert os.fstat(file.fileno()).st_size == num_bytes
    array = Scratch(tmp_path, max_memory=0).empty(num_bytes, np.uint8)
    array[:] = 7
    assert array.sum() == 7 * num_bytes


@pytest.mark.parametrize("has_unnamed_files", [True, False])
def test_atomic_write_touches_no_other_file(monkeypatch, tmp_path, has_unnamed_files):
    if not has_unnamed_files:
        monkeypatch.setattr(fsio, "open_unnamed", lambda folder: None)
    kept = tmp_path / ".tmp-page.html"
    kept.mkdir()
    (tmp_path / "page.html").write_bytes(b"old")
    with pytest.raises(KeyError), atomic_write(tmp_path / "page.html") as file:
        file.write(b"half")
        raise KeyError
    assert (tmp_path / "page.html").read_bytes() == b"old"
    with atomic_write(tmp_path / "page.html") as file:
        file.write(b"new")
    assert (tmp_path / "page.html").read_bytes() == b"new"
    assert sorted(tmp_path.iterdir()) == [kept, tmp_path / "page.html"]
    (tmp_path / "usual").write_bytes(b"")
    assert (tmp_path / "page.html").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_new_file_has_no_other_name_before(monkeypatch, tmp_path):
    if (fd := platform_support.open_unnamed(tmp_path)) is None:
        pytest.skip("the file system has no unnamed files")
    os.close(fd)
    names = []
    monkeypatch.setattr(fsio, "name_file", lambda fd, path: (names.append(path), platform_support.name_file(fd, path)))
    for _ in range(2):
        fsio.write_atomic(tmp_path / "a", b"data")
    assert names[:2] == [tmp_path / "a"] * 2 and len(names) == 3  # the second file replaces the first one


def test_unnamed_files_need_linux(no_linux, tmp_path):
    assert platform_support.open_unnamed(tmp_path) is None


def test_full_disk_raises_without_linux(no_linux, monkeypatch, tmp_path):
    def raise_full(*_):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "pwrite", raise_full)
    with open(tmp_path / "file", "w+b") as file, pytest.raises(OSError, match="no space"):
        platform_support.preallocate(file.fileno(), 10)


def test_doctor_without_linux(no_linux, tmp_path, capsys):
    assert main(["doctor", "--json", "--folder", str(tmp_path)]) == 0
    names = {result["name"] for result in json.loads(capsys.readouterr().out)}
    assert {"processors", "open files", "free"} <= names
    assert not names & {"instructions", "memory", "shared memory", "maps of a process"}


def test_no_other_module_uses_these_interfaces():
    calls = ("sched_getaffinity", "posix_fadvise", "posix_fallocate", "memfd_create", '"/proc', '/dev/shm")', "RUSAGE_")
    allowed = {"platform_support.py"}
    for path in sorted((ROOT / "tracestore").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        assert path.name in allowed or not [c for c in calls if c in text], path
    for path in sorted((ROOT / "csrc").glob("*.[ch]")):
        text = path.read_text(encoding="utf-8")
        calls = ("pthread_condattr", "RUSAGE_", "MADV_", "sched_getaffinity")
        assert path.name == "platform.h" or not [c for c in calls if c in text], path


def test_rename_exclusive_never_replaces(tmp_path):
    """A rename onto an empty folder would succeed silently."""
    for name in ("folder", "taken"):
        (tmp_path / name).mkdir()
    (tmp_path / "folder/file").write_text("kept")
    if not platform_support.rename_exclusive(tmp_path / "folder", tmp_path / "new"):
        pytest.skip("the file system has no such call")
    with pytest.raises(FileExistsError):
        platform_support.rename_exclusive(tmp_path / "new", tmp_path / "taken")
    assert (tmp_path / "new/file").read_text() == "kept" and not any((tmp_path / "taken").iterdir())
