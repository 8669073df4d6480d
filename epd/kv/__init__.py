"""Decides what is computed next and which blocks hold its keys and values: policy without tensors."""
