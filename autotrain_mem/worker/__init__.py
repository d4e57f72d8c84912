"""Asks (client, pool) and answers (server) rehearsals over a pipe. Runs in the parent; server in the worker."""
