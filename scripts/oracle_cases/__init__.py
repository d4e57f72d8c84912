"""The parts of ``scripts/oracle``: the cases, their execution, their digests, and the comparison of two files."""
