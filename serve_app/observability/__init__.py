"""Records metrics, traces and one log line for each request."""
