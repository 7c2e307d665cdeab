"""Run `tracestore train` from a checkout."""

from tracestore.cli import run_script

if __name__ == "__main__":
    run_script("train", prog="python tools/train.py")
