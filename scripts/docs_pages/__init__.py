"""Generates parts of the documentation from the code when the pages are built, so that they are never out of date."""
