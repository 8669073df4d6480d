"""Describes models by the sizes of their layers, and counts parameters, FLOPs and bytes of them."""

from __future__ import annotations

from dataclasses import dataclass

from epd.profiles.media import MediaRule


@dataclass(frozen=True, slots=True)
class DeltaLayers:
    """Describes layers with a gated delta rule, which keep a state of fixed size in the place of tokens.

    num_key_heads, num_value_heads: of key_dim and value_dim channels each
    kernel: inputs that the convolution takes
    """

    num_layers: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def num_channels(self) -> int:
        """Counts the channels of queries, keys and values, which the convolution has."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def _matrix_values(self) -> int:
        return self.num_value_heads * self.key_dim * self.value_dim

    def num_parameters(self, hidden: int) -> int:
        """Counts the parameters of all layers: projections, gates, convolution, output."""
        values = self.num_value_heads * self.value_dim
        projected = self.num_channels + values + 2 * self.num_value_heads
        return self.num_layers * (hidden * (projected + values) + self.kernel * self.num_channels)

    @property
    def flops_per_token(self) -> int:
        """Counts the FLOPs of the rule in all layers: a head's matrix is read, corrected, and read again."""
        return 6 * self.num_layers * self._matrix_values

    def state_bytes(self, bytes_per_value: int) -> int:
        """Counts what a sequence keeps: the convolution's last inputs, and a float32 matrix of each head."""
        tail = (self.kernel - 1) * self.num_channels * bytes_per_value
        return self.num_layers * (tail + 4 * self._matrix_values)


@dataclass(frozen=True, slots=True)
class WindowLayers:
    """Describes layers that attend the last `window` tokens alone, with heads of their own sizes.

    num_lent: of these layers, those that read keys and values of others
    """

    num_layers: int = 0
    window: int = 0
    num_kv_heads: int = 0
    head_dim: int = 1
    num_lent: int = 0

    @property
    def kv_values_per_token(self) -> int:
        """Counts the values of keys and values that a token leaves in all layers."""
        return 2 * (self.num_layers - self.num_lent) * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class JoinedLayers:
    """Describes a merger that joins a tower's patches four by four, and the layers behind it.

    num_layers: that compute a quarter of the patches
    num_parameters: of the merger
    products_per_patch: its multiplications for each patch before
    """

    num_layers: int
    num_parameters: int
    products_per_patch: int

    def saved_flops(self, share_of_weights: float, share_of_attention: float) -> float:
        """Returns what a patch saves. Shares: the FLOPs that these layers would have without the merger."""
        return 3 / 4 * share_of_weights + 15 / 16 * share_of_attention - 2.0 * self.products_per_patch


@dataclass(frozen=True, slots=True)
class Transformer:
    """Describes a stack of layers.

    mlp_matrices: 3 if gated
    num_experts: that each have an MLP of mlp_hidden, of which num_active_experts compute a token
    is_tied: the head is the embedding of tokens
    attended: tokens one attends to in a tower
    is_in_place: queries and keys are rotated, and gates multiplied, where they are
    shared_mlp_hidden: of an expert that computes every token beside the others
    media_mlp_hidden: of as many experts again, which compute the tokens of media alone
    num_dense: layers with an MLP of dense_hidden in the place of the others', or of experts
    has_query_gate: attention's output is multiplied by a gate, which is as wide as the queries
    num_lent: of the layers that attend all tokens, those that read keys and values of others
    has_value_matrix: in these layers; else values are made of keys
    layer_inputs: channels that each layer gets of each token beside, from a table of all tokens
    windowed: the layers with a window
    delta: the layers that have a recurrent state, None for attention in all
    joined: the last layers of a tower, behind a merger of patches, None for all patches in all
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
    shared_mlp_hidden: int = 0
    media_mlp_hidden: int = 0
    num_dense: int = 0
    dense_hidden: int = 0
    has_query_gate: bool = False
    num_lent: int = 0
    has_value_matrix: bool = True
    layer_inputs: int = 0
    windowed: WindowLayers = WindowLayers()
    delta: DeltaLayers | None = None
    joined: JoinedLayers | None = None

    @property
    def num_full(self) -> int:
        """Counts the layers that attend all tokens."""
        recurrent = 0 if self.delta is None else self.delta.num_layers
        return self.num_layers - self.windowed.num_layers - recurrent

    @property
    def num_looked_up(self) -> int:
        """Counts the parameters of the table of layers' inputs, of which a token reads a row."""
        return self.vocabulary * self.num_layers * self.layer_inputs

    @property
    def num_in_experts(self) -> int:
        """Counts the parameters of all experts, of which a token reads num_active_experts; 0 without any."""
        widths = self.mlp_hidden + self.media_mlp_hidden
        return self._num_in_experts(self.num_experts, widths) if self.num_experts > 1 else 0

    def _num_in_experts(self, num_experts: int, width: int) -> int:
        num_layers = self.num_layers - self.num_dense
        return num_layers * num_experts * self.mlp_matrices * self.hidden * width

    @property
    def num_parameters(self) -> int:
        """Counts parameters of the layers and, if there is a vocabulary, its matrices: two, or a tied one."""
        merger = 0 if self.joined is None else self.joined.num_parameters
        vocabulary = (2 - self.is_tied) * self.vocabulary * self.hidden
        return self.num_in_layers + merger + self.num_looked_up + vocabulary

    @property
    def num_in_layers(self) -> int:
        """Counts parameters of the layers, those of all experts too."""
        return self._num_in_layers(self.num_experts, self.mlp_hidden + self.media_mlp_hidden)

    def _num_in_layers(self, num_experts: int, width: int) -> int:
        """Counts parameters of the layers with so many experts of a width."""
        attention = self.hidden * (self._channels_of_queries + self._channels_of_keys)
        inputs = 3 * self.num_layers * self.hidden * self.layer_inputs
        recurrent = 0 if self.delta is None else self.delta.num_parameters(self.hidden)
        router = self.hidden * self.num_experts if self.num_experts > 1 else 0
        shared = self.mlp_matrices * self.hidden * self.shared_mlp_hidden
        dense = self.num_dense * self.mlp_matrices * self.hidden * self.dense_hidden
        beside = (self.num_layers - self.num_dense) * (router + shared) + dense
        return attention + inputs + recurrent + beside + self._num_in_experts(num_experts, width)

    @property
    def _channels_of_queries(self) -> int:
        """Counts those of queries, gates and outputs in all layers with attention."""
        channels = self.num_full * self.head_dim + self.windowed.num_layers * self.windowed.head_dim
        return (2 + self.has_query_gate) * self.num_heads * channels

    @property
    def _channels_of_keys(self) -> int:
        """Counts those of keys and values that have a matrix, in all layers."""
        full = self.kv_values_per_token if self.has_value_matrix else self.kv_values_per_token // 2
        return full + self.windowed.kv_values_per_token

    @property
    def flops_per_token(self) -> float:
        """Counts the FLOPs of a token that no context changes.

        Those of matrix products with weights, of attention over `attended` tokens or a full window, and of
        recurrent layers.
        """
        weights = self._num_in_layers(self.num_active_experts, self.mlp_hidden)
        weights += self.vocabulary * self.hidden
        windowed = self.windowed
        windows = 4.0 * windowed.num_layers * self.num_heads * windowed.head_dim * windowed.window
        recurrent = 0 if self.delta is None else self.delta.flops_per_token
        attention = self.attended * self.flops_per_pair
        share = 0.0 if self.joined is None else self.joined.num_layers / self.num_layers
        saved = self.joined.saved_flops(2.0 * weights * share, attention * share) if self.joined else 0.0
        return 2.0 * weights + attention + windows + recurrent - saved

    @property
    def flops_per_media_token(self) -> float:
        """Counts the same of a token of media, which may have experts of its own."""
        less = self.mlp_hidden - (self.media_mlp_hidden or self.mlp_hidden)
        return self.flops_per_token - 2.0 * self._num_in_experts(self.num_active_experts, less)

    @property
    def flops_per_pair(self) -> float:
        """Counts the FLOPs of attention of a token to another, in layers that attend all: score and sum."""
        return 4.0 * self.num_full * self.num_heads * self.head_dim

    @property
    def kv_values_per_token(self) -> int:
        """Counts the values of keys and values that a token leaves in layers that attend all."""
        return 2 * (self.num_full - self.num_lent) * self.num_kv_heads * self.head_dim

    @property
    def live_values_per_token(self) -> int:
        """Counts 16-bit values of a token that a layer holds at once, at its widest; no scores of attention.

        MLP: the residual, its norm, and the output of each matrix but the last beside the activation's.
        Attention: the residual, its norm, queries, keys and values, and those that are rotated. In place:
        what the layer was given too; two of the MLP's width; queries, keys and values, and the attended rows
        twice. Measured for Qwen2.5-VL (`stages/profiling.py`): 6 % more, its tower 3 %. Recurrent layers were
        not measured: channels before and after the convolution, gate and output, and float32 heads. Inputs of
        layers are there for all of them.
        """
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = 3 * queries + 2 * keys
        mlp = max(self.num_active_experts * self.mlp_hidden + self.shared_mlp_hidden, self.dense_hidden)
        if self.is_in_place:
            return 3 * self.hidden + max(2 * mlp, attention)
        gates = queries if self.has_query_gate else 0
        recurrent = 0
        if self.delta is not None:
            values = self.delta.num_value_heads * self.delta.value_dim
            heads = self.delta.num_value_heads * (2 * self.delta.key_dim + self.delta.value_dim)
            recurrent = 2 * (self.delta.num_channels + values + heads)
        inputs = self.num_layers * self.layer_inputs
        return 2 * self.hidden + inputs + max(self.mlp_matrices * mlp, attention + keys + gates, recurrent)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Describes a vision-language model.

    embeddings_per_token: 1, and one more for each deepstack feature
    num_projector_parameters: of what turns the tower's output into embeddings, where they are known
    context_tokens: the longest prompt and answer
    is_shared: whether several devices can share its layers
    layer_bytes: of a weight in the layers of the language model
    """

    name: str
    vision: Transformer
    language: Transformer
    media: MediaRule
    embeddings_per_token: int = 1
    num_projector_parameters: int = 0
    context_tokens: int | None = None
    is_shared: bool = True
    layer_bytes: float = 2.0

    @property
    def weight_bytes(self) -> int:
        """Counts the bytes of the language model."""
        others = self.language.num_parameters - self.language.num_in_layers
        return 2 * others + round(self.layer_bytes * self.language.num_in_layers)
