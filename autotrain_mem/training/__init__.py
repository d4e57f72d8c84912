"""Launches, supervises and resumes the real run. Runs in the parent; its folders in the training process."""
