"""Benchmarks for asv; see bench/README.md. Lower is better in all of them."""

import os

# As in `tracestore.process.configure_program`, before torch is imported: at a barrier the threads of libgomp
# would spin for long, which doubled the processor time on a busy machine.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
