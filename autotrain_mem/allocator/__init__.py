"""Simulates PyTorch's CUDA caching allocator. Runs in any process (pure)."""
