"""Runs the application on Ray: its fronts, media and stage workers as deployments of Ray Serve."""
