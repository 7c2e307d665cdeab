"""`python -m tracestore.convert`: the same as `tracestore convert`."""

from tracestore.cli import run_script

if __name__ == "__main__":
    run_script("convert", prog="python -m tracestore.convert")
