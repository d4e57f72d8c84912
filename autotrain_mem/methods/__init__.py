"""Knows TRL: a module for each trainer, its arguments and rows. Runs in the worker and the training process."""
