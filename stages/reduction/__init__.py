"""Fewer keys and values inside the language model."""
