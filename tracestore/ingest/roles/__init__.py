"""The roles of the keys of a trace: which field, score or label of a store each becomes. See docs/inputs.md."""
