"""Searches for the layout with the highest goodput per device."""
