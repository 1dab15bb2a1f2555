"""Conversations as rows of tokens: layout, packing, the chunked head."""
