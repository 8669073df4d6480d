"""Measures decoding of videos against other readers."""
