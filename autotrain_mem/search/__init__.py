"""Decides, given a predictor, which settings to try, in which order, and when to stop. Runs in the parent (pure)."""
