"""python -m tracestore: the same as the console script."""

from tracestore.cli import main
from tracestore.process import exit_ignoring_sigint

if __name__ == "__main__":
    exit_ignoring_sigint(main())
