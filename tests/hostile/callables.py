"""Every way a pickle has to name and call something. pickle.load of most of these
leaves the marker file behind; a test says so."""

import pickle
from collections.abc import Iterator

from tests.hostile.case import (
    NDARRAY,
    PROTO,
    RECONSTRUCT,
    Case,
    array,
    call,
    dct,
    dtype,
    empty_array,
    fields,
    glob,
    lst,
    num,
    nums,
    raw,
    traces,
    tup,
    uni,
    whole,
)
from tests.hostile.containers import MAGIC, gz, legacy, pt, pt_entries, sequences
from tests.hostile.containers import archive as zip_archive


def named(module: str, name: str) -> bytes:
    """By STACK_GLOBAL, which takes dotted names."""
    return uni(module) + uni(name) + b"\x93"


def text_calls(marker: str) -> Iterator[tuple[str, str, tuple[bytes, ...]]]:
    """module, name, arguments: each leaves the marker when it is really called."""
    touch, python = uni(f"touch {marker}"), uni(f"open({marker!r}, 'w').close()")
    argv, path, mode = lst(uni("touch"), uni(marker)), uni(marker), uni("w")
    yield "os", "system", (touch,)
    yield "posix", "system", (touch,)
    yield "os", "popen", (touch,)
    yield "os", "mkdir", (path,)
    yield "os", "symlink", (uni("target"), path)
    yield "os", "open", (path, num(0o102))
    yield "os", "mkfifo", (path,)
    yield "subprocess", "call", (argv,)
    yield "subprocess", "run", (argv,)
    yield "subprocess", "check_call", (argv,)
    yield "subprocess", "check_output", (argv,)
    yield "subprocess", "getoutput", (touch,)
    yield "builtins", "eval", (python,)
    yield "builtins", "exec", (python,)
    yield "__builtin__", "eval", (python,)
    yield "__builtin__", "execfile", (path,)
    yield "builtins", "open", (path, mode)
    yield "io", "open", (path, mode)
    yield "_io", "open", (path, mode)
    yield "io", "FileIO", (path, mode)
    yield "codecs", "open", (path, mode)
    yield "gzip", "open", (path, mode)
    yield "bz2", "open", (path, mode)
    yield "lzma", "open", (path, mode)
    yield "zipfile", "ZipFile", (path, mode)
    yield "tarfile", "open", (path, mode)
    yield "sqlite3", "connect", (path,)
    yield "logging", "FileHandler", (path,)
    yield "shutil", "copyfile", (uni("/etc/hostname"), path)
    yield "timeit", "timeit", (python,)
    yield "cProfile", "run", (python,)
    yield "profile", "run", (python,)
    yield "bdb", "Bdb.run", (call(named("bdb", "Bdb")), python)
    yield "pdb", "run", (python,)
    yield "pathlib", "Path.touch", (call(glob("pathlib", "Path"), path),)
    yield "pathlib", "Path.mkdir", (call(glob("pathlib", "Path"), path),)
    yield "os", "system.__call__", (touch,)
    yield "builtins", "eval.__call__", (python,)
    yield "pickle", "loads", (raw(b"cos\nsystem\n(" + touch + b"tR."),)
    yield "_pickle", "loads", (raw(b"cos\nsystem\n(" + touch + b"tR."),)
    yield "pickle", "_loads", (raw(b"cos\nsystem\n(" + touch + b"tR."),)
    yield "numpy", "save", (path, num(1))
    yield "numpy", "savetxt", (path, lst(num(1)))
    yield "numpy.testing._private.utils", "runstring", (python, b"}")
    yield "code", "InteractiveInterpreter.runsource", (call(named("code", "InteractiveInterpreter")), python)


def called(marker: str) -> Iterator[Case]:
    """Directly: by GLOBAL (STACK_GLOBAL for dotted names), in a trace and bare."""
    for module, name, arguments in text_calls(marker):
        target = named(module, name) if "." in name else glob(module, name)
        code = call(target, *arguments)
        exists = name != "execfile"
        protocol = b"\x80\x02" if module == "__builtin__" else PROTO
        runs = exists and module not in ("pdb", "numpy", "numpy.testing._private.utils")
        yield Case(f"call_{module}.{name}", ".pkl", protocol + code + b".", f"{module}.{name}", runs)


def forms(marker: str) -> Iterator[Case]:
    """One callable, every opcode that can reach it."""
    touch = uni(f"touch {marker}")
    system = {"global": glob("os", "system"), "stack_global": named("os", "system")}
    for form, target in system.items():
        code = call(target, touch)
        yield Case(f"{form}_in_a_field", ".pkl", traces(dct(**fields(note=code))), "os.system", True)
        yield Case(f"{form}_in_place_of_hidden", ".pkl", traces(dct(**fields(hidden_states=code))), "os.system", True)
        yield Case(f"{form}_second_trace", ".pkl", traces(dct(**fields()), code), "os.system", True)
        yield Case(f"{form}_popped_before_stop", ".pkl", whole(code + b"0" + lst(dct(**fields()))), "os.system", True)
        yield Case(f"{form}_as_key", ".pkl", whole(b"}" + code + b"Ns"), "os.system", True)
        yield Case(f"{form}_in_gzip", ".pkl.gz", gz(traces(dct(**fields(note=code)))), "os.system")
        yield Case(f"{form}_named_pt", ".pt", whole(code), "os.system", True)
        yield Case(
            f"{form}_memo_fetched", ".pkl", whole(target + b"q\x050h\x05" + tup(touch) + b"R"), "os.system", True
        )
        yield Case(f"{form}_only_named", ".pkl", traces(dct(**fields(note=target))), "os.system")
    yield Case(
        "stack_global_memo_names",
        ".pkl",
        whole(uni("os") + b"q\x010" + uni("system") + b"q\x020h\x01h\x02\x93" + tup(touch) + b"R"),
        "os.system",
        True,
    )
    yield Case("inst", ".pkl", b"(" + touch + b"ios\nsystem\n.", None, True)
    yield Case("inst_in_a_field", ".pkl", traces(dct(**fields(note=b"(" + touch + b"ios\nsystem\n"))), None, True)
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
    """Pickles to the call that leaves the marker."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        import os

        return os.system, (f"touch {self.marker}",)


def chains(marker: str) -> Iterator[Case]:
    """Calls put together from harmless looking pieces."""
    touch = uni(f"touch {marker}")
    getattr_ = glob("builtins", "getattr")
    os_module = call(glob("importlib", "import_module"), uni("os"))
    values = {
        "getattr": (call(call(getattr_, os_module, uni("system")), touch), "builtins.getattr"),
        "import": (
            call(call(getattr_, call(glob("builtins", "__import__"), uni("os")), uni("system")), touch),
            "builtins.getattr",
        ),
        "import_module": (
            call(call(call(glob("operator", "attrgetter"), uni("system")), os_module), touch),
            "operator.attrgetter",
        ),
        "partial": (call(call(glob("functools", "partial"), glob("os", "system"), touch)), "functools.partial"),
        "methodcaller": (
            call(call(glob("operator", "methodcaller"), uni("system"), touch), os_module),
            "operator.methodcaller",
        ),
        "resolve_name": (call(call(glob("pkgutil", "resolve_name"), uni("os:system")), touch), "pkgutil.resolve_name"),
        "map": (
            call(glob("builtins", "list"), call(glob("builtins", "map"), glob("os", "system"), lst(touch))),
            "builtins.list",
        ),
        "compile": (
            call(
                glob("builtins", "exec"),
                call(glob("builtins", "compile"), uni(f"open({marker!r},'w')"), uni("x"), uni("exec")),
            ),
            "builtins.exec",
        ),
        "reduce": (
            call(glob("functools", "reduce"), glob("builtins", "getattr"), lst(os_module, uni("system"))),
            "functools.reduce",
        ),
        "thread_pool": (call(glob("concurrent.futures.thread", "_WorkItem.run"), b"N"), "_WorkItem"),
        "copyreg": (
            call(glob("copyreg", "_reconstructor"), glob("subprocess", "Popen"), glob("builtins", "object"), b"N"),
            None,
        ),
        "copy_reg": (
            call(glob("copy_reg", "_reconstructor"), glob("subprocess", "Popen"), glob("__builtin__", "object"), b"N"),
            None,
        ),
        "build_partial": (
            call(glob("functools", "partial"), glob("builtins", "print"))
            + tup(glob("os", "system"), tup(touch), b"}", b"}")
            + b"b)R",
            "functools.partial",
        ),
    }
    bites = {
        "getattr",
        "import",
        "import_module",
        "partial",
        "methodcaller",
        "resolve_name",
        "map",
        "compile",
        "build_partial",
    }
    for name, (code, word) in values.items():
        yield Case(f"chain_{name}", ".pkl", whole(code), word, name in bites)
        yield Case(f"chain_{name}_in_a_field", ".pkl", traces(dct(**fields(note=code))), word, name in bites)


def dangerous_names() -> Iterator[Case]:
    """Names that run, crash, connect or read when they are called: refused by name alone."""
    names = """runpy.run_path runpy.run_module pty.spawn webbrowser.open ctypes.CDLL ctypes.string_at
    faulthandler._sigsegv faulthandler._read_null os.abort os._exit os.kill os.execv os.fork os.remove os.putenv
    signal.raise_signal sys.exit sys.setrecursionlimit builtins.breakpoint builtins.input builtins.globals
    builtins.setattr builtins.delattr builtins.vars builtins.memoryview builtins.bytearray builtins.object
    builtins.type builtins.super builtins.dict builtins.set builtins.complex __builtin__.apply __builtin__.file
    types.FunctionType types.CodeType types.ModuleType marshal.loads shelve.open dbm.open socket.socket
    socket.create_connection urllib.request.urlopen http.client.HTTPConnection asyncio.run
    multiprocessing.context.Process threading.Thread atexit.register weakref.finalize site.addsitedir
    importlib.reload _frozen_importlib.__import__ imp.load_source zipimport.zipimporter pydoc.pipepager pydoc.locate
    commands.getoutput nt.system popen2.popen3 platform.popen distutils.spawn.spawn pip.main ensurepip.bootstrap
    numpy.load numpy.fromfile numpy.memmap numpy.core.multiarray.fromfile numpy._core.multiarray.frombuffer
    numpy.core.multiarray.scalar.__globals__ numpy.core._multiarray_umath._reconstruct numpy.ma.core._mareconstruct
    numpy.matrixlib.defmatrix.matrix numpy.recarray numpy.rec.array numpy.random._pickle.__generator_ctor numpy.void
    numpy.object_ numpy.lib.format.read_array numpy.f2py.compile torch.load torch.save torch.hub.load torch.jit.load
    torch.ops.load_library torch._utils._rebuild_tensor torch._utils._rebuild_from_type_v2
    torch._tensor._rebuild_from_type_v2 torch._utils._rebuild_sparse_tensor torch._utils._rebuild_qtensor
    torch._utils._rebuild_device_tensor_from_numpy torch._utils._rebuild_wrapper_subclass torch._utils._rebuild_xla_tensor
    torch.nn.parameter.Parameter torch.Tensor torch.tensor torch.from_file torch.QInt8Storage torch.TypedStorage
    torch.storage.TypedStorage torch.package.PackageImporter torch.distributed.rpc.rpc_sync torch.utils.cpp_extension.load
    torch.multiprocessing.reductions.rebuild_storage_fd torch.serialization._legacy_load
    torch_geometric.data.data.BaseData torch_geometric.data.HeteroData torch_geometric.data.data.Data.__init__
    torch_geometric.data.storage.NodeStorage torch_geometric.io.fs.torch_load torch_geometric.typing.WITH_PT20
    tracestore.create tracestore.open tracestore.ingest.builders.lookup tracestore.store.writer.StoreWriter
    pandas.read_pickle pandas.core.frame.DataFrame joblib.load cloudpickle.loads cloudpickle.cloudpickle._make_function
    dill._dill._create_function dill.loads pickle.Unpickler sklearn.tree._tree.Tree transformers.pipeline
    collections.OrderedDict.fromkeys collections.defaultdict collections.deque collections.Counter
    collections.namedtuple _collections_abc.Mapping uuid._get_command_stdout smtplib.SMTP lib2to3.pgen2.grammar.Grammar.loads
    __main__.Trace cffi.FFI""".split()
    for name in names:
        module, _, attribute = name.rpartition(".")
        yield Case(f"name_{name}", ".pkl", whole(call(named(module, attribute), uni("x"))), name)


def near_misses() -> Iterator[Case]:
    """Names a letter away from the allowed ones, and dotted ways through them."""
    names = {
        "dotted_module": ("numpy.core", "multiarray._reconstruct"),
        "globals": ("numpy._core.multiarray", "_reconstruct.__globals__"),
        "dotted_class": ("numpy", "ndarray.__class__"),
        "mro": ("numpy", "ndarray.__mro__"),
        "subclasses": ("builtins", "bytes.__subclasses__"),
        "fromhex": ("builtins", "bytes.fromhex"),
        "from_keys": ("collections", "OrderedDict.fromkeys"),
        "fullwidth": ("numpy", "ｎdarray"),
        "cyrillic": ("numpy", "ndаrray"),
        "combining": ("numpy", "dtype\u0301"),
        "zero_width": ("numpy", "dtype\u200b"),
        "space_after": ("numpy", "dtype "),
        "space_before": (" numpy", "dtype"),
        "tab": ("numpy\t", "dtype"),
        "nul": ("numpy\0", "dtype"),
        "nul_name": ("numpy", "dtype\0system"),
        "upper": ("Numpy", "dtype"),
        "empty_name": ("numpy", ""),
        "empty_module": ("", "dtype"),
        "both_empty": ("", ""),
        "dots": ("numpy", "...dtype"),
        "bom": ("\ufeffnumpy", "dtype"),
        "surrogate": ("numpy", "dtype\ud800"),
        "newline": ("numpy", "dtype\nsystem"),
        "long": ("n" * 100_000, "dtype"),
        "umath": ("numpy.core._multiarray_umath", "_reconstruct"),
        "storage_module": ("torch.storage", "HalfStorage"),
        "cuda_storage": ("torch.cuda", "HalfStorage"),
        "escape": ("numpy", "\x1b[2Jdtype"),
    }
    for name, (module, attribute) in names.items():
        yield Case(f"near_{name}", ".pkl", whole(named(module, attribute)))
    yield Case("near_crlf", ".pkl", whole(b"cnumpy\r\ndtype\r\n"))
    yield Case("near_not_utf8", ".pkl", whole(b"cnumpy\xff\ndtype\n"))
    for name, code in {"int": num(1), "none": b"N", "bytes": raw(b"numpy"), "list": b"]", "tuple": b")"}.items():
        yield Case(f"module_is_{name}", ".pkl", whole(code + uni("dtype") + b"\x93"))
        yield Case(f"name_is_{name}", ".pkl", whole(uni("numpy") + code + b"\x93"))


def allowed_misused() -> Iterator[Case]:
    """The allowed names called, instantiated and given states in ways their writers never do."""
    builders = {
        "ndarray": NDARRAY,
        "dtype": glob("numpy", "dtype"),
        "reconstruct": RECONSTRUCT,
        "scalar": glob("numpy.core.multiarray", "scalar"),
        "frombuffer": glob("numpy._core.numeric", "_frombuffer"),
        "encode": glob("_codecs", "encode"),
        "bytes": glob("builtins", "bytes"),
        "tensor_v2": glob("torch._utils", "_rebuild_tensor_v2"),
        "tensor_v3": glob("torch._utils", "_rebuild_tensor_v3"),
        "parameter": glob("torch._utils", "_rebuild_parameter"),
        "storage": glob("torch", "HalfStorage"),
        "untyped": glob("torch.storage", "UntypedStorage"),
        "from_bytes": glob("torch.storage", "_load_from_bytes"),
        "data": glob("torch_geometric.data.data", "Data"),
        "attr": glob("torch_geometric.data.data", "DataEdgeAttr"),
        "global_storage": glob("torch_geometric.data.storage", "GlobalStorage"),
        "ordered_dict": glob("collections", "OrderedDict"),
    }
    for name, target in builders.items():
        yield Case(f"{name}_called_with_code", ".pkl", whole(call(target, uni("__import__('os')"), num(-1))))
        yield Case(f"{name}_called_with_itself", ".pkl", whole(call(target, target)))
        yield Case(f"{name}_with_a_state", ".pkl", whole(target + dct(__setstate__=uni("x"), __dict__=b"}") + b"b"))
        yield Case(f"{name}_called_with_a_list", ".pkl", whole(target + b"]R"))
        yield Case(f"{name}_new_with_arguments", ".pkl", whole(target + nums(1) + b"\x81"))
        yield Case(f"{name}_as_a_value", ".pkl", traces(dct(**fields(note=target))))
    states = {"dict": dct(__class__=NDARRAY), "slots": tup(b"}", dct(__reduce__=uni("x"))), "none": b"N", "empty": b")"}
    for name, state in states.items():
        yield Case(f"array_state_{name}", ".pkl", whole(empty_array() + state + b"b"))
        yield Case(f"dtype_state_{name}", ".pkl", whole(dtype("f4") + state + b"b"))
        yield Case(f"dict_state_{name}", ".pkl", whole(b"}" + state + b"b"))
        yield Case(f"list_state_{name}", ".pkl", whole(b"]" + state + b"b"))
    yield Case("array_called", ".pkl", whole(call(array(nums(1), dtype("f2"), b"ab"), num(1))))
    yield Case(
        "encode_rot13", ".pkl", traces(dct(**fields(note=call(glob("_codecs", "encode"), uni("a"), uni("rot13")))))
    )
    yield Case("encode_hex", ".pkl", whole(call(glob("_codecs", "encode"), uni("a"), uni("hex"))))
    yield Case("encode_beyond", ".pkl", whole(call(glob("_codecs", "encode"), uni("Ā"), uni("latin1"))))
    yield Case("bytes_of_a_number", ".pkl", whole(call(glob("builtins", "bytes"), num(1 << 40))))
    yield Case(
        "ordered_dict_of_itself", ".pkl", whole(call(glob("collections", "OrderedDict"), lst(lst(uni("a"), b"]"))))
    )


def in_torch_files(marker: str) -> Iterator[Case]:
    """The same inside each part of a torch file."""
    code = call(glob("os", "system"), uni(f"touch {marker}"))
    yield Case("zip_root", ".pt", pt(code), "os.system")
    yield Case("zip_field", ".pt", pt(sequences(note=code)), "os.system")
    yield Case("zip_persistent_id", ".pt", pt(code + b"Q"), "os.system")
    yield Case(
        "zip_storage_class",
        ".pt",
        pt(sequences(tup(uni("storage"), glob("os", "system"), uni("0"), uni("cpu"), num(4)) + b"Q")),
        "os.system",
    )
    yield Case("zip_second_pickle", ".pt", zip_archive([*pt_entries(code, {}), *pt_entries(code, {}, "other")]), None)
    yield Case("legacy_object", ".pt", legacy(code, {}), "os.system")
    yield Case("legacy_keys", ".pt", legacy(sequences(b"N"), {}, keys=whole(code)), "os.system")
    yield Case("legacy_system", ".pt", legacy(code, {}, system=whole(code)), "os.system", False)
    head = b"\x80\x02\x8a\x0a" + MAGIC.to_bytes(10, "little") + b"."
    yield Case("legacy_protocol", ".pt", head + whole(code), "os.system")
    yield Case("legacy_magic", ".pt", whole(code + b"0\x8a\x0a" + MAGIC.to_bytes(10, "little")), "os.system", True)
    inner = legacy(code, {})
    yield Case(
        "load_from_bytes",
        ".pkl",
        traces(dct(**fields(note=call(glob("torch.storage", "_load_from_bytes"), raw(inner))))),
        "os.system",
    )


def every(marker: str) -> Iterator[Case]:
    for group in (called, forms, chains, in_torch_files):
        yield from group(marker)
    for plain in (dangerous_names, near_misses, allowed_misused):
        yield from plain()
