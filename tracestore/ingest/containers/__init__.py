"""Containers of arrays other than pickles: one module reads each, as data, one trace at a time."""
