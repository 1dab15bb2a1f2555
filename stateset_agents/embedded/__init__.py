"""The small models that ship: their weights and cards, and how such a network and tokenizer are made."""
