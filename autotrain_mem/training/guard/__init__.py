"""Handles a full device within a step: less at once, the same mathematics. Runs in the training process."""
