import warnings

# Ray warns of itself while it is imported, which is an error in tests: imported here, before any of them.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ray.serve  # noqa: F401
