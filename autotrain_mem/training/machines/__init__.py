"""Several machines that train together: the first leads, and the others start what it asks for. All in the parents."""
