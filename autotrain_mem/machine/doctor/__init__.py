"""Examines a machine, and judges what was found (pure). Runs in the parent, and in children for what may crash."""
