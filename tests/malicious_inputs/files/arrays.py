"""Arrays with invalid dtypes, shapes or bytes, and traces that break the schema."""

from collections.abc import Iterator

from tests.malicious_inputs.files.case import (
    NDARRAY,
    Case,
    array,
    build,
    call,
    dct,
    dtype,
    empty_array,
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

SCALAR = glob("numpy._core.multiarray", "scalar")
FROMBUFFER = glob("numpy._core.numeric", "_frombuffer")


def hidden(value: bytes) -> bytes:
    """Return a file whose only trace has the value as its hidden states."""
    return traces(trace(hidden_states=lst(value)))


def dtype_texts() -> Iterator[Case]:
    """Yield dtype strings that NumPy or the reader must refuse."""
    texts = (
        "O O8 V8 V0 |V16 M8 M8[ns] <m8[s] S99999999 U999999999 S-1 f3 f1 i3 i16 u0 c4 b2 ?8 g f f2f2 (2,3)f4 f4,i4 2f4 "
    )
    texts += "|O4 =O8 e d float16 object void <f2; f2\0 f² f𝟐 ٣f f٢ >>f2 <f02 U S T n p P H complex512 b1b1"
    for text in [*texts.split(" "), "", " f2", "f2\n", "f" * 10_000, "{'names':['a'],'formats':['O']}"]:
        code = array(nums(1, 1), dtype(text), b"\0\0")
        yield Case(f"dtype_{text[:20].encode('ascii', 'backslashreplace').decode()!r}", ".pkl", hidden(code))
    for name, argument in {
        "class": NDARRAY,
        "number": num(2),
        "list": lst(uni("f2")),
        "bytes": raw(b"f2"),
        "none": b"N",
    }.items():
        yield Case(f"dtype_of_{name}", ".pkl", whole(call(glob("numpy", "dtype"), argument)))
    yield Case("dtype_of_nothing", ".pkl", whole(call(glob("numpy", "dtype"))))


def dtype_states() -> Iterator[Case]:
    """Yield states that dtype.__setstate__ accepts; one of them crashes the interpreter."""
    none = b"N"
    base = [num(3), uni("<"), none, none, none, num(-1), num(-1), num(0)]
    changes = {
        "subarray": {2: tup(dtype("f4"), nums(4))},
        "names": {3: tup(uni("a"))},
        "fields": {4: dct(a=tup(dtype("f4"), num(0)))},
        "names_of_text": {3: uni("x")},
        "order_word": {1: uni("big")},
        "order_number": {1: num(1)},
        "order_none": {1: none},
        "order_unknown": {1: uni("!")},
    }
    for name, change in changes.items():
        state = [change.get(k, part) for k, part in enumerate(base)]
        yield Case(f"dtype_state_{name}", ".pkl", hidden(array(nums(1, 1), dtype("f2", state=tup(*state)), b"\0\0")))
    for count in (0, 1, 2, 7):
        yield Case(
            f"dtype_state_of_{count}", ".pkl", hidden(array(nums(1, 1), dtype("f2", state=tup(*base[:count])), b"\0\0"))
        )
    crash = b"cnumpy\ndtype\n(S'i4'\nI0\nI1\ntR(I3\nS'|'\nNS'x'\nNI-1\nI-1\nI63\ntb."
    yield Case("dtype_flags_crash", ".pkl", crash)
    object_flag = tup(num(3), uni("|"), none, none, none, num(8), num(8), num(63))
    yield Case("object_dtype_over_bytes", ".pkl", hidden(array(nums(1), dtype("O", state=object_flag), b"\x41" * 8)))


def object_arrays() -> Iterator[Case]:
    """Yield object arrays that are not flat lists of strings, numbers or arrays."""
    o = dtype("O", "|")
    for name, (shape, data) in {
        "of_dicts": (nums(1), lst(b"}")),
        "of_lists": (nums(1), lst(b"]")),
        "of_none": (nums(1), lst(b"N")),
        "of_classes": (nums(1), lst(NDARRAY)),
        "square": (nums(1, 1), lst(num(1))),
        "too_few": (nums(3), lst(num(1))),
        "tuple": (nums(1), tup(num(1))),
        "text": (nums(1), uni("a")),
        "itself": (nums(1), b"](h\x0ae"),
    }.items():
        code = empty_array() + b"q\x0a" + tup(num(1), shape, o, b"\x89", data) + b"b"
        yield Case(f"object_array_{name}", ".pkl", traces(trace(hidden_states=lst(code), note=code)))


def shapes() -> Iterator[Case]:
    """Yield shapes that are invalid or do not match the bytes."""
    top = 1 << 62
    values = {
        "negative": nums(-1, -4),
        "one_negative": nums(-2, 2),
        "minus_one": nums(-1),
        "too_large": nums(3, 2),
        "too_small": nums(1, 2),
        "product_overflow_64": nums(top, 4, 2),
        "product_wraps_to_4": nums(1 << 32, 1 << 32, 1 << 30, 4),
        "overflow_with_item_size": nums((1 << 63) + 2, 2),
        "beyond_64_bits": nums(1 << 100),
        "empty_giant": nums(1 << 60, 0),
        "empty_giants": nums(0, 1 << 62, 1 << 62),
        "bool": tup(b"\x88", num(4)),
        "float": tup(b"G\x40" + bytes(7)),
        "text": uni("22"),
        "nested": tup(nums(2), nums(2)),
        "none": b"N",
        "dict": b"}",
        "bytes": raw(b"\2\2"),
        "dims_33": nums(*[1] * 33),
        "dims_65": nums(*[1] * 65),
        "dims_100000": nums(*[1] * 100_000),
        "class": tup(NDARRAY),
        "scalar_shape": b")",
    }
    for name, shape in values.items():
        yield Case(f"shape_{name}", ".pkl", hidden(array(shape, dtype("f2"), b"\x00\x3c" * 4)))
        flat = call(FROMBUFFER, raw(b"\x00\x3c" * 4), dtype("f2"), shape, uni("C"))
        yield Case(f"shape_{name}_protocol_5", ".pkl", hidden(flat))


def array_states() -> Iterator[Case]:
    """Yield states of arrays and scalars that are incomplete or of wrong types."""
    good = [num(1), nums(2, 2), dtype("f2"), b"\x89", raw(b"\x00\x3c" * 4)]
    changes = {
        "short_data": {4: raw(b"\x00\x3c" * 3)},
        "long_data": {4: raw(b"\x00\x3c" * 5)},
        "no_data": {4: raw(b"")},
        "data_none": {4: b"N"},
        "data_number": {4: num(1 << 40)},
        "data_list": {4: lst(num(1))},
        "data_wide_text": {4: uni("Ā" * 8)},
        "data_array": {4: halves(2, 2)},
        "dtype_text": {2: uni("f2")},
        "dtype_class": {2: glob("numpy", "dtype")},
        "dtype_none": {2: b"N"},
        "fortran_wrong_bytes": {3: b"\x88", 4: raw(b"\0" * 7)},
    }
    for name, change in changes.items():
        state = tup(*(change.get(k, part) for k, part in enumerate(good)))
        yield Case(f"state_{name}", ".pkl", hidden(build(empty_array(), state)))
    for count in (0, 1, 3, 6):
        yield Case(f"state_of_{count}", ".pkl", hidden(build(empty_array(), tup(*(good * 2)[:count]))))
    yield Case("never_filled", ".pkl", hidden(empty_array()))
    yield Case(
        "filled_with_itself",
        ".pkl",
        hidden(empty_array() + b"q\x0a" + tup(num(1), nums(1), dtype("f2"), b"\x89", b"h\x0a") + b"b"),
    )
    yield Case("reconstruct_subclass", ".pkl", hidden(empty_array(glob("numpy", "dtype"))))
    for order in (uni("K"), uni("A"), b"N", num(1), uni("")):
        yield Case(
            f"frombuffer_order_{order.hex()}",
            ".pkl",
            hidden(call(FROMBUFFER, raw(bytes(8)), dtype("f2"), nums(2, 2), order)),
        )
    yield Case("frombuffer_of_text", ".pkl", hidden(call(FROMBUFFER, uni("abcd"), dtype("f2"), nums(1, 2), uni("C"))))
    yield Case("frombuffer_object", ".pkl", hidden(call(FROMBUFFER, raw(bytes(8)), dtype("O"), nums(1, 1), uni("C"))))
    yield Case(
        "frombuffer_out_of_band",
        ".pkl",
        b"\x80\x05" + hidden(call(FROMBUFFER, b"\x97\x98", dtype("f2"), nums(1, 1), uni("C")))[2:],
        "0x97",
    )
    for name, arguments in {
        "short": (dtype("f8"), raw(b"abc")),
        "long": (dtype("f2"), raw(b"abcd")),
        "object": (dtype("O"), raw(bytes(8))),
        "of_none": (dtype("f8"), b"N"),
        "no_dtype": (uni("f8"), raw(bytes(8))),
        "one_argument": (dtype("f8"),),
        "text_size": (dtype("U4"), raw(b"abc")),
        "bad_utf32": (dtype("U1"), raw(b"\xff\xff\xff\xff")),
    }.items():
        yield Case(f"scalar_{name}", ".pkl", traces(trace(note=call(SCALAR, *arguments))))


# Values of another type that mean one thing, as in a table.
_ONE_MEANING = ("temperature_text", "id_float", "answer_number", "prompt_length_float", "sample_text")


def schema() -> Iterator[Case]:
    """Yield valid pickles of traces that break the schema."""
    f4 = lambda count, value: array(nums(1, count), dtype("f4"), value * count)  # noqa: E731
    three = lst(halves(2, 2), halves(2, 2), halves(2, 2))
    changes: dict[str, tuple[dict[str, bytes | None], str | None]] = {
        "no_hidden_states": ({"hidden_states": None}, "hidden_states"),
        "no_attentions": ({"attentions": None}, "attentions"),
        "zero_layers": ({"hidden_states": lst()}, "zero layers"),
        "zero_tokens": (
            {"hidden_states": lst(halves(0, 2)), "attentions": lst(halves(1, 0, 0)), "tokens": lst()},
            "tokens",
        ),
        "zero_columns": ({"hidden_states": lst(halves(2, 0))}, "hidden_states"),
        "zero_heads": ({"attentions": lst(halves(0, 2, 2))}, "attentions"),
        "ragged_layers": (
            {"hidden_states": lst(halves(2, 2), halves(1, 2)), "attentions": lst(halves(1, 2, 2), halves(1, 2, 2))},
            "hidden_states[1]",
        ),
        "ragged_columns": ({"hidden_states": lst(halves(2, 2), halves(2, 3))}, "hidden_states[1]"),
        "attention_other_s": ({"attentions": lst(halves(1, 3, 3))}, "attentions[0]"),
        "attention_not_square": ({"attentions": lst(halves(1, 2, 3))}, "attentions[0]"),
        "attention_other_heads": (
            {"hidden_states": lst(halves(2, 2), halves(2, 2)), "attentions": lst(halves(1, 2, 2), halves(2, 2, 2))},
            "attentions[1]",
        ),
        "attention_flat": ({"attentions": lst(halves(2, 2))}, "attentions"),
        "attention_fewer_layers": ({"hidden_states": three}, "attentions"),
        "hidden_one_axis": ({"hidden_states": lst(halves(4))}, "hidden_states"),
        "hidden_four_axes": ({"hidden_states": halves(1, 2, 2, 2)}, "axes"),
        "hidden_numbers": ({"hidden_states": lst(num(1), num(2))}, "hidden_states"),
        "hidden_nested_lists": ({"hidden_states": lst(lst(num(1)))}, "hidden_states"),
        "hidden_none": ({"hidden_states": b"N"}, "hidden_states"),
        "hidden_text": ({"hidden_states": uni("abc")}, "hidden_states"),
        "hidden_dict": ({"hidden_states": b"}"}, "hidden_states"),
        "hidden_integers": ({"hidden_states": lst(array(nums(2, 2), dtype("i4"), bytes(16)))}, "hidden_states"),
        "hidden_bool": ({"hidden_states": lst(array(nums(2, 2), dtype("b1", "|"), bytes(4)))}, "hidden_states"),
        "hidden_complex": ({"hidden_states": lst(array(nums(2, 2), dtype("c8"), bytes(32)))}, "hidden_states"),
        "hidden_strings": ({"hidden_states": lst(array(nums(2, 2), dtype("S2", "|"), bytes(8)))}, "hidden_states"),
        "hidden_longdouble": ({"hidden_states": lst(array(nums(2, 2), dtype("f16"), bytes(64)))}, "hidden_states"),
        "mixed_dtypes": (
            {"hidden_states": lst(halves(2, 2), array(nums(2, 2), dtype("f4"), bytes(16)))},
            "hidden_states",
        ),
        "beyond_float16": (
            {
                "hidden_states": lst(f4(2, b"\0\0\x80\x7f"[:3] + b"\x7e")),
                "attentions": lst(halves(1, 1, 1)),
                "tokens": lst(num(1)),
            },
            "--dtype keep",
        ),
        "tokens_few": ({"tokens": lst(num(1))}, "tokens"),
        "tokens_many": ({"tokens": lst(num(1), num(2), num(3), num(4))}, "tokens"),
        "tokens_float": ({"tokens": lst(b"G" + bytes(8), num(1))}, "tokens"),
        "tokens_bool": ({"tokens": lst(b"\x88", b"\x88")}, "tokens"),
        "tokens_text": ({"tokens": uni("ab")}, "tokens"),
        "tokens_dict": ({"tokens": b"}"}, "tokens"),
        "tokens_float_array": ({"tokens": halves(2)}, "tokens"),
        "tokens_two_axes": ({"tokens": array(nums(2, 1), dtype("i8"), bytes(16))}, "tokens"),
        "tokens_beyond_int32": ({"tokens": lst(num(1 << 31), num(1))}, "tokens"),
        "tokens_below_int32": ({"tokens": lst(num(-(1 << 31) - 1), num(1))}, "tokens"),
        "tokens_beyond_int64": ({"tokens": lst(num(1 << 64), num(1))}, "tokens"),
        "tokens_uint64": ({"tokens": array(nums(2), dtype("u8"), b"\xff" * 16)}, "tokens"),
        "decoded_text": ({"tokens_decoded": uni("ab")}, "tokens_decoded"),
        "decoded_numbers": ({"tokens_decoded": lst(num(1), num(2))}, "tokens_decoded"),
        "decoded_few": ({"tokens_decoded": lst(uni("a"))}, "tokens_decoded"),
        "decoded_bytes": ({"tokens_decoded": lst(raw(b"a"), raw(b"b"))}, "tokens_decoded"),
        "decoded_one_token_more": ({"tokens_decoded": lst(uni("a"), uni("b"), uni("c"))}, "tokens_decoded"),
        "logprob_texts": ({"token_logprob": lst(uni("1"), uni("2"))}, "token_logprob"),
        "logprob_one_long_text": ({"token_logprob": lst(uni("x" * 500_000), *[uni("")] * 20_000)}, "token_logprob"),
        "logprob_one_token_more": ({"token_logprob": halves(3)}, "token_logprob"),
        "entropy_dict": ({"token_entropy": b"}"}, "token_entropy"),
        "top_ids_one_axis": ({"top_ids": lst(num(1), num(2))}, "top_ids"),
        "top_ids_ragged": ({"top_ids": lst(lst(num(1)), lst(num(1), num(2)))}, "top_ids"),
        "top_ids_beyond_int32": ({"top_ids": lst(lst(num(1 << 31)), lst(num(1)))}, "top_ids"),
        "mask_two": ({"generated_mask": lst(num(2), num(1))}, "generated_mask"),
        "mask_float": ({"special_mask": halves(2)}, "special_mask"),
        "label_huge": ({"token_label": lst(num(1 << 70), num(1))}, "token_label"),
        "answer_span_beyond": ({"answer_span": lst(num(0), num(3))}, "answer_span"),
        "answer_span_number": ({"answer_span": num(1)}, "answer_span"),
        "temperature_text": ({"temperature": uni("0.5")}, "temperature"),
        "seed_huge": ({"seed": num(1 << 64)}, "seed"),
        "spans_number": ({"spans": num(1)}, "spans"),
        "spans_empty_dict": ({"spans": lst(b"}")}, "spans[0]"),
        "id_list": ({"question_id": lst(num(1))}, "question_id"),
        "id_float": ({"question_id": b"G" + bytes(8)}, "question_id"),
        "id_empty": ({"question_id": uni("")}, "question_id"),
        "id_bool": ({"question_id": b"\x88"}, "question_id"),
        "id_bytes": ({"question_id": raw(b"q")}, "question_id"),
        "global_id_dict": ({"question_id": None, "global_example_id": b"}"}, "global_example_id"),
        "answer_number": ({"generated_answer_clean": num(1)}, "generated_answer_clean"),
        "answer_bytes": ({"generated_answer": raw(b"a")}, "generated_answer"),
        "text_list": ({"generated_text": lst(uni("a"))}, "generated_text"),
        "question_dict": ({"question": b"}"}, "question"),
        "prompt_length_negative": ({"prompt_length": num(-1)}, "prompt_length"),
        "prompt_length_huge": ({"prompt_length": num(1 << 31)}, "prompt_length"),
        "prompt_length_text": ({"prompt_length": uni("3")}, "prompt_length"),
        "prompt_length_float": ({"prompt_length": b"G" + bytes(8)}, "prompt_length"),
        "sample_negative": ({"sample": num(-1)}, "sample"),
        "sample_huge": ({"sample": num(1 << 40)}, "sample"),
        "sample_text": ({"sample": uni("0")}, "sample"),
        "sample_bool": ({"sample": b"\x88"}, "sample"),
    }
    for name, (change, word) in changes.items():
        data = traces(trace(), trace(**change))
        yield Case(f"schema_{name}", ".pkl", data, None if name in _ONE_MEANING else word, is_read=name in _ONE_MEANING)


GROUPS = (dtype_texts, dtype_states, object_arrays, shapes, array_states, schema)
