"""Fixtures. Everything is written under tmp_path, nothing is downloaded."""

import importlib.util
import signal

import pytest

import tracestore
from tests.helpers import make_traces, write_pickle, write_scores

# A shell that starts the suite in the background lets it ignore Ctrl-C, and processes
# inherit that, also those that the tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What the suites of store, ingest and conversion do without, for instance on a Python that torch has
# no wheel for. With torch there, a missing library is a failure.
WITHOUT_TORCH = importlib.util.find_spec("torch") is None
OPTIONAL = {"torch", "torch_geometric", "sklearn", "scipy", "matplotlib", "distributed", "obstore", "moto", "pandas"}


def _skip_where_optional(error):
    if WITHOUT_TORCH and error.name is not None and error.name.partition(".")[0] in OPTIONAL:
        pytest.skip(f"{error.name} is not installed", allow_module_level=True)
    raise error


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    try:
        return (yield)
    except ModuleNotFoundError as error:
        _skip_where_optional(error)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    try:
        return (yield)
    except ModuleNotFoundError as error:
        _skip_where_optional(error)


class _Module(pytest.Module):
    """A module of tests that is skipped where it imports what is not there."""

    def _getobj(self):
        try:
            return super()._getobj()
        except self.CollectError as error:
            if isinstance(error.__cause__, ModuleNotFoundError):
                _skip_where_optional(error.__cause__)
            raise


def pytest_pycollect_makemodule(module_path, parent):
    return _Module.from_parent(parent, path=module_path) if WITHOUT_TORCH else None


@pytest.fixture
def traces():
    """Twelve small traces of different lengths."""
    return make_traces(12)


@pytest.fixture
def folder(tmp_path, traces):
    """traces_data/ as a user has it: two pickles and a scores file."""
    data = tmp_path / "traces_data"
    data.mkdir()
    write_pickle(data / "trivia_qa_traces_batch_0000.pkl", traces[:7])
    write_pickle(data / "trivia_qa_traces_batch_0001.pkl.gz", traces[7:])
    write_scores(data / "ground_truth_scores.csv", {t["question_id"]: k / 12 for k, t in enumerate(traces)})
    return data


@pytest.fixture
def store_path(tmp_path, traces):
    """A store of the twelve traces, the last two without a score."""
    path = tmp_path / "store.zarr"
    with tracestore.create(path) as writer:
        for k, trace in enumerate(traces):
            writer.append(trace, score=None if k >= 10 else k / 10)
            if k == 6:
                writer.flush()
    return path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A Llama of 2 layers and a tokenizer of single characters, saved as a folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    characters = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]
    vocabulary = {c: k for k, c in enumerate(["<eos>", "<unk>", *characters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=0,
        bos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
