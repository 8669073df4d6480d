"""Runs one worker: its stages behind messages, independent of their transport."""
