"""Reduces keys and values inside the language model."""
