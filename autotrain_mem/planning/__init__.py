"""Predicts, plans and compares settings for a job on a device, with the help of workers. Runs in the parent."""
