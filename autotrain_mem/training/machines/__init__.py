"""Several machines that train together: one leads, the others start processes for it. Runs in the parent of each."""
