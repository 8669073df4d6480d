"""Embeddings on disk where keys and values cannot be: another life of a server encodes nothing again."""

from __future__ import annotations

from pathlib import Path
from shutil import rmtree
from typing import Any

import av
import pytest

from epd.engine_config import EngineConfig
from epd.serve_app.cli.own_model import OwnConversation, open_model
from epd.serve_app.local.own_service import OwnService
from epd.types import Answer, Reuse, Usage
from tests.encoders.tiny_gemma import build_gemma3
from tests.tiny_models import build_qwen3_5

_OPTIONS: dict[str, Any] = {"max_tokens": 8, "frames": 12}


def asked(service: OwnService, medium: Path, question: str) -> tuple[str, float]:
    """The answer, and the patches that were encoded for it."""
    before = service.counters().get("encoded_patches", 0)
    text = OwnConversation(service, [medium], **_OPTIONS).ask(question).text
    return text, service.counters()["encoded_patches"] - before


def remuxed(path: Path, to: Path) -> Path:
    """The same packets in another container."""
    with av.open(str(path)) as source, av.open(str(to), "w") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
    return to


@pytest.mark.parametrize("kind", ["recurrent states", "sliding windows"])
def test_another_life_encodes_nothing(kind: str, tmp_path: Path, media: dict[str, Path]) -> None:
    """Another question, also about a copy in another container."""
    build, medium = (build_qwen3_5, media["video"])
    if kind == "sliding windows":
        build, medium = build_gemma3, media["image"]
    model = build(tmp_path / "model")
    config = EngineConfig(cache_dir=tmp_path / "kept")
    with open_model(model, EngineConfig()) as plain:
        expected = [asked(plain, medium, question)[0] for question in ("What?", "And where?")]
    with open_model(model, config) as first:
        text, num_patches = asked(first, medium, "What?")
        assert text == expected[0]
        assert num_patches > 0
    with open_model(model, config) as second:
        assert asked(second, medium, "And where?") == (expected[1], 0)
        assert second.counters()["store_read_embeddings"] > 0
        if kind == "recurrent states":
            assert asked(second, remuxed(medium, tmp_path / "copy.mkv"), "What?") == (expected[0], 0)
    damaged = max((tmp_path / "kept").glob("*/?/*"), key=lambda path: path.stat().st_size)
    half = damaged.stat().st_size // 2
    damaged.write_bytes(
        damaged.read_bytes()[:half] + b"?" * half
    )  # units, and the names of groups after them
    with open_model(model, config) as third:
        text, again = asked(third, medium, "And where?")
        assert text == expected[1]
        assert 0 < again <= num_patches


def test_substituted_frames_are_told_after_a_restart(
    checkpoints: dict[str, Path], tmp_path: Path, damaged_video: Path
) -> None:
    for _ in range(2):
        with open_model(checkpoints["qwen2_5_vl"], EngineConfig(cache_dir=tmp_path)) as life:
            usage = OwnConversation(life, [damaged_video], max_tokens=4, frames=8).ask("What?").usage
            assert usage.num_substituted_frames == 1
    assert usage.num_unread_frames == usage.num_frames


def test_an_answer_says_what_came_from_where(
    checkpoints: dict[str, Path], tmp_path: Path, media: dict[str, Path]
) -> None:
    """Nothing, then all keys and values in memory, on disk; after their loss the embeddings; and none off."""
    model, medium, kept = checkpoints["qwen2_5_vl"], media["video"], tmp_path / "kept"

    def usage(service: OwnService) -> Usage:
        return OwnConversation(service, [medium], **_OPTIONS).ask("What?").usage

    with open_model(model, EngineConfig(cache_dir=kept)) as first:
        cold, again = usage(first), usage(first)
    assert (cold.reused, cold.num_unread_frames) == ((), 0)
    assert [(each.kind, each.tier, each.num_bytes) for each in again.reused] == [("kv", "memory", 0)]
    assert again.num_unread_frames == cold.num_frames
    with open_model(model, EngineConfig(cache_dir=kept)) as second:
        warm = usage(second)
        counters = second.counters()
    (found,) = warm.reused
    assert (found.kind, found.tier) == ("kv", "disk")
    assert cold.visual_tokens <= found.num == counters["store_read_tokens"]
    assert found.num_bytes == counters["store_read_bytes"] > 0
    assert warm.num_unread_frames == cold.num_frames
    for folder in kept.iterdir():
        if folder.is_dir() and "keys and values" in (folder / "about.json").read_text():
            rmtree(folder)
    with open_model(model, EngineConfig(cache_dir=kept)) as third:
        (found,) = usage(third).reused
        assert found == Reuse("embeddings", "disk", cold.visual_tokens, found.num_bytes)
        assert found.num_bytes == third.counters()["store_read_bytes"] > 0
    with open_model(model, EngineConfig()) as plain:
        assert [usage(plain), usage(plain)] == [cold, cold]


def test_another_machine_finds_what_is_in_the_object_store(
    checkpoints: dict[str, Path], tmp_path: Path, media: dict[str, Path]
) -> None:
    """Its own folder is empty: first all keys and values are there, then the embeddings alone."""
    model, medium, objects = checkpoints["qwen2_5_vl"], media["video"], tmp_path / "objects"

    def answer(machine: str) -> Answer:
        config = EngineConfig(cache_dir=tmp_path / machine, cache_objects=objects.as_uri())
        with open_model(model, config) as service:
            return OwnConversation(service, [medium], **_OPTIONS).ask("What?")

    cold = answer("first")
    assert cold.usage.reused == ()
    warm = answer("second")
    (found,) = warm.usage.reused
    assert (found.kind, found.tier) == ("kv", "objects")
    assert warm.usage.num_unread_frames == cold.usage.num_frames
    for folder in objects.iterdir():
        if "keys and values" in (folder / "about.json").read_text():
            rmtree(folder)
    other = answer("third")
    (found,) = other.usage.reused
    assert (found.kind, found.tier, found.num) == ("embeddings", "objects", cold.usage.visual_tokens)
    assert cold.text == warm.text == other.text
