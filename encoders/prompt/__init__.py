"""Converts messages to tokens and positions."""
