"""Test that docs/fields.md names every entry of a layout."""

from tests.helpers import ROOT
from tracestore.ingest.layout.fields import FIELDS, SETTINGS, SETTINGS_OF

PAGE = (ROOT / "docs/fields.md").read_text()


def test_the_page_names_every_entry():
    names = [*SETTINGS, *(f"{name}." for name in SETTINGS_OF)]
    names += [name for name, rule in FIELDS.items() if rule.kind == "known"]

    assert [name for name in names if f"`{name}" not in PAGE] == []
