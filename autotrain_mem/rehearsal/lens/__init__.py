"""What CUDA does otherwise than the CPU, imitated; one module for each kind of rule, composed in ``cuda``."""
