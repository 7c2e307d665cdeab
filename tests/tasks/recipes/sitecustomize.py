"""Imported by each Python process of a recipe: tasks of one source, and a process that is killed while it writes one."""

import os
import signal
import sys
from glob import glob


def observe(event, arguments):
    """Kill the process that begins a segment after the first receipt of a store, once in the folder $KILLED."""
    if event == "open" and (module := sys.modules.get("tracestore.convert.cutting")):
        module.MIN_BYTES = 1
    if event == "os.mkdir" and str(arguments[0]).endswith("/hidden_states"):
        folder = os.environ["KILLED"]
        if glob(f"{folder}/*.zarr/receipts/*.zip") and not os.path.exists(f"{folder}/killed"):
            os.mkdir(f"{folder}/killed")
            os.kill(os.getpid(), signal.SIGKILL)


sys.addaudithook(observe)
