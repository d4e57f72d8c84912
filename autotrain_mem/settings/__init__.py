"""Declares every setting once: ours, a plan's knobs, the cost of each, TRL's own. Runs in any process (pure)."""
