"""Hugging Face datasets, with the real library."""

import numpy as np
import pytest

import tracestore
from tests.bridges.stores import make_store
from tests.helpers import make_traces, read_all, write_store
from tracestore.errors import InvalidInputError, MissingFieldError, UsageError


def test_round_trip(path, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from tracestore.bridges.huggingface import from_datasets, to_datasets

    with tracestore.open(path) as store:
        rows = to_datasets(store, ("last_token", "hidden_states", "attention")).with_format("numpy")
        assert len(rows) == 24
        for k in (0, 7, 23):
            assert rows[k]["question_id"] == store.question_ids[k] and rows[k]["question"] == f"question {k}"
            assert np.array_equal(rows[k]["last_token"], store[k].last_token.astype("f4"))
            assert np.array_equal(np.array(rows[k]["hidden_states"].tolist()), store[k].hidden_states.astype("f4"))
            assert rows[k]["tokens"].tolist() == store[k].tokens.tolist()
        with pytest.raises(UsageError, match="found array 'x'"):
            to_datasets(store, ("x",))
    traces = [t | {"score": k % 2, "group": "g"} for k, t in enumerate(make_traces(6))]
    plain = [
        {k: [a.astype("f4").tolist() for a in v] if k in ("hidden_states", "attentions") else v for k, v in t.items()}
        for t in traces
    ]
    plain = [t | {"tokens": t["tokens"].tolist()} for t in plain]
    assert from_datasets(datasets.Dataset.from_list(plain), tmp_path / "one.zarr") == 6
    streamed = datasets.Dataset.from_list(plain).to_iterable_dataset()
    assert from_datasets(streamed, tmp_path / "two.zarr", attention="none") == 6
    write_store(tmp_path / "own.zarr", make_traces(6), score=lambda k: k % 2)
    with tracestore.open(tmp_path / "one.zarr") as found, tracestore.open(tmp_path / "own.zarr") as own:
        assert read_all(found) == read_all(own) and found.group(0) == "g"
    with pytest.raises(UsageError, match="row 0: no hidden_states"):
        from_datasets(
            datasets.Dataset.from_list([{k: v for k, v in plain[0].items() if k != "hidden_states"}]), tmp_path / "x"
        )
    with pytest.raises(InvalidInputError):
        from_datasets(datasets.Dataset.from_list([plain[0] | {"tokens": [1, 2, 3]}]), tmp_path / "y")


@pytest.mark.parametrize("absent", [(), ("tokens_decoded",), ("tokens", "tokens_decoded")])
def test_traces_without_ids_or_texts_of_tokens_come_back(tmp_path, monkeypatch, absent):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from tracestore.bridges.huggingface import from_datasets, to_datasets

    traces = [{name: value for name, value in trace.items() if name not in absent} for trace in make_traces(3)]
    with tracestore.open(write_store(tmp_path / "own.zarr", traces)) as own:
        rows = to_datasets(own, ("hidden_states",))
        assert from_datasets(rows, tmp_path / "new.zarr", attention="none") == 3
        for one, two in zip(own, tracestore.open(tmp_path / "new.zarr"), strict=True):
            assert np.array_equal(one.hidden_states, two.hidden_states)
            assert (one.tokens is None) == (two.tokens is None) and one.tokens_decoded == two.tokens_decoded


def test_a_new_store_at_the_same_path_is_not_read_from_the_cache(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from tracestore.bridges.huggingface import to_datasets

    for seed in (0, 1):
        write_store(tmp_path / "s.zarr", make_traces(4, seed=seed), overwrite=True)
        with tracestore.open(tmp_path / "s.zarr") as store:
            rows = to_datasets(store).with_format("numpy")
            assert np.array_equal(rows[1]["last_token"], store[1].last_token.astype("f4"))


def test_missing_attention_is_an_error(tmp_path):
    pytest.importorskip("datasets")
    from tracestore.bridges.huggingface import to_datasets

    with tracestore.open(make_store(tmp_path / "n.zarr", attention="none")) as store, pytest.raises(MissingFieldError):
        to_datasets(store, ("attention",))


def test_rows_of_a_subset(path, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from tracestore.bridges.huggingface import to_datasets

    with tracestore.open(path) as store:
        for key in ([5, 1], [1, 5], slice(3)):
            assert to_datasets(store[key])["question_id"] == store[key].question_ids


@pytest.mark.long
def test_rows_have_the_scores_of_the_store_that_was_opened(tmp_path, monkeypatch):
    """The score is the one chosen at opening, also after the rows of another one were cached."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from tracestore.bridges.huggingface import to_datasets

    names = {"one": "correct", "two": "hallucination", "three": "correct"}
    with tracestore.create(tmp_path / "s.zarr") as writer:
        for name, direction in names.items():
            writer.define_score(name, direction=direction)
        for k, trace in enumerate(make_traces(4)):
            writer.append(trace, scores={name: (k + 4 * n) / 16 for n, name in enumerate(names)})
    for chosen in (*names, None, *names):
        with tracestore.open(tmp_path / "s.zarr", score=chosen) as store:
            for traces in (store, store[2:], store[[3, 0, 3]]):
                rows, own = to_datasets(traces), traces.to_pandas(texts=True)
                renamed = "hallucination_score" if names[store.score_name] == "hallucination" else "score"
                own = own.rename(columns={"score": renamed})
                assert {*rows.column_names} == {*own.columns, "tokens", "tokens_decoded", "last_token"}
                for name in (renamed, *(f"score_{name}" for name in names if name != store.score_name)):
                    assert list(rows[name]) == own[name].tolist()


def test_no_rows(path, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from tracestore.bridges.huggingface import to_datasets

    with tracestore.open(path) as store:
        empty, whole = to_datasets(store[:0]), to_datasets(store)
        assert len(empty) == 0 and empty.features == whole.features


@pytest.mark.parametrize(("groups", "expected"), [([0, 1, None], ["0", "1", ""]), (["", "0", None], ["", "0", ""])])
def test_a_group_may_be_zero(tmp_path, groups, expected):
    datasets = pytest.importorskip("datasets")
    from tracestore.bridges.huggingface import from_datasets

    rows = [{"question_id": f"q{k}", "hidden_states": [[[1.0, 2.0]]], "group": group} for k, group in enumerate(groups)]
    from_datasets(datasets.Dataset.from_list(rows), tmp_path / "s.zarr", attention="none")
    store = tracestore.open(tmp_path / "s.zarr")
    assert [store.group(k) for k in range(3)] == expected
