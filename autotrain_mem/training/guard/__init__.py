"""Handles out-of-memory errors in a step: repeats it in parts, with the same result. Runs in the training process."""
