"""Adapts Gemma 3: an image is one square, between words that begin and end it. It takes no videos."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from epd.encoders.checkpoint import Checkpoint
from epd.encoders.families.tiles import TileAdapter, TilePlan, tile_spec
from epd.encoders.plans import VideoFacts
from epd.encoders.prompt.text_layout import ItemText, Markers
from epd.errors import UnsupportedMediaError, UnsupportedModelError
from epd.frame_sampling import FrameSampling
from epd.pixel_limits import OWN_LIMITS, PixelLimits
from epd.types import MediaKind


class Gemma3Adapter(TileAdapter):
    """Adapts `model_type` gemma3, whose language model lets the tokens of an image attend each other."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        config, processor, tokenizer = checkpoint.config, checkpoint.processor, checkpoint.tokenizer
        _check_supported(config, processor)
        self.image_spec = tile_spec(processor.image_processor, int(config.vision_config.image_size))
        self.patches_per_side = self.image_spec.side // int(config.vision_config.patch_size)
        self.tokens_per_tile = self.tokens_per_frame = int(config.mm_tokens_per_image)
        self._start, self._end = tokenizer.boi_token, tokenizer.eoi_token
        self.markers = Markers({"image": self._start}, {"image": tokenizer.image_token})

    def plan_video(
        self,
        video: VideoFacts,  # noqa: ARG002
        frame_sampling: FrameSampling,  # noqa: ARG002
        pixels: PixelLimits = OWN_LIMITS,  # noqa: ARG002
    ) -> TilePlan:
        raise UnsupportedMediaError(
            f"received a video for a {self.checkpoint.config.model_type} model; allowed: images and text; "
            "send some of its frames as images, or use another model"
        )

    def canvas(self, height: int, width: int) -> tuple[int, int]:  # noqa: ARG002
        return 1, 1

    def tiles(self, image: Tensor, rows: int, columns: int) -> Tensor:  # noqa: ARG002
        return self.image_spec.resize(image, self.image_spec.side, self.image_spec.side)

    def item_text(self, plan: TilePlan) -> ItemText:
        text = f"\n\n{self._start}{self.markers.pads['image']}{self._end}\n\n"
        return ItemText(text, (plan.tokens_per_unit,))

    def tower_layers(self, tower: Any) -> Sequence[nn.Module]:
        layers: Sequence[nn.Module] = tower.vision_tower.encoder.layers
        return layers

    def encode_tiles(self, tower: Any, pixels: Tensor, kind: MediaKind) -> Tensor:  # noqa: ARG002
        rows: Tensor = tower.get_image_features(pixel_values=pixels, return_dict=True).pooler_output
        return rows


def _check_supported(config: Any, processor: Any) -> None:
    """Raises UnsupportedModelError for images that are cut, or that are no squares of the tower's size."""
    images, side = processor.image_processor, config.vision_config.image_size
    sizes = {images.size["height"], images.size["width"]}
    if images.do_pan_and_scan or sizes != {side} or processor.image_seq_length != config.mm_tokens_per_image:
        raise UnsupportedModelError(
            f"a processor with do_pan_and_scan={images.do_pan_and_scan}, size={dict(images.size)} and "
            f"image_seq_length={processor.image_seq_length} is not supported; allowed: no pan and scan, "
            f"squares of {side} pixels and {config.mm_tokens_per_image} tokens; change its files"
        )
