"""One module per training method: how its trainer is built and what its worst batch is."""
