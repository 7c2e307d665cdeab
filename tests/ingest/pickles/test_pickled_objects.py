"""Values of the standard library, objects of unknown classes and outputs of transformers, read as data."""

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import pickle
import types
import uuid

import numpy as np
import pytest

import tracestore
from tests.helpers import as_torch, convert, error_of, make_trace, make_traces, write_pickle


@dataclasses.dataclass
class Settings:
    """A class that the reader does not know."""

    rate: float = 0.5


@dataclasses.dataclass
class AnyTrace:
    """A trace of an unknown class."""

    hidden_states: list
    attentions: list
    tokens: np.ndarray
    question_id: str


class Kind(enum.Enum):
    """An enumeration that the reader does not know."""

    ONE = 1


class MyDict(dict):
    """A subclass of dict that the reader does not know."""


UTC_PLUS_2 = datetime.timezone(datetime.timedelta(hours=2))
# Values, and what becomes of them in `extras`.
KEPT = {
    "moment": (datetime.datetime(2024, 5, 1, 12, 30, 1, 70_000), "2024-05-01T12:30:01.070000"),
    "aware": (datetime.datetime(2024, 5, 1, 12, tzinfo=UTC_PLUS_2), "2024-05-01T12:00:00+02:00"),
    "day": (datetime.date(1999, 12, 31), "1999-12-31"),
    "time": (datetime.time(3, 4, 5), "03:04:05"),
    "delta": (datetime.timedelta(days=1, seconds=2), 86402.0),
    "set": ({"a"}, ["a"]),
    "frozenset": (frozenset({1}), [1]),
    "path": (pathlib.PurePosixPath("/data/x.json"), "/data/x.json"),
    "decimal": (decimal.Decimal("1.25"), "1.25"),
    "fraction": (fractions.Fraction(1, 3), "1/3"),
    "counter": (collections.Counter("aab"), {"a": 2, "b": 1}),
    "default": (collections.defaultdict(list, {"a": [1]}), {"a": [1]}),
    "deque": (collections.deque([1, 2]), [1, 2]),
    "uuid": (uuid.UUID(int=7), str(uuid.UUID(int=7))),
}


@pytest.mark.parametrize("protocol", range(6))
def test_values_of_the_standard_library_are_kept(tmp_path, protocol):
    trace = make_trace(1) | {name: value for name, (value, _) in KEPT.items()} | {"complex": 1 + 2j}
    path = write_pickle(tmp_path / "a.pkl", [trace], protocol)
    done = convert(path, tmp_path / "s.zarr")
    extras = tracestore.open(tmp_path / "s.zarr")[0].extras
    assert extras["complex"] == 1 + 2j
    assert {name: extras[name] for name in KEPT} == {name: expected for name, (_, expected) in KEPT.items()}
    assert "not stored" not in done.stdout


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_objects_of_unknown_classes_are_dropped_by_name(tmp_path, protocol):
    traces = [
        t
        | {
            "settings": Settings(),
            "kind": Kind.ONE,
            "meta": {"when": 1, "settings": Settings(), "list": [Settings(), 2]},
            "class": Settings if protocol == 2 else None,
        }
        for t in make_traces(3)
    ]
    done = convert(write_pickle(tmp_path / "a.pkl", traces, protocol), tmp_path / "s.zarr", "--json")
    store = tracestore.open(tmp_path / "s.zarr")
    assert store[2].extras["meta"] == {"when": 1, "list": [None, 2]} and "settings" not in store[2].extras
    for text in ('"settings": 3', '"kind": 3', '"meta.settings": 3', '"meta.list[]": 3'):
        assert text in done.stdout


@pytest.mark.parametrize("protocol", [0, 1, 2, 4])
def test_a_trace_may_be_an_object(tmp_path, protocol):
    traces = make_traces(3)
    fields = [{k: t[k] for k in ("hidden_states", "attentions", "tokens", "question_id")} for t in traces]
    for name, values in {
        "dataclass": [AnyTrace(**f) for f in fields],
        "namespace": [types.SimpleNamespace(**f) for f in fields],
        "arguments": [argparse.Namespace(**f) for f in fields],
        **({"dict": [MyDict(f) for f in fields]} if protocol > 1 else {}),
    }.items():
        for kind, value in (("list", values), ("dict", {f"q{k}": v for k, v in enumerate(values)})):
            path = write_pickle(tmp_path / f"{name}-{kind}.pkl", value, protocol)
            convert(path, tmp_path / f"{name}-{kind}.zarr")
            store = tracestore.open(tmp_path / f"{name}-{kind}.zarr")
            assert store.question_ids == ["q0", "q1", "q2"]
            for trace, source in zip(store, traces, strict=True):
                np.testing.assert_array_equal(trace.hidden_states, np.stack(source["hidden_states"]))


def test_an_object_in_place_of_a_field_is_refused(tmp_path):
    path = write_pickle(tmp_path / "a.pkl", [make_trace(1) | {"hidden_states": Settings()}])
    text = error_of("convert", path, tmp_path / "s.zarr", code=3)
    assert "trace 0, hidden_states" in text and "test_pickled_objects.Settings" in text


@pytest.mark.parametrize(
    "value", [datetime.datetime, pickle.loads, np.load, print], ids=["class", "loads", "np.load", "print"]
)
def test_other_names_of_known_libraries_are_refused(tmp_path, value):
    path = write_pickle(tmp_path / "a.pkl", [make_trace(1) | {"x": value}])
    assert "a.pkl" in error_of("convert", path, tmp_path / "s.zarr", code=3)


WRONG = [
    b"cdatetime\ndatetime\n(C\x02abtR",
    b"cdatetime\ndatetime\n(C\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xfftR",
    b"cdatetime\ndate\n(K\x01tR",
    b"cdatetime\ntimedelta\n(K\x01K\x01\x8a\x20" + b"\x7f" * 32 + b"tR",
    b"cbuiltins\nset\n(K\x01tR",
    b"cbuiltins\ncomplex\n(K\x01tR",
    b"cpathlib\nPosixPath\n(K\x01tR",
    b"cdecimal\nDecimal\n)R",
    b"ccollections\ndefaultdict\n(K\x01tR",
    b"cuuid\nUUID\n)\x81}(\x8c\x03intK\x01s\x8c\x01xK\x01ub",
]


@pytest.mark.parametrize("code", WRONG, ids=range(len(WRONG)))
def test_standard_values_with_wrong_arguments_are_refused(tmp_path, code):
    data = pickle.dumps([make_trace(1) | {"x": "MARKER"}], 4)
    assert data.count(b"\x8c\x06MARKER") == 1
    # Without frames, because the length changes.
    data = pickle.PROTO + b"\x04" + data[11:].replace(b"\x8c\x06MARKER", code)
    (tmp_path / "a.pkl").write_bytes(data)
    assert "a.pkl" in error_of("convert", tmp_path / "a.pkl", tmp_path / "s.zarr", code=3)


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("kind", ["pickle", "zip", "legacy"])
def test_outputs_of_transformers_are_dicts(tmp_path, kind, protocol):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    trace = as_torch(make_trace(1, tokens=4, dtype="f4"))
    cache = transformers.DynamicCache()
    cache.update(torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2), 0)
    fields = {name: tuple(layer[None] for layer in trace[name]) for name in ("hidden_states", "attentions")}
    output = transformers.modeling_outputs.CausalLMOutputWithPast(
        logits=torch.zeros(1, 4, 50), past_key_values=cache, **fields
    )
    value = [{"question_id": "q", "output": output, "tokens": trace["tokens"]}]
    path = tmp_path / "a.pt"
    if kind == "pickle":
        write_pickle(path, value, protocol)
    else:
        torch.save(value, path, pickle_protocol=protocol, _use_new_zipfile_serialization=kind == "zip")
    flags = ["--map", "hidden_states=output.hidden_states,attentions=output.attentions", "--dtype", "keep"]
    done = convert(path, tmp_path / "s.zarr", *flags)
    stored = tracestore.open(tmp_path / "s.zarr")[0]
    np.testing.assert_array_equal(stored.hidden_states, torch.stack(trace["hidden_states"]).numpy())
    assert "output.past_key_values (1)" in done.stdout


def test_the_output_object_of_generate_is_a_trace(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=50, **sizes, attn_implementation="eager")
    model = transformers.LlamaForCausalLM(config).eval()
    options = {"output_hidden_states": True, "output_attentions": True, "output_logits": True}
    out = model.generate(
        torch.randint(0, 50, (1, 5)),
        max_new_tokens=4,
        do_sample=False,
        return_dict_in_generate=True,
        eos_token_id=None,
        pad_token_id=0,
        **options,
    )
    write_pickle(tmp_path / "a.pkl", [out, out | {"question_id": "own"}])
    done = convert(tmp_path / "a.pkl", tmp_path / "s.zarr")
    store = tracestore.open(tmp_path / "s.zarr")
    assert store.question_ids == ["a.pkl:0", "own"] and store[0].num_tokens == 8 and store.num_layers == 3
    np.testing.assert_array_equal(store[0].tokens, out.sequences[0].numpy())
    assert "past_key_values (2)" in done.stdout and "one token more than hidden states in 2 traces" in done.stdout
