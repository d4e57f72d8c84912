"""What ``scripts/recipes`` and the tests of the recipes are made of."""
