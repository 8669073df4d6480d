"""The application in one process, without Ray: workers as threads."""
