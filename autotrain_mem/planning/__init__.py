"""Joins a job, a device and the workers into predictions, plans and runs. Runs in the parent."""
