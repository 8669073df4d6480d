"""A KV cache that transformers' decoders fill and that can be cut back to a shared prefix.

transformers' own dynamic cache copies everything it holds for every token. This one keeps room ahead:

    buffer   [ media prefix | question | answer ....|      free      )
             0              prefix     ..           length           capacity
    crop(prefix) makes the next question start where the media ended.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_LEAST_CAPACITY = 64


class _Layer(CacheLayerMixin):  # type: ignore[misc] # the base class is untyped
    """Keys and values of one decoder layer, [1, heads, capacity, head_dim]; `length` tokens are held."""

    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = max(capacity, _LEAST_CAPACITY)
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = self._buffer(key_states)
        self.values = self._buffer(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Appends [1, heads, new tokens, head_dim]; returns all that is held, as views."""
        stop = self.length + key_states.shape[2]
        if not self.is_initialized:
            self.capacity = max(self.capacity, stop)
            self.lazy_initialization(key_states, value_states)
        elif stop > self.capacity:
            self._grow(stop)
        self.keys[:, :, self.length : stop] = key_states
        self.values[:, :, self.length : stop] = value_states
        self.length = stop
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def _grow(self, needed: int) -> None:
        held_keys, held_values = self.keys[:, :, : self.length], self.values[:, :, : self.length]
        self.capacity = max(needed, 2 * self.capacity)
        self.keys, self.values = self._buffer(held_keys), self._buffer(held_values)
        self.keys[:, :, : self.length] = held_keys
        self.values[:, :, : self.length] = held_values

    def _buffer(self, like: Tensor) -> Tensor:
        return like.new_empty(like.shape[0], like.shape[1], self.capacity, like.shape[3])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in older releases


class KVCache:
    """The cache of one conversation; `as_past` is what a decoder takes as `past_key_values`."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        self._layers = [_Layer(capacity) for _ in range(num_layers)]
        self.as_past: Any = Cache(layers=self._layers)

    def __len__(self) -> int:
        return self._layers[0].length

    def crop(self, length: int) -> None:
        """Forgets all tokens from `length` on. Raises ValueError when fewer are held."""
        if not 0 <= length <= len(self):
            raise ValueError(f"cannot keep {length} tokens of the {len(self)} held")
        for layer in self._layers:
            layer.length = length

    @property
    def num_bytes(self) -> int:
        """Bytes reserved for keys and values."""
        held = [layer for layer in self._layers if layer.is_initialized]
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in held)
