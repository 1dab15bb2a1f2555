"""Pure arithmetic on tensors and lists: advantages, losses, KL. No models."""
