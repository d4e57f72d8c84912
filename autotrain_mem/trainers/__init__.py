"""Builds and finishes the real trainer, and adds what TRL lacks. Runs in the worker and the training process."""
