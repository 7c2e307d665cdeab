"""Streams of a GPU next to the one that computes."""

import functools
from typing import NamedTuple

import torch


class SideStreams(NamedTuple):
    """The streams on which batches are copied, and on which steps are recorded."""

    copies: torch.cuda.Stream
    recordings: torch.cuda.Stream


@functools.cache
def side_streams(device: torch.device) -> SideStreams:
    """Return the streams of a GPU, the same in each call.

    torch returns 32 streams in turn, so that one for each feed would become the one of recordings, and a copy a part
    of a recording. The matrix products of each stream have a workspace.
    """
    return SideStreams(torch.cuda.Stream(device), torch.cuda.Stream(device))
