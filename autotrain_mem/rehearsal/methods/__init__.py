"""One module for each trainer: how TRL builds it, what its worst batch is, and which data it takes."""
