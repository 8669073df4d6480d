"""Runs the application in one process, without Ray: workers as threads."""
