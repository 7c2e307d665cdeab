"""All ways of a pickle to name and call something.

pickle.load of most of these files creates the marker file, which a test verifies.
"""

import os
import pickle
from collections.abc import Iterator

from tests.malicious_inputs.files.case import (
    NDARRAY,
    PROTO,
    Case,
    call,
    dct,
    glob,
    lst,
    named,
    num,
    nums,
    raw,
    trace,
    traces,
    tup,
    uni,
    whole,
)
from tests.malicious_inputs.files.containers import MAGIC, gz, legacy, pt, pt_entries, sequences
from tests.malicious_inputs.files.containers import archive as zip_archive


def text_calls(marker: str) -> Iterator[tuple[str, str, tuple[bytes, ...]]]:
    """Yield module, name and arguments of calls that create the marker."""
    touch, python = uni(f"touch {marker}"), uni(f"open({marker!r}, 'w').close()")
    argv, path, mode = lst(uni("touch"), uni(marker)), uni(marker), uni("w")
    for name in ("os.system", "posix.system", "os.popen", "subprocess.getoutput"):
        yield *name.split("."), (touch,)
    yield "os", "mkdir", (path,)
    yield "os", "symlink", (uni("target"), path)
    yield "os", "open", (path, num(0o102))
    yield "os", "mkfifo", (path,)
    for name in ("call", "run", "check_call", "check_output"):
        yield "subprocess", name, (argv,)
    for name in ("builtins.eval", "builtins.exec", "__builtin__.eval", "cProfile.run", "profile.run"):
        yield *name.split("."), (python,)
    yield "timeit", "timeit", (uni("pass"), python)  # the setup runs once, and the statement a million times
    yield "__builtin__", "execfile", (path,)
    for module in ("builtins", "io", "_io", "codecs", "gzip", "bz2", "lzma", "tarfile"):
        yield module, "open", (path, mode)
    yield "io", "FileIO", (path, mode)
    yield "zipfile", "ZipFile", (path, mode)
    yield "sqlite3", "connect", (path,)
    yield "logging", "FileHandler", (path,)
    yield "shutil", "copyfile", (uni("/etc/hostname"), path)
    yield "bdb", "Bdb.run", (call(named("bdb", "Bdb")), python)
    yield "pdb", "run", (python,)
    for name in ("Path.touch", "Path.mkdir"):
        yield "pathlib", name, (call(glob("pathlib", "Path"), path),)
    yield "os", "system.__call__", (touch,)
    yield "builtins", "eval.__call__", (python,)
    for name in ("pickle.loads", "_pickle.loads", "pickle._loads"):
        yield *name.split("."), (raw(b"cos\nsystem\n(" + touch + b"tR."),)
    yield "numpy", "save", (path, num(1))
    yield "numpy", "savetxt", (path, lst(num(1)))
    yield "numpy.testing._private.utils", "runstring", (python, b"}")
    yield "code", "InteractiveInterpreter.runsource", (call(named("code", "InteractiveInterpreter")), python)


def called(marker: str) -> Iterator[Case]:
    """Yield direct calls, named by GLOBAL or, for dotted names, by STACK_GLOBAL."""
    for module, name, arguments in text_calls(marker):
        target = named(module, name) if "." in name else glob(module, name)
        code = call(target, *arguments)
        exists = name != "execfile"
        protocol = b"\x80\x02" if module == "__builtin__" else PROTO
        runs = exists and module not in ("pdb", "numpy", "numpy.testing._private.utils")
        yield Case(f"call_{module}.{name}", ".pkl", protocol + code + b".", f"{module}.{name}", runs)


def forms(marker: str) -> Iterator[Case]:
    """Yield one callable, reached by every opcode that can call it."""
    touch = uni(f"touch {marker}")
    system = {"global": glob("os", "system"), "stack_global": named("os", "system")}
    for form, target in system.items():
        code = call(target, touch)
        yield Case(f"{form}_in_a_field", ".pkl", traces(trace(note=code)), "os.system", True)
        yield Case(f"{form}_in_place_of_hidden", ".pkl", traces(trace(hidden_states=code)), "os.system", True)
        yield Case(f"{form}_second_trace", ".pkl", traces(trace(), code), "os.system", True)
        yield Case(f"{form}_popped_before_stop", ".pkl", whole(code + b"0" + lst(trace())), "os.system", True)
        yield Case(f"{form}_as_key", ".pkl", whole(b"}" + code + b"Ns"), "os.system", True)
        yield Case(f"{form}_in_gzip", ".pkl.gz", gz(traces(trace(note=code))), "os.system")
        yield Case(f"{form}_named_pt", ".pt", whole(code), "os.system", True)
        fetched = target + b"q\x050h\x05" + tup(touch) + b"R"
        yield Case(f"{form}_memo_fetched", ".pkl", whole(fetched), "os.system", True)
        yield Case(f"{form}_only_named", ".pkl", traces(trace(note=target)), "os.system")
    names = uni("os") + b"q\x010" + uni("system") + b"q\x020h\x01h\x02\x93"
    yield Case("stack_global_memo_names", ".pkl", whole(names + tup(touch) + b"R"), "os.system", True)
    yield Case("inst", ".pkl", b"(" + touch + b"ios\nsystem\n.", None, True)
    yield Case("inst_in_a_field", ".pkl", traces(trace(note=b"(" + touch + b"ios\nsystem\n")), None, True)
    yield Case("obj", ".pkl", whole(b"(" + glob("os", "system") + touch + b"o"), "os.system", True)
    yield Case("obj_allowed_class", ".pkl", whole(b"(" + NDARRAY + nums(1) + b"o"))
    popen = glob("subprocess", "Popen")
    yield Case("newobj", ".pkl", whole(popen + tup(lst(uni("touch"), uni(marker))) + b"\x81"), "subprocess.Popen")
    yield Case("newobj_ex", ".pkl", whole(popen + tup() + dct(args=touch, shell=b"\x88") + b"\x92"), "subprocess.Popen")
    yield Case("newobj_ex_allowed", ".pkl", whole(NDARRAY + nums(1) + b"}\x92"))
    for code in (b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\0\0\0", b"\x84\xff\xff\xff\xff"):
        yield Case(f"extension_{code.hex()}", ".pkl", whole(code + tup(touch) + b"R"))
    yield Case("persistent_id", ".pkl", b"Pos.system\n.")
    yield Case("binary_persistent_id", ".pkl", whole(call(glob("os", "system"), touch) + b"Q"), "os.system", True)
    for protocol in (0, 1, 2, 3, 4, 5):
        yield Case(f"protocol_{protocol}_writer", ".pkl", pickle.dumps([Touch(marker)], protocol), "system", True)


class Touch:
    """Pickles to a call that creates the marker."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.system, (f"touch {self.marker}",)


def chains(marker: str) -> Iterator[Case]:
    """Yield calls that are composed of harmless-looking functions."""
    touch, system = uni(f"touch {marker}"), uni("system")

    def function(name: str, *arguments: bytes) -> bytes:
        module, _, attribute = name.rpartition(".")
        return call(glob(module, attribute), *arguments)

    os_system, popen, getattr_ = (glob(*n.split(".")) for n in ("os.system", "subprocess.Popen", "builtins.getattr"))
    os_module = function("importlib.import_module", uni("os"))
    compiled = function("builtins.compile", uni(f"open({marker!r},'w')"), uni("x"), uni("exec"))
    mapped = function("builtins.map", os_system, lst(touch))
    state = tup(os_system, tup(touch), b"}", b"}") + b"b"
    running = {
        "getattr": (call(call(getattr_, os_module, system), touch), "builtins.getattr"),
        "import": (call(call(getattr_, function("builtins.__import__", uni("os")), system), touch), "builtins.getattr"),
        "import_module": (call(call(function("operator.attrgetter", system), os_module), touch), "operator.attrgetter"),
        "partial": (call(function("functools.partial", os_system, touch)), "functools.partial"),
        "methodcaller": (call(function("operator.methodcaller", system, touch), os_module), "operator.methodcaller"),
        "resolve_name": (call(function("pkgutil.resolve_name", uni("os:system")), touch), "pkgutil.resolve_name"),
        "map": (function("builtins.list", mapped), "builtins.map"),
        "compile": (function("builtins.exec", compiled), "builtins.exec"),
        "build_partial": (
            function("functools.partial", glob("builtins", "print")) + state + b")R",
            "functools.partial",
        ),
    }
    others = {
        "reduce": (function("functools.reduce", getattr_, lst(os_module, system)), "functools.reduce"),
        "thread_pool": (call(glob("concurrent.futures.thread", "_WorkItem.run"), b"N"), "_WorkItem"),
        "copyreg": (function("copyreg._reconstructor", popen, glob("builtins", "object"), b"N"), None),
        "copy_reg": (function("copy_reg._reconstructor", popen, glob("__builtin__", "object"), b"N"), None),
    }
    for name, (code, word) in (running | others).items():
        yield Case(f"chain_{name}", ".pkl", whole(code), word, name in running)
        yield Case(f"chain_{name}_in_a_field", ".pkl", traces(trace(note=code)), word, name in running)


def in_torch_files(marker: str) -> Iterator[Case]:
    """Yield a call in each pickle of a torch file."""
    code = call(glob("os", "system"), uni(f"touch {marker}"))
    yield Case("zip_root", ".pt", pt(code), "os.system")
    yield Case("zip_field", ".pt", pt(sequences(note=code)), "os.system")
    yield Case("zip_persistent_id", ".pt", pt(code + b"Q"), "os.system")
    storage_of_system = tup(uni("storage"), glob("os", "system"), uni("0"), uni("cpu"), num(4)) + b"Q"
    yield Case("zip_storage_class", ".pt", pt(sequences(storage_of_system)), "os.system")
    yield Case("zip_second_pickle", ".pt", zip_archive([*pt_entries(code, {}), *pt_entries(code, {}, "other")]), None)
    yield Case("legacy_object", ".pt", legacy(code, {}), "os.system")
    yield Case("legacy_keys", ".pt", legacy(sequences(b"N"), {}, keys=whole(code)), "os.system")
    yield Case("legacy_system", ".pt", legacy(code, {}, system=whole(code)), "os.system", False)
    head = b"\x80\x02\x8a\x0a" + MAGIC.to_bytes(10, "little") + b"."
    yield Case("legacy_protocol", ".pt", head + whole(code), "os.system")
    yield Case("legacy_magic", ".pt", whole(code + b"0\x8a\x0a" + MAGIC.to_bytes(10, "little")), "os.system", True)
    loaded = call(glob("torch.storage", "_load_from_bytes"), raw(legacy(code, {})))
    yield Case("load_from_bytes", ".pkl", traces(trace(note=loaded)), "os.system")


def all_cases(marker: str) -> Iterator[Case]:
    """Yield all cases of this module."""
    for group in (called, forms, chains, in_torch_files):
        yield from group(marker)
