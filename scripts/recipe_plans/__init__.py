"""Shared by ``scripts/recipes`` and the tests of the recipes."""
