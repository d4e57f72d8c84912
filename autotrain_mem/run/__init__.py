"""Takes a plan to its report: early checks, probes, supervision, replanning. Runs in the parent."""
