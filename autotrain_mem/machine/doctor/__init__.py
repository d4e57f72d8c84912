"""Examines a machine: gathers facts in the parent and in children that may die, and judges them (pure)."""
