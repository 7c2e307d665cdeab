"""Values of the standard library, objects of unknown classes and outputs of transformers, read as data."""

import collections
import dataclasses
import datetime
import decimal
import fractions
import pathlib
import pickle
import uuid

import numpy as np
import pytest

import tracestore
from tests.helpers import as_torch, convert, error_of, make_trace, write_pickle
from tests.ingest.readers.trees import read_tree


@dataclasses.dataclass
class Settings:
    """A class that the reader does not know."""

    rate: float = 0.5


UTC_PLUS_2 = datetime.timezone(datetime.timedelta(hours=2))
# Values, and what becomes of them in `extras`.
KEPT = {
    "moment": (datetime.datetime(2024, 5, 1, 12, 30, 1, 70_000), "2024-05-01T12:30:01.070000"),
    "aware": (datetime.datetime(2024, 5, 1, 12, tzinfo=UTC_PLUS_2), "2024-05-01T12:00:00+02:00"),
    "day": (datetime.date(1999, 12, 31), "1999-12-31"),
    "delta": (datetime.timedelta(days=1, seconds=2), 86402.0),
    "set": ({"a"}, ["a"]),
    "frozenset": (frozenset({1}), [1]),
    "path": (pathlib.PurePosixPath("/data/x.json"), "/data/x.json"),
    "decimal": (decimal.Decimal("1.25"), "1.25"),
    "counter": (collections.Counter("aab"), {"a": 2, "b": 1}),
    "default": (collections.defaultdict(list, {"a": [1]}), {"a": [1]}),
    "deque": (collections.deque([1, 2]), [1, 2]),
    "uuid": (uuid.UUID(int=7), str(uuid.UUID(int=7))),
}


@pytest.mark.parametrize("protocol", range(6))
def test_values_of_the_standard_library_are_read(tmp_path, protocol):
    found = read_tree(write_pickle(tmp_path / "a.pkl", {name: value for name, (value, _) in KEPT.items()}, protocol))
    assert found == {name: expected for name, (_, expected) in KEPT.items()}


def test_an_object_in_place_of_a_field_is_refused(tmp_path):
    path = write_pickle(tmp_path / "a.pkl", [make_trace(1) | {"hidden_states": Settings()}])
    text = error_of("convert", path, tmp_path / "s.zarr", code=3)
    assert "a.pkl" in text and "no array is named as hidden states" in text


@pytest.mark.parametrize(
    "value",
    [datetime.datetime, pickle.loads, np.load, print, fractions.Fraction(1, 3), datetime.time(3)],
    ids=["class", "loads", "np.load", "print", "fraction", "time"],
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
    output = transformers.modeling_outputs.CausalLMOutputWithPast(logits=torch.zeros(1, 4, 50), cache=cache, **fields)
    value = [{"question_id": "q", "output": output, "tokens": trace["tokens"]}]
    path = tmp_path / "a.pt"
    if kind == "pickle":
        write_pickle(path, value, protocol)
    else:
        torch.save(value, path, pickle_protocol=protocol, _use_new_zipfile_serialization=kind == "zip")
    output = "a.pt : []/output"
    lines = [f"hidden_states = {output}/hidden_states -> L 1 S D", f"attentions = {output}/attentions -> L 1 H S S"]
    lines += ["question_id = a.pt : []/question_id", "tokens = a.pt : []/tokens -> S", f"ignore = {output}/logits"]
    lines += [f"ignore = {output}/cache"]
    flags = [word for line in lines for word in ("--field", line)]
    convert(path, tmp_path / "s.zarr", "--dtype", "keep", *flags)
    stored = tracestore.open(tmp_path / "s.zarr")[0]
    np.testing.assert_array_equal(stored.hidden_states, torch.stack(trace["hidden_states"]).numpy())
