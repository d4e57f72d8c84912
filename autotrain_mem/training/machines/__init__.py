"""Several machines that train together: one leads, the others start what it asks for; runs in the parent of each."""
