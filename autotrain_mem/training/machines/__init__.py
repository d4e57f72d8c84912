"""Trains on several machines: one leads, and the others start processes for it. Runs in the parent of each."""
