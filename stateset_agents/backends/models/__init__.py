"""Forward passes for generation: fused, batched and unbatched models with a KV cache."""
