"""Refuses what cannot work, with its reason and its cure. Runs in the worker."""
