"""Runs the installed TRL trainer whole on fake tensors and records its memory. Runs in the worker."""
