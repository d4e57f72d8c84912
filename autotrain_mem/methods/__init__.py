"""Adapts each TRL trainer, its arguments and rows, in a module each. Runs in the worker and the training process."""
