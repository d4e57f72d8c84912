"""Makes a tiny model, tokenizer and dataset for a first run without network or GPU. Runs in the parent."""
