"""Checks of a built-in layout that only its author needs."""

from tracestore.ingest.builtin.library import Builtin


def check_builtin(builtin: Builtin) -> None:
    """Parse all of a layout, and assert that its lines and its signatures name the same files."""
    signatures = {text: builtin.signatures[text] for text, pattern in builtin.patterns.items() if pattern.parts}
    assert builtin.reader is not None or set(builtin.plan.files) == signatures.keys()
