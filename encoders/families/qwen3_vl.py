"""Adapts Qwen3-VL: each temporal patch of a video follows its time in words; deepstack features.

<|vision_start|> <0.2 seconds> <|vision_start|> pads <|vision_end|> <1.2 seconds> <|vision_start|> pads ...

Its modules are made without transformers. Names are those of transformers' modules, and of the weights in
the files. The tower computes, once `prepare_tower` lets it embed patches and attend. The language model only
holds weights, for `FusedDecoder`. P patches, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from epd.encoders.adapter import Embeddings
from epd.encoders.families.qwen_tower import TableGeometry, tabled_inputs
from epd.encoders.families.qwen_vl import QwenVLAdapter, frame_size
from epd.encoders.plans import Grid, MediaItem, MediaPlan
from epd.encoders.prompt.prompt import Expansion, VisualSpan, in_frames
from epd.pixel_limits import LEAST_SHARE, NO_CAPS, FrameCaps

# Of releases of transformers whose processor has no cap: what a later one's holds a frame to.
_MAX_FRAME_TOKENS = 768


class Qwen3VLAdapter(QwenVLAdapter):
    """Adapts `model_type` qwen3_vl and qwen3_vl_moe, which differ in the language model alone.

    And qwen3_5 and qwen3_5_moe, whose tower has no deepstack features.
    """

    video_takes_size_alone = True

    def video_size(
        self, num_frames: int, height: int, width: int, limits: tuple[int, int], caps: FrameCaps
    ) -> tuple[int, int]:
        unit, most = self.video_spec.frames_per_unit, self._max_pixels(num_frames, limits, caps)
        frames = max(num_frames, unit)
        return frame_size(frames, unit, height, width, self.video_spec.factor, limits[0], most)

    @staticmethod
    def _max_pixels(num_frames: int, limits: tuple[int, int], caps: FrameCaps) -> int:
        """Returns the limit of all frames together: that of `limits`, or what the caps leave of it."""
        if caps == NO_CAPS:
            return limits[1]
        each = max(int(caps.share(num_frames, limits[1])), int(limits[0] * LEAST_SHARE))
        return each * num_frames

    def processor_caps(self) -> FrameCaps:
        tokens = getattr(self.checkpoint.processor.video_processor, "max_video_tokens", _MAX_FRAME_TOKENS)
        return FrameCaps(int(tokens) * self.video_spec.factor**2)

    def tower_inputs(self, grids: tuple[Grid, ...], device: torch.device) -> dict[str, Tensor]:
        vision = self.checkpoint.config.vision_config
        side = int(vision.num_position_embeddings**0.5)
        return tabled_inputs(grids, TableGeometry(vision.spatial_merge_size, side), device)

    def prepare_decoder(self, decoder: nn.Module) -> None:
        """Lets the decoder add deepstack features at rows that are listed: a mask would be read back."""
        decoder._deepstack_process = _add_at_rows  # type: ignore[assignment]

    def decoder_kwargs(self, visual_rows: Tensor, embeddings: Embeddings) -> dict[str, Any]:
        if not embeddings.deepstack:
            return {}
        return {"visual_pos_masks": visual_rows, "deepstack_visual_embeds": list(embeddings.deepstack)}

    def expand(self, plan: MediaPlan) -> Expansion:
        if plan.kind == "image":
            return super().expand(plan)
        texts, pad_id = self.frame_texts(plan)
        frames = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return in_frames(frames, pad_id, plan.tokens_per_unit)

    def frame_texts(self, plan: MediaPlan) -> tuple[list[str], int]:
        """Returns the words of each unit of a video around one pad, and the pad's id.

        The time of a unit is the middle of its first and last frame's.
        """
        config, unit = self.checkpoint.config, plan.frames_per_unit
        ids = [config.vision_start_token_id, config.video_token_id, config.vision_end_token_id]
        pad = "".join(self.tokenizer.convert_ids_to_tokens(ids))
        times = [index / plan.source_fps for index in plan.frame_indices]
        times += [times[-1]] * (-len(times) % unit)
        middles = [(times[at] + times[at + unit - 1]) / 2 for at in range(0, len(times), unit)]
        return [f"<{middle:.1f} seconds>{pad}" for middle in middles], config.video_token_id

    def spans(self, item: MediaItem) -> Sequence[VisualSpan]:
        rows, columns = item.plan.grid.h // self.video_spec.merge, item.plan.grid.w // self.video_spec.merge
        return [VisualSpan(unit, 1, rows, columns) for unit in item.units]


def _add_at_rows(hidden: Tensor, rows: Tensor, features: Tensor) -> Tensor:
    """Adds features [V, C] to the rows, int64 [V], of hidden [1, T, C]."""
    added = hidden[0].index_select(0, rows) + features.to(hidden.dtype)
    return hidden.index_copy(1, rows, added[None])


_TOWER_EPS = 1e-6  # of the tower's norms, in no configuration


class Parts(nn.Module):
    """Holds modules by name, and what others ask of them as attributes; it computes nothing."""

    def __init__(self, parts: dict[str, nn.Module], **attributes: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        for name, value in attributes.items():
            setattr(self, name, value)


class Qwen3VLModules(nn.Module):
    """Holds the parts of a whole model, as transformers' class of that name does."""

    def __init__(self, config: Any) -> None:
        """Takes a configuration without deepstack layers. Parameters are on torch's default device."""
        super().__init__()
        if config.vision_config.deepstack_visual_indexes:
            raise ValueError("these modules have no deepstack layers; create transformers' own")
        text = config.text_config
        self.config = config
        self.model = Parts({"visual": Tower(config.vision_config), "language_model": _language_model(text)})
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)

    def get_decoder(self) -> Any:
        return self.model.language_model

    def get_input_embeddings(self) -> Any:
        return self.get_decoder().embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def _language_model(text: Any) -> Parts:
    rope = text.rope_parameters
    rotary = Parts({}, attention_scaling=1.0, mrope_section=rope["mrope_section"])
    rotary.register_buffer("inv_freq", _frequencies(rope["rope_theta"], text.head_dim), persistent=False)
    parts: dict[str, nn.Module] = {
        "embed_tokens": _embedding(text.vocab_size, text.hidden_size),
        "layers": nn.ModuleList(_layer(text) for _ in range(text.num_hidden_layers)),
        "norm": nn.RMSNorm(text.hidden_size),
        "rotary_emb": rotary,
    }
    return Parts(parts, config=text)


def _layer(text: Any) -> Parts:
    size, queries = text.hidden_size, text.num_attention_heads * text.head_dim
    keys, inner = text.num_key_value_heads * text.head_dim, text.intermediate_size
    attention = _linears({"q_proj": (size, queries), "k_proj": (size, keys), "v_proj": (size, keys)})
    attention |= _linears({"o_proj": (queries, size)})
    attention |= {"q_norm": nn.RMSNorm(text.head_dim), "k_norm": nn.RMSNorm(text.head_dim)}
    mlp = _linears({"gate_proj": (size, inner), "up_proj": (size, inner), "down_proj": (inner, size)})
    return Parts(
        {
            "self_attn": Parts(attention, head_dim=text.head_dim, scaling=text.head_dim**-0.5),
            "mlp": Parts(mlp),
            "input_layernorm": nn.RMSNorm(size),
            "post_attention_layernorm": nn.RMSNorm(size),
        }
    )


def _embedding(num_rows: int, size: int) -> nn.Embedding:
    """Creates a table that is not initialised: on the meta device that would import torch's compiler."""
    return nn.Embedding(num_rows, size, _weight=torch.empty(num_rows, size))


def _linears(sizes: dict[str, tuple[int, int]]) -> dict[str, nn.Module]:
    return {name: nn.Linear(*size, bias=False) for name, size in sizes.items()}


def _frequencies(theta: float, dim: int) -> Tensor:
    """Returns the rotary frequencies of `dim` channels: float32 [dim / 2], on the CPU."""
    steps = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu")
    return 1.0 / theta ** (steps / dim)


class TowerOutput(NamedTuple):
    """Holds the rows of visual tokens, [P / merge**2, C of the language model]."""

    pooler_output: Tensor


class Tower(nn.Module):
    """Computes the rows of visual tokens of flat patches."""

    def __init__(self, vision: Any) -> None:
        super().__init__()
        size, kernel = vision.hidden_size, (vision.temporal_patch_size, vision.patch_size, vision.patch_size)
        self.config = vision
        self.patch_embed = Parts({"proj": nn.Conv3d(vision.in_channels, size, kernel, kernel)})
        self.pos_embed = _embedding(vision.num_position_embeddings, size)
        self.blocks = nn.ModuleList(_Block(vision) for _ in range(vision.depth))
        self.merger = _Merger(vision)
        self.inv_freq: Tensor
        theta, dim = vision.rope_parameters["rope_theta"], size // vision.num_heads // 2
        self.register_buffer("inv_freq", _frequencies(theta, dim), persistent=False)

    def forward(
        self,
        patches: Tensor,
        *,
        position_ids: Tensor,
        interp_indices: Tensor,
        interp_weights: Tensor,
        cu_seqlens: Tensor,
        **_: Any,
    ) -> TowerOutput:
        """Takes patches [P, channels of a patch], and what `tabled_inputs` returns."""
        places = (self.pos_embed(interp_indices) * interp_weights[:, :, None]).sum(1)
        hidden = self.patch_embed(patches)
        hidden = hidden + places.to(hidden.dtype)
        angles = (position_ids[..., None].float() * self.inv_freq).flatten(1).repeat(1, 2)
        for block in self.blocks:
            hidden = block(hidden, cu_seqlens=cu_seqlens, position_embeddings=(angles.cos(), angles.sin()))
        return TowerOutput(self.merger(hidden))


class _Block(nn.Module):
    """Computes one layer of the tower, [P, C]."""

    def __init__(self, vision: Any) -> None:
        super().__init__()
        size, heads = vision.hidden_size, vision.num_heads
        parts: dict[str, nn.Module] = {"qkv": nn.Linear(size, 3 * size), "proj": nn.Linear(size, size)}
        self.norm1, self.norm2 = (nn.LayerNorm(size, _TOWER_EPS) for _ in range(2))
        self.attn = Parts(parts, num_heads=heads, scaling=(size // heads) ** -0.5)
        self.mlp = _Mlp(size, vision.intermediate_size)

    def forward(self, hidden: Tensor, **inputs: Any) -> Tensor:
        hidden = hidden + self.attn(self.norm1(hidden), **inputs)
        added: Tensor = self.mlp(self.norm2(hidden))
        return hidden + added


class _Mlp(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Linear(size, inner), nn.Linear(inner, size)

    def forward(self, hidden: Tensor) -> Tensor:
        computed: Tensor = self.linear_fc2(gelu(self.linear_fc1(hidden), approximate="tanh"))
        return computed


class _Merger(nn.Module):
    """Joins the patches of a visual token: [P, C] to [P / merge**2, C of the language model]."""

    def __init__(self, vision: Any) -> None:
        super().__init__()
        joined = vision.hidden_size * vision.spatial_merge_size**2
        self.norm = nn.LayerNorm(vision.hidden_size, _TOWER_EPS)
        self.linear_fc1, self.linear_fc2 = (
            nn.Linear(joined, joined),
            nn.Linear(joined, vision.out_hidden_size),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        joined = self.norm(hidden).view(-1, self.linear_fc1.in_features)
        rows: Tensor = self.linear_fc2(gelu(self.linear_fc1(joined)))
        return rows
