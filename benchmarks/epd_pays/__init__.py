"""Whether splitting pays beside plain replicas: `python -m benchmarks.epd_pays.replicas`."""
