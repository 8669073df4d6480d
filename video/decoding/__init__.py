"""Turns compressed bytes into frames, group by group, in parallel."""
