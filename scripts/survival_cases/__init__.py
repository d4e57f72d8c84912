"""The parts of ``scripts/survival``: what is trained, on which cards, what goes wrong, and what else is there."""
