"""Frames to embeddings: one adapter per model family behind one protocol."""

from encoders.adapter import (
    Adapter,
    Embeddings,
    Grid,
    MediaItem,
    MediaPlan,
    PromptPlan,
    Sampling,
    VideoFacts,
    concatenated,
    place,
)
from encoders.prompt.chat import ChatMessage, ContentPart, check_question
from encoders.prompt.mrope import PositionLayout
from encoders.registry import ADAPTERS, load_adapter

__all__ = [
    "ADAPTERS",
    "Adapter",
    "ChatMessage",
    "ContentPart",
    "Embeddings",
    "Grid",
    "MediaItem",
    "MediaPlan",
    "PositionLayout",
    "PromptPlan",
    "Sampling",
    "VideoFacts",
    "check_question",
    "concatenated",
    "load_adapter",
    "place",
]
