"""Runs the installed TRL trainer whole on fake tensors and records its memory. Runs in the worker; a simulated run in the training process."""
