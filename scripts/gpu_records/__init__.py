"""The parts of ``scripts/record_gpu``: cases, the card that runs them, the records, and comparisons."""
