"""Adapts InternVL: an image is as many tiles as suit its shape, then itself; a video is a tile a frame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

from epd.encoders.checkpoint import Checkpoint
from epd.encoders.families.tiles import TileAdapter, TilePlan, check_last_layer, cut_tiles, tile_spec
from epd.encoders.prompt.text_layout import ItemText, Markers
from epd.types import MediaKind


class InternVLAdapter(TileAdapter):
    """Adapts `model_type` internvl."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        processor, vision = checkpoint.processor, checkpoint.config.vision_config
        self.image_spec = tile_spec(processor.image_processor, int(processor.image_processor.size["height"]))
        self.video_spec = tile_spec(processor.video_processor, int(processor.video_processor.size["height"]))
        self.patches_per_side = int(vision.image_size[0]) // int(vision.patch_size[0])
        self.tokens_per_tile = self.tokens_per_frame = int(processor.image_seq_length)
        pad = processor.image_token
        written: dict[MediaKind, str] = {"image": pad, "video": processor.video_token}
        self.markers = Markers(written, {"image": pad, "video": pad}, "{marker}\n")

    def canvas(self, height: int, width: int) -> tuple[int, int]:
        # Published files say crop_to_patches false, and the processor's call sets it all the same.
        processor, side = self.checkpoint.processor.image_processor, self.image_spec.side
        columns, rows = get_optimal_tiled_canvas(
            (height, width), (side, side), processor.min_patches, processor.max_patches
        )
        return rows, columns

    def tiles(self, image: Tensor, rows: int, columns: int) -> Tensor:
        side = self.image_spec.side
        tiles = cut_tiles(self.image_spec.resize(image, rows * side, columns * side), side)
        if len(tiles) == 1:
            return tiles
        return torch.cat([tiles, self.image_spec.resize(image, side, side)])

    def item_text(self, plan: TilePlan) -> ItemText:
        processor = self.checkpoint.processor
        start, pad, end = processor.start_image_token, processor.image_token, processor.end_image_token
        if plan.kind == "image":
            text = f"{start}{pad * plan.num_units}{end}"
        else:
            text = "\n".join(f"Frame{frame + 1}: {start}{pad}{end}" for frame in range(plan.num_units))
        return ItemText(text, (plan.tokens_per_unit,) * plan.num_units)

    def tower_layers(self, tower: Any) -> Sequence[nn.Module]:
        check_last_layer(tower.config)
        layers: Sequence[nn.Module] = tower.vision_tower.encoder.layer
        return layers

    def encode_tiles(self, tower: Any, pixels: Tensor, kind: MediaKind) -> Tensor:  # noqa: ARG002
        rows: Tensor = tower.get_image_features(pixel_values=pixels, return_dict=True).pooler_output
        return rows
