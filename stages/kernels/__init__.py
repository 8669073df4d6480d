"""Contains Triton kernels of the KV cache, each beside a plain torch twin that defines its result."""
