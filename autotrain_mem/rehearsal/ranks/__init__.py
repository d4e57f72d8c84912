"""Rehearses one process of several: its group, streams, shards and buckets. Runs in the worker, and when simulating."""
