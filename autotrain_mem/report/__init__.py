"""Writes what a person reads: the terminal and the files in the output folder. Runs in the parent."""
