"""The real run: a child process, what it says while it runs, and how it ends."""
