"""What the documentation shows of the code: tables made of it when the pages are built, so that they cannot drift."""
