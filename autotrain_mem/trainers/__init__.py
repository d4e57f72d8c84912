"""Loads models, changes TRL's trainers and adds what they lack. Runs in the worker and the training process."""
