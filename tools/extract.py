"""Run `tracestore extract` from a checkout."""

from tracestore.cli import run_script

if __name__ == "__main__":
    run_script("extract", prog="python tools/extract.py")
