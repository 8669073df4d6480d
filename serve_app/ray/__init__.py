"""The application on Ray: workers as actors, Ray Serve in front."""
