"""Launches, supervises and resumes real runs. Runs in the parent; guard, process and watch in the training process."""
