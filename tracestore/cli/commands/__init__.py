"""The commands, one module each.

The docstring of a module is the description of its command; its last paragraph is an example. The module
defines `add_arguments(parser)`, and `run(args, output)`, which returns the exit code, or None for 0.
"""
