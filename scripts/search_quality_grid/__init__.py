"""What the search of a plan chose, against every point that it could have chosen."""
