"""Watches what a training takes, and says what it is a sign of. Runs in the training process."""
