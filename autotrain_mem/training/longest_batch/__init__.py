"""Runs the longest rows before the first step and leaves no trace of it. Runs in the training process."""
