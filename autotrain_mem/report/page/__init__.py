"""Writes the HTML report: one file that holds all it needs, and asks nothing of a network. Runs in the parent."""
