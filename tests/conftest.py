"""Fixtures. Everything is written under tmp_path, nothing is downloaded."""

import signal

import pytest

import tracestore
from tests.helpers import make_traces, write_pickle, write_scores

# A shell that starts the suite in the background lets it ignore Ctrl-C, and processes
# inherit that, also those that the tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
