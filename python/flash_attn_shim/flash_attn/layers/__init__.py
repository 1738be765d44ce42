"""Layers; of these, rotary embeddings only."""
