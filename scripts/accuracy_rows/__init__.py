"""The parts of ``scripts/accuracy``: public rows and their report, PEFT's adapters, and records of a GPU."""
