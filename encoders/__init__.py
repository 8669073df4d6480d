"""Turns frames into embeddings: one adapter per model family behind one protocol."""

from epd.host_memory import prefer_large_pages
from epd.machine import collector_paused

prefer_large_pages()  # torch takes its first memory below

with collector_paused():  # torch and transformers
    from epd.chat import ChatMessage, ContentPart
    from epd.encoders.adapter import Adapter, Embeddings, concatenated, num_deepstack, place
    from epd.encoders.plans import Grid, MediaItem, MediaPlan, PromptPlan, VideoFacts
    from epd.encoders.prompt.prompt import PositionLayout
    from epd.encoders.registry import ADAPTERS, load_adapter
    from epd.frame_sampling import FrameSampling, ListedTimes
    from epd.pixel_limits import OWN_LIMITS, PixelLimits

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
    "num_deepstack",
    "place",
]
