"""The way from a plan to its report: refused early, probed, supervised, planned again. Runs in the parent."""
