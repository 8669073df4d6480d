"""How embeddings, keys and values, and messages get from one worker to another without loss."""
