"""Declares every setting once: autofit's own, a plan's knobs with their costs, and TRL's. Runs in any process."""
