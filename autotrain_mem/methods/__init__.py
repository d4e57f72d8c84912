"""Knows TRL: a module for each trainer, its arguments and rows. Runs in the worker and the training process.

``table`` and ``facts`` are pure, and are read in any process: what tells the methods apart, without TRL.
"""
