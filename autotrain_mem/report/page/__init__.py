"""Writes the HTML report: one file that holds all it needs and makes no requests. Runs in the parent."""
