"""Contains Triton kernels, each beside a plain torch twin that defines its result."""
