"""The server of `tracestore serve`, which shows a store in a browser on this machine.

`search` finds traces, with their texts in memory, `results` reads what training wrote, `list_page`,
`trace_page`, `projection` and `results_page` make the pages with `forms`, `pictures` draws attention, `app` chooses
the page of an address, `auth` authenticates browsers.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tracestore.extras import needs
from tracestore.store.read.store import TraceStore

if TYPE_CHECKING:
    from tracestore.serve.auth import ServeServer


def make_server(
    store: TraceStore, results: Sequence[Path] = (), *, port: int = 0, score_threshold: float | None = None
) -> "ServeServer":
    """Return a server of a store.

    Parameters
    ----------
    store : TraceStore
        The store.
    results : sequence of Path
        Output folders of `tracestore train`, and files of scores.
    port : int
        Port on 127.0.0.1. 0: any free port.
    score_threshold : float, optional
        Traces with a lower score count as hallucinated. Default: 0.5, for scores in [0, 1].

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
        from tracestore.serve.app import Viewer
        from tracestore.serve.auth import ServeServer
    from tracestore.serve.results import Results
    from tracestore.serve.search import TraceSearch

    search = TraceSearch(store, Results.read(results, store), score_threshold)
    server = ServeServer(Viewer(search), port)
    search.start_reading()
    return server
