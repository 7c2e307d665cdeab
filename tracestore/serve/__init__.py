"""`tracestore serve`: a store in the browser of this machine.

catalogue and results know traces and detectors, figures draws, document puts a page together
and answers its controls, door decides who may come in. Bokeh is the server and draws.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from tracestore.extras import needs
from tracestore.store.read.store import TraceStore

if TYPE_CHECKING:
    from tracestore.serve.auth import ServeServer


def make_server(
    store: TraceStore, results: Path | None = None, *, port: int = 0, score_threshold: float = 0.5
) -> "ServeServer":
    """A ServeServer of the store: `url` is its address with the token, `run()` serves until it is
    interrupted. results: the folder that tracestore train wrote. MissingExtraError where Bokeh is not
    installed, UsageError where the port is taken or the results are not there."""
    with needs("serve"):
        from tracestore.serve.auth import ServeServer
        from tracestore.serve.page import Page
    from tracestore.serve.results import Results
    from tracestore.serve.search import TraceSearch

    read = None if results is None else Results.read(results, store)
    catalogue = TraceSearch(store, read, score_threshold)
    return ServeServer(lambda document: Page(catalogue).fill(document), port)
