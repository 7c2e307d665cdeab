"""Run `tracestore compare` from a checkout."""

from tracestore.cli import run_script

if __name__ == "__main__":
    run_script("compare", prog="python tools/compare.py")
