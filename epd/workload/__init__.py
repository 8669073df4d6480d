"""Describes traffic: which requests, when they arrive, where they come from, and what their users see."""
