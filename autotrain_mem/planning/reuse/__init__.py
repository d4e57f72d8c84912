"""Follows a saved plan. Runs in the parent."""
