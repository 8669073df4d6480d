"""Implements the encode stage: frames to embeddings, and embeddings on to prefill."""
