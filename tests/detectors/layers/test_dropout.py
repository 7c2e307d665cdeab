"""Dropout masks do not depend on how a batch is split."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.oom.failing import SIZE, make
from tracestore.detectors.layers.dropout import TraceDropout, TraceMasks
from tracestore.detectors.registry import MODELS


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 9), min_size=1, max_size=6), st.data())
def test_a_slice_of_a_batch_has_the_masks_of_the_whole_batch(key, rows, data):
    begin = data.draw(st.integers(0, len(rows) - 1))
    end = data.draw(st.integers(begin + 1, len(rows)))
    whole = TraceMasks(key, 3, len(rows)).draw(1, rows, (5,), 0.6)[0]
    part = TraceMasks(key, 3 + begin, end - begin).draw(1, rows[begin:end], (5,), 0.6)[0]
    assert torch.equal(whole[sum(rows[:begin]) : sum(rows[:end])], part)


@pytest.mark.parametrize("kept", [0.001, 0.3, 0.8, 1.0])
def test_the_kept_share_is_the_requested_probability(kept):
    """The mean of a million draws lies within 5 standard deviations."""
    mask, share = TraceMasks(1, 0, 2).draw(0, [600_000, 400_000], (), kept)
    assert mask.dtype == torch.bool and abs(share - kept) < 1e-5
    assert abs(mask.double().mean() - share) <= 5 * (kept * (1 - kept) / 1e6) ** 0.5


def test_masks_of_different_traces_layers_and_batches_are_independent():
    masks = [
        TraceMasks(key, position, 1).draw(stream, [1], (4096,), 0.5)[0].numpy().ravel()
        for key in (7, 8)
        for position in (0, 1)
        for stream in (0, 1, 2)
    ]
    agree = np.corrcoef(np.array(masks, float)) - np.eye(len(masks))
    assert np.abs(agree).max() < 6 / 64


ROW_PTR = torch.tensor([0, 400, 1000])


def test_dropout_preserves_the_mean_and_is_off_in_evaluation():
    layer, x = TraceDropout(0.25, 0), torch.ones(1000, 300, dtype=torch.float64)
    out = layer(x, TraceMasks(1, 0, 2), ROW_PTR)
    assert set(out.unique().tolist()) == {0.0, 1 / 0.75} and abs(out.mean() - 1) < 0.01
    assert layer.eval()(x, TraceMasks(1, 0, 2), ROW_PTR) is x
    assert TraceDropout(0.0, 0)(x) is x and not TraceDropout(1.0, 0)(x, TraceMasks(1, 0, 1000)).any()
    half = TraceDropout(0.3, 0)(torch.ones(1000, 300, dtype=torch.bfloat16), TraceMasks(1, 0, 1000))
    assert half.dtype == torch.bfloat16 and half.max() == torch.tensor(1 / 0.7, dtype=torch.bfloat16)
    torch.manual_seed(0)
    drawn = TraceDropout(0.25, 0)(x)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.nn.functional.dropout(x, 0.25))


@pytest.mark.parametrize("name", MODELS)
def test_a_split_batch_has_the_gradients_of_the_whole_batch(name):
    model, _, loss_of = make(name)
    loss_of(0, SIZE).backward()
    whole = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for begin, end in ((0, 1), (1, SIZE)):
        (loss_of(begin, end) * ((end - begin) / SIZE)).backward()
    assert all(
        torch.allclose(a, p.grad, rtol=1e-12, atol=1e-12) for a, p in zip(whole, model.parameters(), strict=True)
    )
