"""Handles out-of-memory errors within a step: less at once, the same mathematics. Runs in the training process."""
