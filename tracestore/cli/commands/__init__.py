"""The commands, one module each.

A module defines `add_arguments(parser)` and `run(args, output)`, which returns the exit code.
"""
