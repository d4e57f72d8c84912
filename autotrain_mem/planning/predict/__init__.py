"""Predicts: plans, estimates, sweeps, comparisons of GPUs. Runs in the parent."""
