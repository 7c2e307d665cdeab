"""Fixtures of all tests. Tests write to tmp_path only, and download nothing."""

import contextlib
import gc
import importlib.util
import os
import shutil
import signal

import pytest
from hypothesis import HealthCheck, settings

from tests.helpers import make_traces, write_pickle, write_scores, write_store
from tests.machine import folder_in_memory
from tracestore import process
from tracestore.evaluation import metrics
from tracestore.store.remote import retries

# A shell that starts the tests in the background makes them ignore SIGINT. The processes that the tests
# interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Nothing is synced to the disk, which takes nine tenths of the time of writing a small store. tests/fault_injection
# checks what is synced and when, with a model of a disk.
def _sync_nothing(fd):
    os.fstat(fd)  # a descriptor that is not open is an error


os.fsync = _sync_nothing

# The servers of the tests fail as often as a test says, and recover at once.
retries._FIRST_PAUSE_S = 0.01

# Most of the time of a small training is in its intervals. tests/evaluation has the number that users get.
NUM_RESAMPLES, metrics.BOOTSTRAP_SAMPLES = metrics.BOOTSTRAP_SAMPLES, 100

# A busy machine is no fault of a test.
settings.register_profile("any-speed", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-speed")

# Libraries that the tests of store, ingest and conversion run without, for example on a Python that has no
# wheel of torch. If torch is installed, a missing library is a failure.
WITHOUT_TORCH = importlib.util.find_spec("torch") is None
OPTIONAL = {"torch", "torch_geometric", "sklearn", "scipy", "matplotlib", "distributed", "obstore", "moto", "pandas"}
OPTIONAL |= {"h5py", "pyarrow", "datasets"}


def pytest_addoption(parser):
    parser.addoption("--in-memory", action="store_true", help="keep the folders of tests in memory, if it has room")


def pytest_configure(config):
    if config.getoption("--in-memory") and (folder := folder_in_memory()):
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(folder)


def _skip_if_optional(error):
    if WITHOUT_TORCH and error.name is not None and error.name.partition(".")[0] in OPTIONAL:
        pytest.skip(f"{error.name} is not installed", allow_module_level=True)
    raise error


# Garbage collection takes a quarter of the time of importing all libraries and tests.
gc.disable()

# A conversion does this for its own time, and ends it for all objects.
FROZEN_GARBAGE, process.frozen_garbage = process.frozen_garbage, contextlib.nullcontext


def pytest_collection_finish():
    """Exclude imported libraries from garbage collection, which took a fifth of the time of the tests."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    try:
        return (yield)
    except ModuleNotFoundError as error:
        _skip_if_optional(error)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    try:
        return (yield)
    except ModuleNotFoundError as error:
        _skip_if_optional(error)


class _Module(pytest.Module):
    """A test module that is skipped if it imports an optional library that is not installed."""

    def _getobj(self):
        try:
            return super()._getobj()
        except self.CollectError as error:
            if isinstance(error.__cause__, ModuleNotFoundError):
                _skip_if_optional(error.__cause__)
            raise


def pytest_pycollect_makemodule(module_path, parent):
    return _Module.from_parent(parent, path=module_path) if WITHOUT_TORCH else None


@pytest.fixture
def traces():
    """Return twelve small traces of different lengths."""
    return make_traces(12)


@pytest.fixture
def folder(tmp_path, traces):
    """Write a typical traces_data/ folder: two pickles and a scores file."""
    data = tmp_path / "traces_data"
    write_pickle(data / "trivia_qa_traces_batch_0000.pkl", traces[:7])
    write_pickle(data / "trivia_qa_traces_batch_0001.pkl.gz", traces[7:])
    write_scores(data / "ground_truth_scores.csv", {t["question_id"]: k / 12 for k, t in enumerate(traces)})
    return data


@pytest.fixture(scope="session")
def written_store(tmp_path_factory):
    """Write a store of the twelve traces in two segments, the last two traces without a score, that no test changes."""
    path = tmp_path_factory.mktemp("written") / "store.zarr"
    return write_store(path, make_traces(12), score=lambda k: None if k >= 10 else k / 10, commit_after=[6])


@pytest.fixture
def store_path(tmp_path, written_store):
    """Copy that store."""
    return shutil.copytree(written_store, tmp_path / "store.zarr")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Save a Llama model with 2 layers and random weights, and a tokenizer of single characters."""
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
    sizes = {"vocab_size": len(vocabulary), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    config = LlamaConfig(**sizes, eos_token_id=0, bos_token_id=0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
