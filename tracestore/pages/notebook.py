"""HTML for notebooks: a fragment with styles of its own, without scripts, on the background of the notebook.

Values are escaped as everywhere in `pages`. The styles hold for the fragment only.
"""

from collections.abc import Mapping

from tracestore.pages.elements import Html, element, facts

_TINTS = "".join(
    f".tracestore .v{k}{{background:color-mix(in srgb,#d55e00 {6 * k}%,transparent)}}" for k in range(1, 10)
)
# Text has the color of the notebook, so that light and dark themes work without a query.
_STYLE = (
    ".tracestore{font:14px/1.45 system-ui,sans-serif;max-width:75rem;overflow-wrap:anywhere}"
    ".tracestore h3{font-size:1.1rem;margin:.3rem 0}.tracestore p{margin:.3rem 0}"
    ".tracestore .note,.tracestore dt{opacity:.8;font-size:.9em}"
    ".tracestore .facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(10rem,1fr));gap:.3rem 1rem;margin:.3rem 0}"
    ".tracestore dd{margin:0;font-variant-numeric:tabular-nums}"
    ".tracestore .table{overflow-x:auto}.tracestore table{border-collapse:collapse;font-size:.92em}"
    ".tracestore caption{text-align:left;font-weight:600;padding:.3rem 0}"
    ".tracestore td,.tracestore th{padding:.2rem .8rem .2rem 0;border-bottom:1px solid #8886;text-align:left;"
    "font-weight:normal;vertical-align:top}.tracestore thead th{font-weight:600}"
    ".tracestore .n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}"
    ".tracestore .tokens{white-space:pre-wrap}" + _TINTS
)


def fragment(title: object, *content: object, values: Mapping[str, object] | None = None) -> str:
    """Return the HTML of an object in a notebook.

    Parameters
    ----------
    title : object
        The heading.
    *content : object
        What follows the values, escaped unless it is Html.
    values : mapping, optional
        Names and values of the object; those that are None are omitted.
    """
    return element(
        "div", element("style", Html(_STYLE)), element("h3", title), facts(values or {}), *content, class_="tracestore"
    )
