"""The executor: traces of files that a layout describes, and the accounts that must close."""
