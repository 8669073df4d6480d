"""Moves embeddings, keys and values, and messages from one worker to another without loss."""
