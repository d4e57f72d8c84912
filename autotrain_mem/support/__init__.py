"""Provides what other folders need: errors, files, processes, units; nothing about training. Runs in any process."""
