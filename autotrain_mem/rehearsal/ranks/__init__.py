"""Rehearses one of several ranks: its group, streams, shards and buckets. Runs in the worker and in simulated runs."""
