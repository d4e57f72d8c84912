"""Provides what all rooms need: errors, files, processes, units; nothing about training. Runs in any process."""
