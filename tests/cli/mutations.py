"""Random changes of documents, as damage, other programs and editors make them."""

import copy
import math

_DEEP = [[[[[[[[[[1]]]]]]]]]]
GARBAGE = (
    None, True, -1, 0, 1, 2**31, 2**63, 10**30, -(10**30), 0.5, -1e308, 1e308, 5e-324, math.nan, math.inf, -math.inf, "",
    "x", "1", "\ud800", [], {}, [None], _DEEP, {"a": _DEEP}, ["x"] * 1000, "y" * 100_000,
)  # fmt: skip


def _places(value, path=()):
    """Yield the path of each item, at most a few of each list."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from _places(item, (*path, key))


def mutated(document, rng):
    """Return a copy of a document of dicts and lists in which one to three items differ or lack."""
    document = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_places(document))
        if not places:
            break
        # Every depth is as likely, though most items are deep.
        depth = rng.choice(sorted({len(path) for path in places}))
        *path, key = rng.choice([path for path in places if len(path) == depth])
        parent = document
        for step in path:
            parent = parent[step]
        change = rng.randrange(10)
        if change == 0:
            del parent[key]
        elif change == 1 and isinstance(parent[key], list):
            parent[key] = [*parent[key], rng.choice(GARBAGE)]
        elif change == 2 and isinstance(parent, dict):
            parent[rng.choice(("a", "runs", "probe", "probes", "fold"))] = parent.pop(key)
        else:
            parent[key] = copy.deepcopy(rng.choice(GARBAGE))
    return document
