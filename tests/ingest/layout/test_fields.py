"""Test that docs/layouts.md lists every field with its axes, and every entry of a layout."""

import re

from tests.helpers import ROOT
from tracestore.ingest.layout.fields import FIELDS, SETTINGS, SETTINGS_OF

PAGE = (ROOT / "docs/layouts.md").read_text()


def rows():
    """Return the axes of the rows of the table of fields, by field."""
    table = PAGE.split("| fields | axes | value |")[1].split("\n\n")[0]
    found = {}
    for line in table.splitlines()[2:]:
        names, axes = (cell.strip() for cell in line.split("|")[1:3])
        found |= {name: tuple(axes.split()) for name in re.findall(r"`([^`]+)`", names)}
    return found


def test_the_page_lists_every_field_with_its_axes():
    expected = {name: rule.axes for name, rule in FIELDS.items() if rule.kind != "known"}

    assert {name: axes for name, axes in rows().items() if not name.endswith(".NAME")} == expected


def test_the_page_names_every_entry():
    names = [*SETTINGS, *(f"{name}." for name in SETTINGS_OF)]
    names += [name for name, rule in FIELDS.items() if rule.kind == "known" and not name.startswith("shape.last")]
    names.remove("P.rows")  # of built-in layouts

    assert [name for name in names if f"`{name}" not in PAGE] == []


def test_the_page_is_short():
    assert len(PAGE.encode()) <= 14_000
