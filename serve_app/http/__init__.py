"""The HTTP server: requests are parsed and checked, responses are built and streamed."""
