"""From text to tokens and back: tokenizers, bounds, turns as text, streams."""
