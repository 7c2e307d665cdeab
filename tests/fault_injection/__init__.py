"""Faults injected into conversions, readers and writers: failed calls, kills, crashes, flipped bits."""
