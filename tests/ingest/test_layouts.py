"""Layouts of the arrays of a trace, and of the traces of a file, that are converted like those of the schema."""

import pickle

import numpy as np
import pytest

import tracestore
from tests.helpers import command, convert, make_traces, write_pickle


def stored(tmp_path, value, *flags):
    """Convert a pickled value and return the open store."""
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps(value, 4))
    convert(path, tmp_path / "s.zarr", *flags)
    return tracestore.open(tmp_path / "s.zarr")


def batched(trace):
    """Return the trace with a batch dimension, as Hugging Face models return it."""
    names = ("hidden_states", "attentions")
    return trace | {name: [layer[None] for layer in trace[name]] for name in names} | {"tokens": trace["tokens"][None]}


def passes(trace, prompt):
    """Return the trace as the output of generate(): one pass for the prompt, and one for each further token."""
    ends = [prompt, *range(prompt + 1, len(trace["tokens"]) + 1)]
    begins = [0, *ends[:-1]]
    hidden = [[h[None, a:b] for h in trace["hidden_states"]] for a, b in zip(begins, ends, strict=True)]
    attention = [[x[None, :, a:b, :b] for x in trace["attentions"]] for a, b in zip(begins, ends, strict=True)]
    rest = {k: v for k, v in trace.items() if k not in ("hidden_states", "attentions", "tokens")}
    return rest | {"hidden_states": hidden, "attentions": attention, "sequences": trace["tokens"][None]}


def as_lists(trace):
    return trace | {name: [layer.tolist() for layer in trace[name]] for name in ("hidden_states", "attentions")}


LAYOUTS = {
    "batch dimension of one": batched,
    "stacked": lambda t: t | {name: np.stack(t[name]) for name in ("hidden_states", "attentions")},
    "stacked, batch dimension of one": lambda t: (
        t | {n: np.stack(t[n])[:, None] for n in ("hidden_states", "attentions")}
    ),
    "passes of generate()": lambda t: passes(t, 2),
    "nested lists": as_lists,
    "input_ids": lambda t: {("input_ids" if key == "tokens" else key): value for key, value in t.items()},
    "embeddings": lambda t: t | {"hidden_states": [t["hidden_states"][0] + 1, *t["hidden_states"]]},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_arrays(tmp_path, name):
    traces = make_traces(3, tokens=4)
    store = stored(tmp_path, [LAYOUTS[name](t) for t in traces], "--attention", "heads")
    for trace, expected in zip(store, traces, strict=True):
        assert trace.question_id == expected["question_id"]
        np.testing.assert_array_equal(trace.hidden_states, np.stack(expected["hidden_states"]))
        np.testing.assert_array_equal(trace.attention, np.stack(expected["attentions"]))
        np.testing.assert_array_equal(trace.tokens, expected["tokens"])
        assert "input_ids" not in trace.extras and "sequences" not in trace.extras


@pytest.mark.parametrize("name", ["by id", "traces", "one generate() output"])
def test_layouts_of_files(tmp_path, name):
    traces = make_traces(3, tokens=4)
    bare = [{k: v for k, v in t.items() if k != "question_id"} for t in traces]
    value = {
        "by id": {t["question_id"]: b for t, b in zip(traces, bare, strict=True)},
        "traces": {"traces": traces, "model": "m"},
        "one generate() output": passes(traces[0], 3),
    }[name]
    store = stored(tmp_path, value)
    expected = traces[: len(store)]
    assert store.question_ids == [t["question_id"] for t in expected]
    for trace, source in zip(store, expected, strict=True):
        np.testing.assert_array_equal(trace.hidden_states, np.stack(source["hidden_states"]))


def test_dropped_embeddings_are_reported(tmp_path):
    path = write_pickle(tmp_path / "a.pkl", [LAYOUTS["embeddings"](t) for t in make_traces(2)])
    done = convert(path, tmp_path / "s.zarr")
    assert "the embeddings of 2 traces are not stored" in done.stdout
    kept = convert(path, tmp_path / "t.zarr", "--attention", "none")
    assert "are not stored" not in kept.stdout and tracestore.open(tmp_path / "t.zarr").num_layers == 4


def test_refusals_say_what_to_do(tmp_path):
    trace = make_traces(1, tokens=4)[0]
    batch = trace | {"hidden_states": [np.stack([h, h]) for h in trace["hidden_states"]]}
    bare = {key: value for key, value in trace.items() if key != "attentions"}
    for values, advice in (([batch], "save each answer of a batch as a trace"), ([bare, trace], "--attention none")):
        path = write_pickle(tmp_path / "a.pkl", values)
        done = command("convert", path, tmp_path / "s.zarr")
        assert done.returncode == 3 and done.stderr.count("\n") == 1 and advice in done.stderr


@pytest.mark.parametrize("name", ["gap", "layers", "sizes"])
def test_passes_that_do_not_fit_together_are_refused(tmp_path, name):
    trace = passes(make_traces(1, tokens=5)[0], 2)
    if name == "gap":
        del trace["attentions"][1], trace["hidden_states"][1]
    elif name == "layers":
        trace["hidden_states"][1] = trace["hidden_states"][1][:-1]
    else:
        trace["hidden_states"][1] = [h[..., :-1] for h in trace["hidden_states"][1]]
    path = write_pickle(tmp_path / "a.pkl", [trace])
    done = command("convert", path, tmp_path / "s.zarr")
    assert done.returncode == 3 and done.stderr.count("\n") == 1


def test_the_output_of_a_model_is_converted(tmp_path):
    """Tensors of a batch of one, embeddings in front, and one token more than states, as generate() returns them."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=50, **sizes, attn_implementation="eager")
    model = transformers.LlamaForCausalLM(config).eval()
    prompt = torch.randint(0, 50, (1, 5))
    wanted = {"output_hidden_states": True, "output_attentions": True}
    out = model.generate(
        prompt,
        max_new_tokens=4,
        do_sample=False,
        return_dict_in_generate=True,
        eos_token_id=None,
        pad_token_id=0,
        **wanted,
    )
    value = {"question_id": "q", **{name: out[name] for name in ("sequences", "hidden_states", "attentions")}}
    store = stored(tmp_path, [value], "--attention", "heads", "--dtype", "keep")
    trace = store[0]
    assert trace.num_tokens == 8 and len(trace.tokens) == 9
    np.testing.assert_array_equal(trace.tokens, out.sequences[0].numpy())
    with torch.no_grad():
        whole = model(out.sequences[:, :-1], **wanted)
    expected = torch.cat(whole.hidden_states[1:]).numpy()
    np.testing.assert_allclose(trace.hidden_states, expected, atol=1e-5)
    np.testing.assert_allclose(trace.attention, torch.cat(whole.attentions).numpy(), atol=1e-6)


def test_passes_may_be_dicts_by_the_number_of_the_step(tmp_path):
    trace = make_traces(1, tokens=12)[0]
    del trace["attentions"]
    hidden = np.stack(trace["hidden_states"])
    parts = [hidden[:, :2], *(hidden[:, k : k + 1] for k in range(2, 12))]
    steps = {f"step_{n}": {f"layer_{k}": layer for k, layer in enumerate(part)} for n, part in enumerate(parts)}
    path = write_pickle(tmp_path / "a.pkl", [trace | {"hidden_states": dict(sorted(steps.items()))}])
    convert(path, tmp_path / "s.zarr")
    np.testing.assert_array_equal(tracestore.open(tmp_path / "s.zarr")[0].hidden_states, hidden)


def test_nested_lists_of_attention_averaged_over_heads(tmp_path):
    traces = make_traces(3, tokens=4)
    means = [[layer.astype("f4").mean(0) for layer in t["attentions"]] for t in traces]
    lists = [t | {"attentions": [m.tolist() for m in mean]} for t, mean in zip(traces, means, strict=True)]
    for trace, mean in zip(stored(tmp_path, lists), means, strict=True):
        np.testing.assert_allclose(trace.attention, np.stack(mean), rtol=1e-3, atol=1e-6)
