"""Media of requests: fetched or decoded from the body, and kept as files within limits."""
