"""Stores for tests of bridges and of tables."""

import tracestore
from tests.helpers import make_trace


def make_store(path, count=24, segments=1, **options):
    with tracestore.create(path, **options) as writer:
        for k in range(count):
            trace = make_trace(k, tokens=2 + k % 5)
            score = None if k % 8 == 7 else k % 2
            writer.append(trace | {"question": f"question {k}"}, score=score, group=f"g{k % 3}")
            if (k + 1) % (-(-count // segments)) == 0:
                writer.flush()
    return path
