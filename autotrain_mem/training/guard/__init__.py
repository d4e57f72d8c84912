"""Meets a full device inside a step with less at once and the same mathematics. Runs in the training process."""
