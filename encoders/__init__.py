"""Turns frames into embeddings: one adapter per model family behind one protocol."""

from epd.host_memory import prefer_large_pages
from epd.machine import collector_paused

prefer_large_pages()  # torch takes its first memory below

with collector_paused():  # torch and transformers
    from epd.encoders.adapter import (
        Adapter,
        Embeddings,
        FrameSampling,
        Grid,
        ListedTimes,
        MediaItem,
        MediaPlan,
        PromptPlan,
        VideoFacts,
        concatenated,
        place,
    )
    from epd.encoders.pixels import OWN_LIMITS, PixelLimits
    from epd.encoders.prompt.chat import ChatMessage, ContentPart
    from epd.encoders.prompt.mrope import PositionLayout
    from epd.encoders.registry import ADAPTERS, load_adapter

__all__ = [
    "ADAPTERS",
    "OWN_LIMITS",
    "Adapter",
    "ChatMessage",
    "ContentPart",
    "Embeddings",
    "FrameSampling",
    "Grid",
    "ListedTimes",
    "MediaItem",
    "MediaPlan",
    "PixelLimits",
    "PositionLayout",
    "PromptPlan",
    "VideoFacts",
    "concatenated",
    "load_adapter",
    "place",
]
