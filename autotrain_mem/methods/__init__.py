"""Adapts TRL's trainers, one per module, with their arguments and rows. Runs in the worker and training processes."""
