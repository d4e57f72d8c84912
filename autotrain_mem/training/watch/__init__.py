"""Watches a run's memory, and warns of problems. Runs in the training process."""
