"""Decides what to try, in which order, and when to stop; prediction is an argument. Runs in the parent (pure)."""
