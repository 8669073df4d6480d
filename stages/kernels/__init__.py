"""Triton kernels of the KV cache, each beside a plain torch twin that says what it must compute."""
