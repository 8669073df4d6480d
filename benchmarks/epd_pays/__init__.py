"""Whether splitting pays at equal devices: `python -m benchmarks.epd_pays`."""
