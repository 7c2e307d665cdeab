"""Run `tracestore` as python -m tracestore."""

from tracestore.cli import main
from tracestore.process import exit_ignoring_sigint

if __name__ == "__main__":
    exit_ignoring_sigint(main())
