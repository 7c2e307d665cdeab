"""Names that no trace file has, names similar to accepted ones, and accepted names misused."""

from collections.abc import Iterator

from tests.malicious_inputs.files.case import (
    NDARRAY,
    NO_LAYOUT,
    RECONSTRUCT,
    Case,
    array,
    call,
    dct,
    dtype,
    empty_array,
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

# Their classes are read as data, without a call: the fields of an object with the name of the class.
_OTHER_LIBRARIES = ("pip", "pandas", "joblib", "cloudpickle", "dill", "sklearn", "transformers", "__main__", "cffi")
_DANGEROUS = """
    runpy.run_path runpy.run_module pty.spawn webbrowser.open ctypes.CDLL ctypes.string_at faulthandler._sigsegv
    faulthandler._read_null os.abort os._exit os.kill os.execv os.fork os.remove os.putenv signal.raise_signal
    sys.exit sys.setrecursionlimit builtins.breakpoint builtins.input builtins.globals builtins.setattr
    builtins.delattr builtins.vars builtins.memoryview builtins.bytearray builtins.object builtins.type
    builtins.super builtins.dict builtins.set builtins.complex __builtin__.apply __builtin__.file types.FunctionType
    types.CodeType types.ModuleType marshal.loads shelve.open dbm.open socket.socket socket.create_connection
    urllib.request.urlopen http.client.HTTPConnection asyncio.run multiprocessing.context.Process threading.Thread
    atexit.register weakref.finalize site.addsitedir importlib.reload _frozen_importlib.__import__ imp.load_source
    zipimport.zipimporter pydoc.pipepager pydoc.locate commands.getoutput nt.system popen2.popen3 platform.popen
    distutils.spawn.spawn pip.main ensurepip.bootstrap numpy.load numpy.fromfile numpy.memmap
    numpy.core.multiarray.fromfile numpy._core.multiarray.frombuffer numpy.core.multiarray.scalar.__globals__
    numpy.core._multiarray_umath._reconstruct numpy.ma.core._mareconstruct numpy.matrixlib.defmatrix.matrix
    numpy.recarray numpy.rec.array numpy.random._pickle.__generator_ctor numpy.void numpy.object_
    numpy.lib.format.read_array numpy.f2py.compile torch.load torch.save torch.hub.load torch.jit.load
    torch.ops.load_library torch._utils._rebuild_tensor torch._utils._rebuild_from_type_v2
    torch._tensor._rebuild_from_type_v2 torch._utils._rebuild_sparse_tensor torch._utils._rebuild_qtensor
    torch._utils._rebuild_device_tensor_from_numpy torch._utils._rebuild_wrapper_subclass
    torch._utils._rebuild_xla_tensor torch.nn.parameter.Parameter torch.Tensor torch.tensor torch.from_file
    torch.QInt8Storage torch.TypedStorage torch.storage.TypedStorage torch.package.PackageImporter
    torch.distributed.rpc.rpc_sync torch.utils.cpp_extension.load
    torch.multiprocessing.reductions.rebuild_storage_fd torch.serialization._legacy_load
    torch_geometric.data.data.BaseData torch_geometric.data.HeteroData torch_geometric.data.data.Data.__init__
    torch_geometric.data.storage.NodeStorage torch_geometric.io.fs.torch_load torch_geometric.typing.WITH_PT20
    tracestore.create tracestore.open tracestore.ingest.pickles.pickle_reader.pickle_reader
    tracestore.store.write.writer.StoreWriter pandas.read_pickle pandas.core.frame.DataFrame joblib.load
    cloudpickle.loads cloudpickle.cloudpickle._make_function dill._dill._create_function dill.loads pickle.Unpickler
    sklearn.tree._tree.Tree transformers.pipeline collections.OrderedDict.fromkeys collections.defaultdict
    collections.deque collections.Counter collections.namedtuple _collections_abc.Mapping uuid._get_command_stdout
    smtplib.SMTP lib2to3.pgen2.grammar.Grammar.loads __main__.Trace cffi.FFI
"""


def dangerous_names() -> Iterator[Case]:
    """Yield callables that run code, crash, connect or read; the name alone must be refused."""
    for name in _DANGEROUS.split():
        module, _, attribute = name.rpartition(".")
        is_data = name.partition(".")[0] in _OTHER_LIBRARIES and not name.endswith("DataFrame")
        word = NO_LAYOUT if is_data else name
        yield Case(f"name_{name}", ".pkl", whole(call(named(module, attribute), uni("x"))), word)


def near_misses() -> Iterator[Case]:
    """Yield names that differ from accepted ones in a letter, and dotted names through them."""
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


# Classes whose name is a text where it is a value.
_TEXTS = ("ndarray", "storage", "untyped", "data", "attr", "global_storage")


def allowed_misused() -> Iterator[Case]:
    """Yield accepted names, called, instantiated or given states as no writer does."""
    targets = {
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
    for name, target in targets.items():
        yield Case(f"{name}_called_with_code", ".pkl", whole(call(target, uni("__import__('os')"), num(-1))))
        yield Case(f"{name}_called_with_itself", ".pkl", whole(call(target, target)))
        yield Case(f"{name}_with_a_state", ".pkl", whole(target + dct(__setstate__=uni("x"), __dict__=b"}") + b"b"))
        yield Case(f"{name}_called_with_a_list", ".pkl", whole(target + b"]R"))
        yield Case(f"{name}_new_with_arguments", ".pkl", whole(target + nums(1) + b"\x81"))
        yield Case(f"{name}_as_a_value", ".pkl", traces(trace(note=target)), is_read=name in _TEXTS)
    states = {"dict": dct(__class__=NDARRAY), "slots": tup(b"}", dct(__reduce__=uni("x"))), "none": b"N", "empty": b")"}
    for name, state in states.items():
        yield Case(f"array_state_{name}", ".pkl", whole(empty_array() + state + b"b"))
        yield Case(f"dtype_state_{name}", ".pkl", whole(dtype("f4") + state + b"b"))
        yield Case(f"dict_state_{name}", ".pkl", whole(b"}" + state + b"b"))
        yield Case(f"list_state_{name}", ".pkl", whole(b"]" + state + b"b"))
    yield Case("array_called", ".pkl", whole(call(array(nums(1), dtype("f2"), b"ab"), num(1))))
    yield Case("encode_rot13", ".pkl", traces(trace(note=call(glob("_codecs", "encode"), uni("a"), uni("rot13")))))
    yield Case("encode_hex", ".pkl", whole(call(glob("_codecs", "encode"), uni("a"), uni("hex"))))
    yield Case("encode_beyond", ".pkl", whole(call(glob("_codecs", "encode"), uni("Ā"), uni("latin1"))))
    yield Case("bytes_of_a_number", ".pkl", whole(call(glob("builtins", "bytes"), num(1 << 40))))
    yield Case(
        "ordered_dict_of_itself", ".pkl", whole(call(glob("collections", "OrderedDict"), lst(lst(uni("a"), b"]"))))
    )


GROUPS = (dangerous_names, near_misses, allowed_misused)
