"""Adds trainers and optimizers that TRL lacks. Runs in the worker and the training process."""
