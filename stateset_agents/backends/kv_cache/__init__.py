"""The KV cache: slots, their store, attention over them, memory."""
