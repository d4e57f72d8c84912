"""The parts of ``scripts/oracle``: the cases, how each is run, what is kept of it, and how two files are compared."""
