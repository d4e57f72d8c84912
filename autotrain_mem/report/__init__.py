"""Writes what users read in the terminal and in the files of the output folder. Runs in the parent."""
