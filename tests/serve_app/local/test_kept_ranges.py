"""Frames are known by their pixels, in a live server: parts of a video encode only what no other part had."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import av
import pytest
import torch

from epd import video
from epd.encoders import Adapter, FrameSampling, load_adapter
from epd.engine_config import EngineConfig
from epd.serve_app.cli.own_model import OwnConversation, open_model
from epd.stages.encode.embedding_store import KeptUnits
from tests.colocated import plan_media
from tests.media import write_video
from tests.serve_app.local.test_kept_embeddings import remuxed

_SECONDS, _FPS = 12, 8
_NUM_ASKED = 200


def cut(path: Path, to: Path, start_s: float) -> Path:
    """The packets from a keyframe on, without encoding them again."""
    with av.open(str(path)) as source, av.open(str(to), "w") as target:
        stream = source.streams.video[0]
        copied = target.add_stream_from_template(stream)
        first = None
        for packet in source.demux(stream):
            if packet.dts is None or packet.pts is None:
                continue
            if first is None and packet.is_keyframe and packet.pts * packet.time_base >= start_s:
                first = packet.pts
            if first is None or packet.pts < first:
                continue
            packet.pts, packet.dts = packet.pts - first, packet.dts - first
            packet.stream = copied
            target.mux(packet)
    return to


class Seen:
    """The units that requests had, by their pixels."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._units: set[bytes] = set()

    def new_patches(self, path: Path, sampling: FrameSampling) -> int:
        """Counts the patches of units that no request had, and notes them."""
        plan = plan_media(self._adapter, path, sampling).plan
        frames = torch.from_numpy(video.decode(path, times_s=plan.times_s, size=plan.size).data)
        num_patches = 0
        for unit in range(plan.num_units):
            each = plan.frame_range(unit, unit + 1)
            pixels = repr(plan.size).encode() + frames[each.start : each.stop].numpy().tobytes()
            if pixels not in self._units:
                self._units.add(pixels)
                num_patches += plan.part(unit, unit + 1).grid.num_patches
        return num_patches


def test_drawn_parts_encode_only_what_no_earlier_request_had(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Odd seconds, other rates, a remuxed copy, a cut, one frame; counted at the encoder."""
    # A tower as small as this one would encode some of it sooner than a disk gives it.
    monkeypatch.setattr(KeptUnits, "note_encoded", lambda *_: None)
    whole = write_video(tmp_path / "whole.mp4", num_frames=_SECONDS * _FPS, fps=_FPS, height=64, width=96)
    files = {
        whole: _SECONDS,
        remuxed(whole, tmp_path / "copy.mkv"): _SECONDS,
        cut(whole, tmp_path / "cut.mp4", 4.0): _SECONDS - 4,
    }
    model, draw = checkpoints["qwen2_5_vl"], random.Random(47)
    seen, num_hits = Seen(load_adapter(model)), 0
    with open_model(model, EngineConfig(cache_dir=tmp_path / "kept")) as service:

        def encoded(ask: Callable[[], object]) -> float:
            before = service.counters().get("encoded_patches", 0)
            ask()
            return service.counters()["encoded_patches"] - before

        for number in range(_NUM_ASKED):
            path = draw.choice(list(files))
            start_s = float(draw.randrange(files[path] - 1))
            end_s = float(draw.randrange(int(start_s) + 1, files[path] + 1))
            fps = draw.choice([1.0, 2.0, 4.0])
            needed = seen.new_patches(path, FrameSampling(fps=fps, start_s=start_s, end_s=end_s))
            options = {"fps": fps, "start": start_s, "end": end_s, "max_tokens": 1}
            asked = OwnConversation(service, [path], **options)
            found = encoded(lambda asked=asked: asked.ask("What?"))
            assert found == needed, (number, path.name, options)
            num_hits += not needed
    assert num_hits > _NUM_ASKED / 2, "most of it was seen before"
