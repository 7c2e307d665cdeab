"""Stores for tests of bridges and of tables."""

from tests.helpers import make_traces, write_store


def make_store(path, count=24, segments=1, **options):
    """Write a store of `count` traces in 3 groups; every eighth has no score."""
    traces = [t | {"question": f"question {k}"} for k, t in enumerate(make_traces(count, tokens=lambda k: 2 + k % 5))]
    each = -(-count // segments)
    return write_store(
        path, traces, score=lambda k: None if k % 8 == 7 else k % 2, group=lambda k: f"g{k % 3}",
        commit_after=range(each - 1, count, each), **options,
    )  # fmt: skip
