"""The server of `tracestore serve`, which shows a store in a browser on this machine.

`search` finds traces, `results` reads what training wrote, `plots` draws with Bokeh, `page` lays out
the controls and answers them, `auth` authenticates browsers.
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
    """Return a server of a store.

    Parameters
    ----------
    store : TraceStore
        The store.
    results : Path, optional
        Output folder of `tracestore train`.
    port : int
        Port on 127.0.0.1. 0: any free port.
    score_threshold : float
        Traces with a lower score count as hallucinated.

    Returns
    -------
    ServeServer
        Its `url` contains the secret token. `run()` serves until it is interrupted.

    Raises
    ------
    MissingExtraError
        Bokeh is not installed.
    UsageError
        The port is in use, or the results cannot be read.
    """
    with needs("serve"):
        from tracestore.serve.auth import ServeServer
        from tracestore.serve.page import Page
    from tracestore.serve.results import Results
    from tracestore.serve.search import TraceSearch

    search = TraceSearch(store, None if results is None else Results.read(results, store), score_threshold)
    return ServeServer(lambda document: Page(search).fill(document), port)
