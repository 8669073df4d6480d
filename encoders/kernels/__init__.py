"""Triton kernels, each beside a plain torch twin that says what it must compute."""
