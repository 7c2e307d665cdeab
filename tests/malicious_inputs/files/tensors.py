"""Torch storages and tensors out of bounds, and PyG graphs that are cyclic or inconsistent."""

import struct
from collections.abc import Iterator

from tests.malicious_inputs.files.case import (
    NO_LAYOUT,
    Case,
    build,
    call,
    dct,
    dtype,
    glob,
    halves,
    lst,
    num,
    nums,
    raw,
    trace,
    traces,
    tup,
    uni,
    whole,
)
from tests.malicious_inputs.files.containers import (
    DATA,
    FOUR_HALVES,
    GLOBAL_STORAGE,
    GRAPH_STORAGES,
    REBUILD,
    archive,
    graph,
    graph_fields,
    graphs,
    legacy,
    legacy_sequences,
    legacy_storage,
    new,
    pt,
    pt_entries,
    sequences,
    storage,
    tensor,
)

HALF, PARAMETER = glob("torch", "HalfStorage"), glob("torch._utils", "_rebuild_parameter")
V3, LOADER = glob("torch._utils", "_rebuild_tensor_v3"), glob("torch.storage", "_load_from_bytes")
# Size, stride, gradient and hooks of a valid tensor.
LAYOUT = (nums(2, 1, 2), nums(2, 2, 1), b"\x89", b"}")


def persistent(*items: bytes) -> bytes:
    """Refer to a storage by a persistent id."""
    return tup(*items) + b"Q"


def tensors() -> Iterator[Case]:
    """Yield offsets, sizes and strides out of bounds, in each container and with each rebuild function."""
    layouts = {
        "offset": ((2, 1, 2), (2, 2, 1), 1),
        "offset_at_end": ((1, 1, 1), (1, 1, 1), 4),
        "offset_huge": ((2, 1, 2), (2, 2, 1), 1 << 62),
        "offset_negative": ((2, 1, 2), (2, 2, 1), -1),
        "size": ((2, 1, 3), (3, 3, 1), 0),
        "size_huge": ((1 << 40, 1, 2), (0, 0, 1), 0),
        "size_negative": ((2, -1, -2), (2, 2, 1), 0),
        "size_overflow": ((1 << 32, 1 << 32, 4), (0, 0, 0), 0),
        "size_wraps": ((1 << 62, 4, 1), (1, 1, 1), 0),
        "expanded": ((4, 4, 4), (0, 0, 0), 0),
        "stride": ((2, 1, 2), (3, 3, 1), 0),
        "stride_huge": ((2, 1, 2), (1 << 61, 1, 1), 0),
        "stride_wraps": ((2, 1, 2), ((1 << 63) - 1, 1, 1), 0),
        "stride_negative": ((2, 1, 2), (-2, 2, 1), 1),
        "stride_missing": ((2, 1, 2), (2, 1), 0),
        "stride_more": ((2, 1, 2), (2, 2, 1, 1), 0),
        "dims": ((1,) * 70, (1,) * 70, 0),
        "empty_giant": ((1 << 60, 0, 1 << 60), (1, 1, 1), 0),
        "zero_rows": ((0, 1, 2), (2, 2, 1), 0),
        "two_axes": ((2, 2), (2, 1), 0),
        "no_axes": ((), (), 0),
    }
    for name, (size, stride, offset) in layouts.items():
        value = sequences(tensor(storage("0", 4), size, stride, offset))
        yield Case(f"tensor_{name}", ".pt", pt(value))
        value = sequences(tensor(legacy_storage("0", 4), size, stride, offset))
        yield Case(f"legacy_tensor_{name}", ".pt", legacy(value))
        if name != "two_axes":
            states = lst(tensor(call(LOADER, raw(legacy(legacy_storage("0", 4)))), size, stride, offset))
            yield Case(f"plain_tensor_{name}", ".pkl", traces(trace(hidden_states=states)))
    first = storage("0", 4)
    odd = {
        "offset_bool": call(REBUILD, first, b"\x88", nums(1, 1, 2), nums(2, 2, 1), b"\x89", b"}"),
        "offset_none": call(REBUILD, first, b"N", *LAYOUT),
        "offset_float": call(REBUILD, first, b"G" + bytes(8), *LAYOUT),
        "size_text": call(REBUILD, first, num(0), uni("212"), nums(2, 2, 1), b"\x89", b"}"),
        "size_floats": call(REBUILD, first, num(0), tup(b"G" + bytes(8)), nums(1), b"\x89", b"}"),
        "hooks": call(REBUILD, first, num(0), nums(2, 1, 2), nums(2, 2, 1), b"\x89", dct(hook=num(1))),
        "three_arguments": call(REBUILD, first, num(0), nums(2, 1, 2)),
        "storage_is_array": tensor(halves(4)),
        "storage_is_tensor": tensor(tensor(first, (4,), (1,))),
        "storage_is_class": tensor(HALF),
        "storage_is_bytes": tensor(raw(FOUR_HALVES)),
        "v3_no_dtype": call(V3, first, num(0), *LAYOUT),
        "v3_dtype_text": call(V3, first, num(0), *LAYOUT, uni("float16")),
        "v3_wider_dtype": call(V3, first, num(0), *LAYOUT, glob("torch", "float64")),
        "parameter_of_list": call(PARAMETER, b"]", b"\x88", b"}"),
        "parameter_hooks": call(PARAMETER, tensor(first), b"\x88", dct(h=num(1))),
        "untyped_without_v3": tensor(storage("0", 8, "UntypedStorage", "torch.storage")),
        "integers": tensor(storage("0", 1, "LongStorage"), (1, 1, 1), (1, 1, 1)),
        "only_a_storage": first,
        "only_a_class": HALF,
        "size_class": call(glob("torch", "Size"), nums(-1)),
        "device": call(glob("torch", "device"), uni("cuda")),
    }
    for name, value in odd.items():
        if name != "offset_bool":
            yield Case(f"tensor_{name}", ".pt", pt(sequences(value)))
        yield Case(f"tensor_{name}_at_the_top", ".pt", pt(value))


def storages() -> Iterator[Case]:
    """Yield storages whose keys, types, sizes or contents are inconsistent."""
    keys = {
        "numel_more": storage("0", 5),
        "numel_less": storage("0", 3),
        "numel_huge": storage("0", 1 << 62),
        "numel_negative": storage("0", -4),
        "numel_overflow": storage("0", (1 << 64) + 4),
        "numel_text": persistent(uni("storage"), HALF, uni("0"), uni("cpu"), uni("4")),
        "type_wider": storage("0", 4, "DoubleStorage"),
        "type_narrower": storage("0", 4, "ByteStorage"),
        "type_not_one": persistent(uni("storage"), glob("torch", "float16"), uni("0"), uni("cpu"), num(4)),
        "type_text": persistent(uni("storage"), uni("HalfStorage"), uni("0"), uni("cpu"), num(4)),
        "word": persistent(uni("module"), HALF, uni("0"), uni("cpu"), num(4)),
        "short": persistent(uni("storage"), HALF, uni("0")),
        "empty": b")Q",
        "list": b"]Q",
        "text": uni("0") + b"Q",
        "key_number": persistent(uni("storage"), HALF, num(0), uni("cpu"), num(4)),
        "key_missing": storage("7", 4),
        "key_empty": storage("", 4),
    }
    for name, key in keys.items():
        yield Case(f"storage_{name}", ".pt", pt(sequences(tensor(key))))
        own = key[:-2] + b"NtQ" if key.endswith(b"tQ") else key
        yield Case(f"legacy_storage_{name}", ".pt", legacy(sequences(tensor(own))))
    for name, other in {"types": storage("0", 4, "ShortStorage"), "sizes": storage("0", 2)}.items():
        note = tensor(other, (4 if name == "types" else 2,), (1,))
        yield Case(f"storage_two_{name}", ".pt", pt(sequences(tensor(storage("0", 4)), note=note)), "two ways")
    good = legacy_sequences()
    cases = {
        "keys_none": {"keys": whole(b"N")},
        "keys_numbers": {"keys": whole(lst(num(0)))},
        "keys_twice": {"keys": whole(lst(uni("0"), uni("0")))},
        "keys_other": {"keys": whole(lst(uni("1")))},
        "keys_empty": {"keys": whole(b"]")},
        "keys_more": {"keys": whole(lst(uni("0"), uni("1")))},
        "keys_dict": {"keys": whole(dct(a=num(1)))},
        "count_more": {"counts": {"0": 5}},
        "count_less": {"counts": {"0": 3}},
        "count_negative": {"counts": {"0": -4}},
        "count_huge": {"counts": {"0": 1 << 62}},
        "protocol": {"protocol": 1000},
        "system_big": {"system": whole(dct(protocol_version=num(1001), little_endian=b"\x89"))},
        "system_number": {"system": whole(dct(little_endian=num(1)))},
        "system_none": {"system": whole(b"N")},
        "system_without": {"system": whole(b"}")},
    }
    for name, change in cases.items():
        yield Case(f"legacy_{name}", ".pt", legacy(good, **change))
    view = legacy_storage("0", 4, view=tup(uni("1"), num(0), num(4)))
    untyped = legacy_storage("0", 8, "UntypedStorage")
    yield Case("legacy_view_metadata", ".pt", legacy(sequences(tensor(view))), "view")
    yield Case("legacy_untyped", ".pt", legacy(sequences(tensor(untyped))))
    yield Case("legacy_no_storage", ".pt", legacy(good, {}))
    yield Case("legacy_short_storage", ".pt", legacy(good, {"0": FOUR_HALVES[:-1]}, counts={"0": 4}), "truncated")
    one = legacy(legacy_storage("0", 4))
    inner = {
        "of_zip": pt(storage("0", 4)),
        "of_tensor": legacy(tensor(legacy_storage("0", 4), (4,), (1,))),
        "of_itself": legacy(call(LOADER, raw(one)), {}),
        "of_pickle": whole(b"]"),
        "of_garbage": b"garbage",
        "of_nothing": b"",
        "cut": one[:-3],
        "trailing": one + b"x",
        "count": legacy(legacy_storage("0", 4), counts={"0": 1 << 40}),
    }
    for name, data in inner.items():
        states = lst(tensor(call(LOADER, raw(data)), (2, 2), (2, 1)))
        yield Case(f"from_bytes_{name}", ".pkl", traces(trace(hidden_states=states)))
    for name, argument in {"text": uni("x"), "number": num(1 << 40), "none": b"N", "array": halves(4)}.items():
        yield Case(f"from_bytes_of_{name}", ".pkl", whole(call(LOADER, argument)))
    yield Case("from_bytes_in_zip", ".pt", pt(sequences(call(LOADER, raw(one)))))
    yield Case("from_bytes_in_legacy", ".pt", legacy(sequences(call(LOADER, raw(one))), {}))
    states = lst(tensor(storage("0", 4), (2, 2), (2, 1)))
    yield Case("storage_in_plain_pickle", ".pkl", traces(trace(hidden_states=states)), "persistent")


def sequence_files() -> Iterator[Case]:
    """Yield dicts of sequences that break the schema."""
    value, ids = tensor(storage("0", 4)), lst(uni("a"), uni("b"))
    changes = {
        "no_ids": (dct(sequences=value, labels=lst(num(0), num(1))), NO_LAYOUT),
        "no_labels": (dct(sequences=value, question_ids=ids), NO_LAYOUT),
        "few_ids": (sequences(question_ids=lst(uni("a"))), NO_LAYOUT),
        "ids_numbers_float": (sequences(question_ids=lst(b"G" + bytes(8), uni("b"))), NO_LAYOUT),
        "ids_empty_text": (sequences(question_ids=lst(uni(""), uni("b"))), "question_ids"),
        "ids_text": (sequences(question_ids=uni("ab")), NO_LAYOUT),
        "ids_dict": (sequences(question_ids=dct(a=num(1), b=num(2))), NO_LAYOUT),
        "few_labels": (sequences(labels=lst(num(1))), NO_LAYOUT),
        "labels_text": (sequences(labels=uni("01")), NO_LAYOUT),
        "labels_words": (sequences(labels=lst(uni("yes"), uni("no"))), NO_LAYOUT),
        "labels_dict": (sequences(labels=b"}"), NO_LAYOUT),
        "labels_nested": (sequences(labels=lst(lst(num(1)), lst(num(1), num(2)))), NO_LAYOUT),
        "labels_none": (sequences(labels=b"N"), NO_LAYOUT),
        "sequences_list": (sequences(lst(halves(1, 2))), NO_LAYOUT),
        "sequences_none": (sequences(b"N"), NO_LAYOUT),
        "sequences_text_dtype": (sequences(dtype("f2")), None),
    }
    for name, (value, word) in changes.items():
        yield Case(f"sequences_{name}", ".pt", pt(value), word)


def stored(state: bytes) -> bytes:
    """Return the storage of a PyG object."""
    return build(new(GLOBAL_STORAGE), state)


def graph_files() -> Iterator[Case]:
    """Yield dicts of graphs: PyG objects that are cyclic, incomplete or inconsistent."""
    node, loop = new(DATA) + b"q\xc8", b"q\xc9" + dct(_mapping=dct(x=b"h\xc8"), _parent=b"h\xc8")
    values = {
        "store_is_itself": build(node, dct(_store=b"h\xc8")),
        "field_is_the_graph": build(node, dct(_store=stored(loop))),
        "no_state": new(DATA),
        "state_none": build(new(DATA), b"N"),
        "state_list": build(new(DATA), b"]"),
        "state_tuple": build(new(DATA), tup(b"}", b"}")),
        "no_mapping": build(new(DATA), dct(_store=stored(b"}"))),
        "mapping_list": build(new(DATA), dct(_store=stored(dct(_mapping=b"]")))),
        "mapping_is_itself": build(new(DATA), dct(_store=stored(b"q\xc9" + dct(_mapping=b"h\xc9")))),
        "store_never_built": build(new(DATA), dct(_store=new(GLOBAL_STORAGE))),
        "store_number": build(new(DATA), dct(_store=num(1))),
        "made_with_arguments": DATA + nums(1) + b"\x81",
        "called": call(DATA, num(1)),
        "only_a_class": DATA,
        "a_list": b"]",
        "a_number": num(1),
        "a_tensor": tensor(storage("x", 4), (2, 2), (2, 1)),
        "number_keys": b"}K\x01Ns",
    }
    for field in ("x", "edge_index", "edge_attr"):
        values |= {
            f"{field}_{kind}": graph(graph_fields(**{field: v}))
            for kind, v in {"none": b"N", "list": lst(num(1)), "text": uni("a"), "graph": b"h\xc8"}.items()
        }
    values |= {
        "x_one_axis": graph(graph_fields(x=tensor(storage("x", 4), (4,), (1,)))),
        "x_no_rows": graph(graph_fields(x=tensor(storage("x", 4), (0, 2), (2, 1)))),
        "x_integers": graph(graph_fields(x=tensor(storage("i", 2, "LongStorage"), (1, 2), (2, 1)))),
        "index_three_rows": graph(graph_fields(edge_index=tensor(storage("i", 2, "LongStorage"), (1, 2), (2, 1)))),
        "index_floats": graph(graph_fields(edge_index=tensor(storage("x", 4), (2, 1), (1, 1)))),
        "weights_more": graph(graph_fields(edge_attr=tensor(storage("x", 4), (2, 1), (1, 1)))),
        "weights_two_columns": graph(graph_fields(edge_attr=tensor(storage("x", 4), (1, 2), (1, 1)))),
        "weights_integers": graph(graph_fields(edge_attr=tensor(storage("i", 2, "LongStorage"), (1, 1), (1, 1)))),
        "num_nodes": graph(graph_fields(num_nodes=num(3))),
        "num_nodes_text": graph(graph_fields(num_nodes=uni("2"))),
        "num_nodes_escape": graph(graph_fields(num_nodes=uni("\x1b[2J"))),
        "num_nodes_huge": graph(graph_fields(num_nodes=num(1 << 60))),
    }
    for name, layer in values.items():
        yield Case(f"graph_{name}", ".pt", archive(pt_entries(graphs(layer), GRAPH_STORAGES)))
    ends = {
        "outside": (0, 2),
        "negative": (-1, 0),
        "huge": (0, 1 << 40),
        "wraps": (0, 1 << 32),
        "least": (-(1 << 63), 0),
    }
    for name, nodes in ends.items():
        files = pt_entries(graphs(), GRAPH_STORAGES | {"i": struct.pack("<2q", *nodes)})
        yield Case(f"graph_edge_{name}", ".pt", archive(files), "edge_index")
    tops = {
        "no_ids": (dct(graphs=lst(lst(graph()))), NO_LAYOUT),
        "few_ids": (graphs(question_ids=b"]"), NO_LAYOUT),
        "more_labels": (graphs(labels=lst(num(1), num(0))), NO_LAYOUT),
        "no_traces": (graphs(graphs=b"]"), NO_LAYOUT),
        "no_layers": (graphs(graphs=lst(b"]")), NO_LAYOUT),
        "graphs_dict": (graphs(graphs=b"}"), NO_LAYOUT),
        "graphs_text": (graphs(graphs=uni("abc")), NO_LAYOUT),
        "graphs_flat": (graphs(graphs=lst(graph())), NO_LAYOUT),
        "graphs_none": (graphs(graphs=b"N"), NO_LAYOUT),
        "layers_differ": (
            graphs(graphs=lst(lst(graph(), graph(graph_fields(x=tensor(storage("x", 4), (4, 1), (1, 1))))))),
            "graphs[1].x",
        ),
        "graph_at_the_top": (graph(), None),
        "graphs_in_a_list": (lst(graph()), None),
    }
    for name, (value, word) in tops.items():
        yield Case(f"graphs_{name}", ".pt", archive(pt_entries(value, GRAPH_STORAGES)), word)


GROUPS = (tensors, storages, sequence_files, graph_files)
