"""Meets a full device inside the training: with less at once, and the same mathematics."""
