"""Computes a recorded run's memory peaks in bytes, and its seconds per step. Runs in the parent (pure)."""
