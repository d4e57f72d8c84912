"""Refuses what cannot work, with the reason and the cure. Runs in the worker."""
