"""Launches, supervises, resumes runs. Runs in the parent; guard, process and watch run in the training process."""
