"""The forward passes: fused, batched and unbatched models over one key-value cache, and their linears."""
