"""Turns flags of the command ``autofit`` into calls and one exit code. Runs in the parent."""
