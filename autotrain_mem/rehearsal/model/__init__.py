"""Makes models without weights: named, quantized, with few layers. Runs in the worker."""
