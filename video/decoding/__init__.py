"""Compressed bytes to frames, group by group, in parallel."""
