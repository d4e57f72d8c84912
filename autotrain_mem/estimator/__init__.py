"""Turns a recorded run into peaks in bytes and seconds a step. Runs in the parent (pure)."""
