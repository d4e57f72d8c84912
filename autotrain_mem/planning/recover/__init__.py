"""Plans again when a training has died. Runs in the parent."""
