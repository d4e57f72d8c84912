"""Compares the result of a search with every point that it could have chosen."""
