"""Runs the application on Ray: workers as actors behind Ray Serve."""
