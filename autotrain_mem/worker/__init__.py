"""Asks for rehearsals (client, pool) and answers (server) over a pipe. Runs in the parent; server in the worker."""
