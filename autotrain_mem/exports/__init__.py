"""Writes a plan in the keys of other tools. Runs in the parent."""
