"""A tiny model, tokenizer and dataset, all made on the spot, for a first run without network or GPU."""
