"""The pipeline on Ray Serve: the only package that imports Ray. Nothing here yet."""
