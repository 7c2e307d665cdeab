"""python -m tracestore: the same as the console script."""

from tracestore.cli import main
from tracestore.console import leave

if __name__ == "__main__":
    leave(main())
