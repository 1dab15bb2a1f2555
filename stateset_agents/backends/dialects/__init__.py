"""The APIs that clients speak: each reads a body as one neutral request, and writes the answers to it."""
