"""Decides which tokens are computed next and which blocks hold their KV: policy without tensors."""
