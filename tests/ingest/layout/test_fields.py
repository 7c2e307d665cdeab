"""Test that docs/fields.md lists every field of a trace and every entry of a layout."""

from tests.helpers import ROOT
from tracestore.ingest.layout.fields import FIELDS, SETTINGS, SETTINGS_OF
from tracestore.store import vocabulary

PAGE = (ROOT / "docs/fields.md").read_text()


def test_the_page_lists_every_field_as_the_vocabulary_describes_it():
    for name, rule in FIELDS.items():
        if rule.kind != "known":
            field = vocabulary.FIELDS[name]
            row = f"| `{name}` | {' '.join(rule.axes)} | {field.meaning} | {field.stored} |"

            assert row in PAGE


def test_the_page_names_every_entry_score_and_word():
    names = [*SETTINGS, *(f"{name}." for name in SETTINGS_OF), *vocabulary.SCORES, *vocabulary.WORDS]
    names.remove("not_hallucinated")
    names += [name for name, rule in FIELDS.items() if rule.kind == "known"]

    assert [name for name in names if f"`{name}" not in PAGE] == []
