"""Batches: their arrays and fields, the buffers that hold them, and the jobs that gather them."""
