"""Run `tracestore`: the console script, and python -m tracestore."""

from typing import NoReturn

from tracestore.cli import main
from tracestore.process import exit_ignoring_sigint


def run() -> NoReturn:
    """Run the command in the arguments of the process, and end the process with its exit code."""
    exit_ignoring_sigint(main())


if __name__ == "__main__":
    run()
