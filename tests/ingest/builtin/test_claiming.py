"""Test which built-in layout owns a file, and that none takes a file of another kind."""

import gzip
import pickle
import re

import numpy as np
import pytest

import tracestore
from tests.helpers import command, error_of, make_graphs, make_optional, make_trace, make_traces
from tests.ingest.builtin.checks import check_builtin, write
from tracestore.errors import InvalidInputError, UsageError
from tracestore.ingest.builtin.claiming import _matching, claim
from tracestore.ingest.builtin.library import builtins, parse_builtin
from tracestore.ingest.builtin.signature import Signature, facts_of
from tracestore.ingest.layout.patterns import Pattern
from tracestore.ingest.readers import opening
from tracestore.ingest.readers.tree import ListItems, MappingGroup, NumpyArray, StreamItems
from tracestore.store.format.schema import OPTIONAL_FIELDS

RNG = np.random.default_rng(5)


def states(*shape, dtype="f4"):
    return RNG.standard_normal(shape).astype(dtype)


def trace(**changes):
    """Return a trace of the family: L 3, H 2, S 5, D 8; a value of None takes the key away."""
    found = make_trace(4) | changes
    return {name: value for name, value in found.items() if value is not None}


def request(**changes):
    """Return the tensors of vLLM's connector: S 6, L 4, D 16."""
    return {"hidden_states": states(6, 4, 16), "token_ids": np.arange(6)} | changes


def sequences(**changes):
    """Return a preprocessed file of last tokens: N 6, L 3, D 8."""
    found = {"sequences": states(6, 3, 8), "labels": np.zeros(6), "question_ids": [f"q{k}" for k in range(6)]} | changes
    return {name: value for name, value in found.items() if value is not None}


def owners(tmp_path, **files):
    """Write files by name, `__` for the folder and `_DOT_` for the dot; return the owner of each, None without."""
    names = {name.replace("__", "/").replace("_DOT_", "."): value for name, value in files.items()}
    for name, value in names.items():
        write(tmp_path / name, value)
    claims = claim({name: tmp_path / name for name in names}, builtins())
    found = {name: builtin.name for builtin, own in claims.owned.items() for name in own}
    return [found.get(name) for name in names]


OWN = [
    ("traces", "a.pkl", lambda: make_traces(4)),
    ("traces", "a.pkl.gz", lambda: make_traces(4)),
    ("traces", "q1.pt", lambda: trace()),
    ("traces", "a.pkl", lambda: [trace(attentions=None), trace(attentions=None)]),
    ("traces", "a.pkl", lambda: [trace(label=1, score=0.5, note="x", batch_number=3)]),
    ("traces", "a.pkl", lambda: [trace(tokens=np.arange(6), tokens_decoded=None)]),
    *(
        ("traces", "a.pkl", lambda name=name: [trace(generated_answer="answer", **{name: make_optional(5)[name]})])
        for name in OPTIONAL_FIELDS
    ),
    ("traces", "a.pkl", lambda: [{"question_id": "refused"}, trace()]),
    ("traces", "a.pkl", lambda: [trace(question_id=None, num_layers=3, example_id=0, cutoff_method="eos")]),
    ("traces", "a.pkl", lambda: [{"question_id": str(s), "hidden_states": list(states(3, s, 8))} for s in (4, 6, 5)]),
    ("last_tokens", "a.pkl", lambda: [{"question_id": "a", "last_token": states(3, 8)}]),
    ("sequences", "lstm_solo/preprocessed_0.pt", sequences),
    (
        "graphs",
        "gnn/preprocessed_0.pt",
        lambda: {"graphs": [make_graphs(trace())], "question_ids": ["a"], "labels": [1.0]},
    ),
    ("graphs", "sharded_data_part_0.pt", lambda: {"graphs": [make_graphs(trace())], "question_ids": ["a"]}),
    ("vllm", "cmpl-1.safetensors", request),
    (
        "eagle",
        "0/data_1.ckpt",
        lambda: {"hidden_state": states(6, 8), "input_ids": np.arange(6), "loss_mask": np.ones(6, "i8")},
    ),
]


@pytest.mark.parametrize(("tool", "name", "make"), OWN, ids=[f"{tool}-{k}" for k, (tool, _, _) in enumerate(OWN)])
def test_a_tool_owns_its_files(tmp_path, tool, name, make):
    write(tmp_path / name, make())

    claims = claim({name: tmp_path / name}, builtins())

    assert claims.near == {}  # what the nearest layout lacks
    assert ([builtin.name for builtin in claims.owned], claims.rest) == ([tool], {})
    tracestore.convert_files(tmp_path / name, tmp_path / "s.zarr", dry_run=True, skip_bad=True)


# Files that differ from those of a tool in one thing, and would be read as something else.
TRAPS = [
    ("the tokens first", "a.pkl", lambda: [trace(hidden_states=list(states(5, 3, 8)), attentions=None)]),
    ("as many layers as tokens, in one order or the other", "a.pkl", lambda: [trace(hidden_states=list(states(5, 5, 8)), attentions=None)]),
    ("as many ids as layers", "a.pkl", lambda: [trace(hidden_states=list(states(4, 3, 8)), tokens=np.arange(4), tokens_decoded=None, attentions=None)] * 4),
    ("texts of as many tokens as layers", "q1.pt", lambda: trace(hidden_states=list(states(4, 3, 8)), tokens=None, tokens_decoded=list("abcd"), attentions=None)),
    ("tokens first, the first ones as many as layers", "a.pkl", lambda: [trace(hidden_states=list(states(s, 3, 8)), tokens=np.arange(s), tokens_decoded=None, attentions=None) for s in (3, 4, 5, 6)]),
    ("neither tokens nor attention", "a.pkl", lambda: [trace(attentions=None, tokens=None, tokens_decoded=None)]),
    ("two tokens more than states", "a.pkl", lambda: [trace(tokens=np.arange(7), tokens_decoded=None)]),
    ("fewer tokens than states", "a.pkl", lambda: [trace(tokens=np.arange(4), tokens_decoded=None)]),
    ("tokens first, of which the number varies", "a.pkl", lambda: [{"question_id": str(s), "hidden_states": list(states(s, 3, 8))} for s in (4, 6, 5)]),
    ("neither tokens nor attention, and equal lengths", "a.pkl", lambda: [{"question_id": str(k), "hidden_states": list(states(3, 5, 8))} for k in range(3)]),
    ("a batch", "a.pkl", lambda: [trace(hidden_states=[states(4, 5, 8)] * 3)]),
    ("one layer without its axis", "a.pkl", lambda: [trace(hidden_states=states(5, 8))]),
    ("integers", "a.pkl", lambda: [trace(hidden_states=list(np.ones((3, 5, 8), "i1")))]),
    ("attention of another number of layers", "a.pkl", lambda: [trace(attentions=trace()["attentions"][:1])]),
    ("attention of passes", "a.pkl", lambda: [trace(attentions=[a[:, -1:] for a in trace()["attentions"]])]),
    ("more columns than states", "a.pkl", lambda: [trace(attentions=list(states(3, 2, 5, 7)))]),
    ("another label", "a.pkl", lambda: [trace(rating=1)]),
    ("scores of other values", "a.pkl", lambda: [trace(scores={"logits": states(3)})]),
    ("scores of steps", "a.pkl", lambda: [trace(scores=list(states(2, 1, 9)))]),
    ("a second array of states", "a.pkl", lambda: [trace(prompt_hidden_states=list(states(3, 2, 8)))]),
    ("attention under another name", "a.pkl", lambda: [trace(attentions=None, attn=trace()["attentions"])]),
    ("a mask of padding", "a.pkl", lambda: [trace(attention_mask=np.array([0, 1, 1, 1, 1]))]),
    ("labels of tokens", "a.pkl", lambda: [trace(labels=[0, 1, 1, 0, 1])]),
    ("ids of several traces", "a.pkl", lambda: [trace(question_id=["a", "b", "c"])]),
    ("another key of ids", "a.pkl", lambda: [trace(question_id=None, qid="a")]),
    ("a step of an answer", "a.pkl", lambda: [trace(step=0), trace(step=1)]),
    ("a layer of an answer", "a.pkl", lambda: [trace(layer_idx=0)]),
    ("columns", "a.pkl", lambda: {"hidden_states": [list(states(3, 5, 8))] * 4, "question_id": ["a", "b", "c", "d"]}),
    ("vectors", "a.pkl", lambda: [{"question_id": "a", "last_token": states(8)}]),
    ("the last tokens of a batch", "a.pkl", lambda: [{"question_id": "a", "last_token": states(4, 3, 8)}]),
    ("the hidden size first", "a.pkl", lambda: [{"question_id": "a", "last_token": states(8, 3)}]),
    ("sequences of tokens", "p.pt", lambda: sequences(sequences=states(6, 3, 5, 8))),
    ("sequences with the hidden size first", "p.pt", lambda: sequences(sequences=states(6, 8, 3))),
    ("sequences of token ids", "p.pt", lambda: sequences(sequences=np.ones((6, 3, 8), "i8"))),
    ("a second column of labels", "p.pt", lambda: sequences(is_correct=np.ones(6))),
    ("labels of two columns", "p.pt", lambda: sequences(labels=np.zeros((6, 2)))),
    ("a label too few", "p.pt", lambda: sequences(labels=np.zeros(5))),
    ("an id too few", "p.pt", lambda: sequences(question_ids=["a"] * 5)),
    ("a second array of states of all tokens", "p.pt", lambda: sequences(hidden_states=states(6, 3, 8))),
    ("last tokens of a request", "r.safetensors", lambda: request(hidden_states=states(1, 4, 16))),
    ("layers first", "r.safetensors", lambda: request(hidden_states=states(4, 6, 16))),
    ("as many layers as tokens", "r.safetensors", lambda: request(hidden_states=states(6, 6, 16))),
    ("states fewer than ids, as a cached prefix leaves them", "r.safetensors", lambda: request(token_ids=np.arange(7))),
    ("a batch of requests", "r.safetensors", lambda: request(hidden_states=states(2, 6, 4, 16))),
    ("eight bits", "r.safetensors", lambda: request(hidden_states=np.ones((6, 4, 16), "i1"))),
    ("attention of a request", "r.safetensors", lambda: request(attentions=states(4, 2, 6, 6))),
    ("no mask of the loss", "data_0.ckpt", lambda: {"hidden_state": states(6, 8), "input_ids": np.arange(6)}),
    ("ids of the prompt alone", "data_0.ckpt", lambda: {"hidden_state": states(6, 8), "input_ids": np.arange(4), "loss_mask": np.ones(6, "i8")}),
    ("graphs without ids", "g.pt", lambda: {"graphs": [make_graphs(trace())]}),
    ("one graph a trace", "g.pt", lambda: {"graphs": make_graphs(trace()), "question_ids": ["a", "b", "c"]}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "make"), [(n, m) for _, n, m in TRAPS], ids=[what for what, _, _ in TRAPS])
def test_a_file_of_another_kind_has_no_owner(tmp_path, name, make):
    write(tmp_path / name, make())

    assert claim({name: tmp_path / name}, builtins()).rest == {name: None}


NEAR = [
    ("traces", lambda: trace(verdict="x"), "verdict: found str 'x', which is no part of it"),
    ("traces", lambda: trace(labels=1), "labels: found int, expected group (N) or none (0)"),
    ("traces", lambda: trace(brain=states(1, 3)), "brain: found an array (1, 3), which is no part of it"),
    ("traces", lambda: trace(tokens=np.arange(7), tokens_decoded=None), "found 7 as T, expected 5 as S"),
    ("traces", lambda: trace(attentions=None, tokens=None, tokens_decoded=None), "found none of attentions, tokens"),
    ("last_tokens", lambda: {"question_id": "a", "last_token": states(3, 8), "rating": 1}, "rating: found int '1'"),
]


@pytest.mark.parametrize(("tool", "make", "why"), NEAR, ids=[why for _, _, why in NEAR])
def test_a_refusal_names_the_built_in_layout_that_nearly_reads_a_file(tmp_path, tool, make, why):
    write(tmp_path / "a.pkl", [make()])
    found = f"a.pkl: the built-in layout {tool} does not read it: {why}"

    assert found in error_of("convert", tmp_path / "a.pkl", tmp_path / "s.zarr", code=3)
    assert found in command("inspect", tmp_path / "a.pkl", check=0).stdout


def test_a_file_that_a_built_in_layout_reads_is_near_none(tmp_path):
    write(tmp_path / "a.pkl", make_traces(2))
    write(tmp_path / "b.pkl", [{"other": states(3, 8)}])

    assert claim({name: tmp_path / name for name in ("a.pkl", "b.pkl")}, builtins()).near == {}


def test_files_of_several_tools_in_one_folder(tmp_path):
    found = owners(tmp_path, a_DOT_pkl=make_traces(3), p_DOT_pt=sequences(), r_DOT_safetensors=request())

    assert found == ["traces", "sequences", "vllm"]


@pytest.mark.parametrize("names", [["q1.pt", "q2.pt", "q3.pt"], ["a.pt", "sub/b.pt", "c.pt"]])
@pytest.mark.parametrize("sizes", [(3, 4), (2, 3), (3, 3)], ids=["S is L", "T is L", "S and T are L"])
@pytest.mark.parametrize("has_attention", [True, False])
def test_other_files_show_the_order_of_equal_axes(tmp_path, names, sizes, has_attention):
    for name, (num_states, num_ids) in zip(names, [sizes, sizes, (5, 5)], strict=True):
        more = {"attentions": None} if not has_attention else {"attentions": list(states(3, 2, num_states, num_states))}
        one = trace(hidden_states=list(states(3, num_states, 8)), tokens=np.arange(num_ids), tokens_decoded=None)
        write(tmp_path / name, {k: v for k, v in (one | more).items() if v is not None})
    files = {name: tmp_path / name for name in names}

    claims = claim(files, builtins())
    alone = claim({name: files[name] for name in names[:2]}, builtins())

    assert [sorted(own) for own in claims.owned.values()] == [sorted(names)] and not claims.rest and not claims.near
    assert not alone.owned or has_attention


def test_a_file_that_two_layouts_match_is_refused_with_both_names(tmp_path):
    one, two = (
        parse_builtin(name, 'files = "z"\nwhat = "x"\ndefined = "y"\n[layout]\nhidden_states = "*.pkl : []/hs -> L S D"\n'
                      '[signature."*.pkl"]\nat = "[]"\nmust = {hs = "float L S D"}\n')
        for name in ("one", "two")
    )  # fmt: skip
    write(tmp_path / "a.pkl", [{"hs": states(2, 3, 8)}])

    with pytest.raises(InvalidInputError, match="layouts one and two match it"):
        claim({"a.pkl": tmp_path / "a.pkl"}, [*one, *two])


def test_files_that_belong_to_states_have_no_owner_without_them(tmp_path):
    assert owners(tmp_path, ml_tqa_bleurt_score_DOT_npy=np.ones(5, "f4")) == [None]
    name = "save_for_eval/tqa_hal_det/most_likely_llama_gene_embeddings_layer_wise.npy"
    write(tmp_path / name, states(5, 4, 12))
    both = {n: tmp_path / n for n in (name, "ml_tqa_bleurt_score.npy")}
    assert list(claim({name: tmp_path / name}, builtins()).rest) == [name]
    assert not claim(both, builtins()).rest


def test_a_special_case_of_a_tool(tmp_path):
    write(tmp_path / "hidden_states/hs_0.safetensors", request())
    write(tmp_path / "config.json", {"target_layer_ids": [2, 16, 29, 32], "verifier": "x"})
    files = {n: tmp_path / n for n in ("hidden_states/hs_0.safetensors", "config.json")}

    (builtin,) = claim(files, builtins()).owned

    assert builtin.name == "speculators"


def test_of_many_alike_files_some_are_looked_at(tmp_path, monkeypatch):
    opened, real = [], opening.open_tree
    monkeypatch.setattr(opening, "open_tree", lambda path: opened.append(path) or real(path))
    for k in range(300):
        as_many = {"hidden_states": states(4, 4, 16), "token_ids": np.arange(4)} if k == 0 else {}  # tokens as layers
        write(tmp_path / f"r-{k}.safetensors", request(**as_many))
    files = {f"r-{k}.safetensors": tmp_path / f"r-{k}.safetensors" for k in range(300)}

    (own,) = claim(files, builtins()).owned.values()

    assert len(own) == 300 and len(opened) <= 64


def test_two_of_many_compressed_files_are_looked_at_and_each_is_checked(tmp_path, monkeypatch):
    opened, real = [], opening.open_tree
    monkeypatch.setattr(opening, "open_tree", lambda path, **_: opened.append(path) or real(path))
    (tmp_path / "in").mkdir()
    for k in range(8):
        rows = make_traces(2) if k != 2 else [{"acts": np.ones((2, 3, 4), "f4")}]
        for position, row in enumerate(rows):
            row["question_id"] = f"q{k}-{position}"
        (tmp_path / f"in/a_{k}.pkl.gz").write_bytes(gzip.compress(pickle.dumps(rows)))
    files = {path.name: path for path in sorted((tmp_path / "in").iterdir())}

    (own,) = claim(files, builtins()).owned.values()
    assert len(own) == 8 and len(opened) <= 2
    done = command("convert", tmp_path / "in", tmp_path / "s.zarr", check=3)

    assert "a_2.pkl.gz" in done.stderr


def test_a_look_reads_the_first_item_alone(tmp_path):
    data = pickle.dumps(make_traces(30), 3)  # without frames, each of which is read as a whole
    # What follows the first traces is damaged, up to the end that says that the root is a list.
    (tmp_path / "a.pkl").write_bytes(data[: len(data) * 2 // 3] + b"\xff" * 100 + data[-2:])

    assert [b.name for b in claim({"a.pkl": tmp_path / "a.pkl"}, builtins()).owned] == ["traces"]


@pytest.mark.parametrize(
    ("value", "facts"),
    [
        (NumpyArray(np.ones((2, 3), "u2")), ("int", (2, 3))),
        (ListItems([1.5, 2.5], lambda v: v), ("float", (2,))),
        (ListItems([], lambda v: v), ("none", (0,))),
        (MappingGroup({}, lambda v: v), ("group", ())),
        (None, ("none", ())),
        (True, ("bool", ())),
        ("x", ("text", ())),
    ],
)
def test_facts_of_values(value, facts):
    assert facts_of(value) == facts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('what = "x"', "needs files, defined, signature"),
        ("what", "built-in layout t"),
        ('files = "z"\nwhat = "x"\ndefined = "y"\nunknown = 1\n[signature."a"]', "unknown unknown"),
        (
            'files = "z"\nwhat = "x"\ndefined = "y"\n[layout]\nhidden_states = "a"\n[signature."a"]\nmust = {x = "wide L"}',
            "kind wide",
        ),
        (
            'files = "z"\nwhat = "x"\ndefined = "y"\n[layout]\nhidden_states = "a"\n[signature."a"]\nmust = {x = 1}',
            "'1': found the kind 1, expected one of any, array, bool",
        ),
        (
            'files = "z"\nwhat = "x"\ndefined = "y"\n[layout]\nhidden_states = "a"\n[signature."a"]\nconditions = ["L > S"]',
            "L > S",
        ),
    ],
)
def test_wrong_files_of_tools(text, message):
    with pytest.raises(UsageError, match=message):
        for builtin in parse_builtin("t", text):
            check_builtin(builtin)


def test_lines_without_a_signature_are_found():
    (builtin,) = parse_builtin(
        "t", 'files = "z"\nwhat = "x"\ndefined = "y"\n[layout]\nhidden_states = "a"\n[signature."b"]'
    )
    with pytest.raises(AssertionError, match=r"of lines alone .'a'., of signatures alone .'b'."):
        check_builtin(builtin)


@pytest.mark.parametrize("builtin", builtins(), ids=lambda builtin: builtin.name)
def test_every_tool_is_a_layout_whose_files_have_signatures(builtin):
    check_builtin(builtin)
    assert builtin.needed
    assert re.search(r"^docs/|/blob/[0-9a-f]{7,40}/", builtin.source["defined"]), (
        "name a page, or the lines of a commit"
    )


def test_a_signature_checks_what_is_read():
    signature = Signature.parse({"at": "[]", "must": {"x": "float S D"}})
    rows = [{"x": np.ones(3)}, {"x": np.ones((3, 2))}]
    wrong, right = (ListItems([row], lambda row: MappingGroup(row, NumpyArray)) for row in rows)

    assert signature.checked(right, "eagle") is right
    with pytest.raises(InvalidInputError, match=r"expected float \(S, D\): .* built-in layout eagle"):
        signature.checked(wrong, "eagle")


def test_checked_items_of_a_large_buffer_are_still_views_of_it():
    signature = Signature.parse({"at": "[]", "must": {"x": "int"}})
    items = StreamItems([MappingGroup({"x": 1}, lambda value: value)], is_lent=True)
    found = signature.checked(items, "eagle")
    assert found.is_lent and [item["x"] for item in found] == [1]


def test_a_column_without_a_name_is_named_in_a_message():
    signature = Signature.parse({"must": {"a": "int"}})

    differs = signature.difference(MappingGroup({"a": 1, "": "0"}, lambda value: value))

    assert differs == "the column without a name: found str '0', which is no part of it"


def test_a_pattern_that_built_in_layouts_share_is_matched_once(tmp_path, monkeypatch):
    known, matched, match = builtins(), [], Pattern.match
    monkeypatch.setattr(Pattern, "match", lambda self, name: matched.append(self) or match(self, name))
    _matching("a/b/notes.xyz", known)
    assert len(matched) == len({text for builtin in known for text in builtin.patterns})
