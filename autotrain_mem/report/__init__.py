"""What a person reads: the terminal and the files in the output folder."""
