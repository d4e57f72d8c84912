"""Loads datasets, and checks and counts their rows. Runs in the worker and the training process."""
