"""Measures encoding: sizes of groups, towers and processors."""
