"""The design of every page: run report, store report, viewer and notebooks.

`elements` makes escaped HTML: tables, cards, facts, tokens, commands; a `Table` is
shown as text too. `plots` makes plots from plain numbers. `document` puts sections into a page with title, facts,
navigation and content security policy. `style.css` holds all colors and sizes, `page.js` sorts and filters
tables, `plots.js` draws plots with BokehJS. Nothing here imports Bokeh in Python: the browser builds the
plots, so that writing a page takes milliseconds.

Examples
--------
>>> from tracestore.pages.document import Section, document
>>> from tracestore.pages.elements import table
>>> from tracestore.pages.plots import Series, plot
>>> losses = [Series("train", [1, 2, 3], [0.7, 0.5, 0.4]), Series("validation", [1, 2, 3], [0.7, 0.6, 0.6])]
>>> page = document(
...     "Run of today",
...     facts={"store": "store.zarr", "traces": 600},
...     sections=[
...         Section("Result", table(["model", "AUROC"], [["lstm_solo", 0.81]], caption="Test split")),
...         Section("Curves", plot("Loss", losses, x_label="epoch", y_label="loss", is_integer_x=True)),
...     ],
... )
"""
