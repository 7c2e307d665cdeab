"""Run `tracestore predict` from a checkout."""

from tracestore.cli import run_script

if __name__ == "__main__":
    run_script("predict", prog="python tools/predict.py")
