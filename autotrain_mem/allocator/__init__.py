"""PyTorch's CUDA caching allocator, in pure Python."""
