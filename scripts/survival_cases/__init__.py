"""The parts of ``scripts/survival``: jobs, cards, faults, ranks, machines, resumed runs, and other tools."""
