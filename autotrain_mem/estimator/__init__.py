"""Turns a recorded run into peaks in bytes and seconds per step. Runs in the parent (pure)."""
