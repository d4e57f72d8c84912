"""Launches, supervises and resumes the real run. Runs in the parent; its subfolders run in the training process."""
