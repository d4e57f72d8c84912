"""Sends rehearsals to worker processes. Runs in the parent (client, pool); the server runs in the worker."""
