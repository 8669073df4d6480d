"""Describes models by the sizes of their layers, and counts parameters, FLOPs and bytes of them."""

from __future__ import annotations

from dataclasses import dataclass

from epd.profiles.media import MediaRule


@dataclass(frozen=True, slots=True)
class Transformer:
    """Describes a stack of layers.

    mlp_matrices: 3 if gated
    num_experts: that each have an MLP of mlp_hidden, of which num_active_experts compute a token
    is_tied: the head is the embedding of tokens
    attended: tokens one attends to in a tower
    is_in_place: queries and keys are rotated, and gates multiplied, where they are
    """

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_hidden: int
    mlp_matrices: int = 3
    vocabulary: int = 0
    attended: int = 0
    is_in_place: bool = False
    num_experts: int = 1
    num_active_experts: int = 1
    is_tied: bool = False

    @property
    def num_parameters(self) -> int:
        """Counts parameters of the layers and, if there is a vocabulary, its matrices: two, or a tied one."""
        return self._num_in_layers(self.num_experts) + (2 - self.is_tied) * self.vocabulary * self.hidden

    def _num_in_layers(self, num_experts: int) -> int:
        """Counts parameters of the layers with so many experts."""
        attention = self.hidden * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        router = self.hidden * self.num_experts if self.num_experts > 1 else 0
        mlp = num_experts * self.mlp_matrices * self.hidden * self.mlp_hidden
        return self.num_layers * (attention + router + mlp)

    @property
    def flops_per_token(self) -> float:
        """Counts the FLOPs of matrix products with weights, and of attention over `attended` tokens."""
        weights = self._num_in_layers(self.num_active_experts) + self.vocabulary * self.hidden
        return 2.0 * weights + self.attended * self.flops_per_pair

    @property
    def flops_per_pair(self) -> float:
        """Counts the FLOPs of attention of a token to another: score and weighted sum, in all layers."""
        return 4.0 * self.num_layers * self.num_heads * self.head_dim

    @property
    def kv_values_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def live_values_per_token(self) -> int:
        """Counts 16-bit values of a token that a layer holds at once, at its widest; no scores of attention.

        MLP: the residual, its norm, and the output of each matrix but the last beside the activation's.
        Attention: the residual, its norm, queries, keys and values, and those that are rotated. In place:
        what the layer was given too; two of the MLP's width; queries, keys and values, and the attended rows
        twice. Measured for Qwen2.5-VL (`stages/profiling.py`): 6 % more, its tower 3 %.
        """
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = 3 * queries + 2 * keys
        mlp = self.num_active_experts * self.mlp_hidden
        if self.is_in_place:
            return 3 * self.hidden + max(2 * mlp, attention)
        return 2 * self.hidden + max(self.mlp_matrices * mlp, attention + keys)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Describes a vision-language model.

    embeddings_per_token: 1, and one more for each deepstack feature
    num_projector_parameters: of what turns the tower's output into embeddings, where they are known
    context_tokens: the longest prompt and answer
    """

    name: str
    vision: Transformer
    language: Transformer
    media: MediaRule
    embeddings_per_token: int = 1
    num_projector_parameters: int = 0
    context_tokens: int | None = None
