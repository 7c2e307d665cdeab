"""Changes of dumps whose meaning stays known: each gives what may come out, and names the rules that catch it.

A mutation changes a dump in place and returns the traces that it now means: `EXACT` those of `expected`, `PART` a part
of them, `NONE` if every conversion is wrong. It returns None where it cannot be applied.
"""

EXACT, PART, NONE = "exact", "part", "none"
MUTATIONS = {}


def mutation(rules):
    """Register a mutation with the rules that catch it where it cannot be read."""

    def decorate(function):
        MUTATIONS[function.__name__] = (function, rules)
        return function

    return decorate


def choice(rng, values):
    """Return a random one of some values, None without any."""
    return values[int(rng.integers(len(values)))] if values else None
