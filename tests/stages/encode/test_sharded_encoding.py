"""One request over many encoders: the same embeddings, in the same order, and nothing made twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from epd import video
from epd.encode.encoder_cache import EncoderCacheManager, GroupSpec
from epd.encoders import MediaPlan, VideoFacts
from epd.encoders.adapter import Embeddings, PatchRun
from epd.encoders.groups import FrameEncoder, MediaGroup, cut, plan_groups
from epd.encoders.plans import Grid
from epd.errors import EncodeError, InfeasibleError
from epd.stages.connectors.mailbox import InProcessHub
from epd.stages.encode.encoder import EncodeJob, EncodeStage
from epd.stages.encode.encoder_pool import EmbeddingLayout, EmbeddingReceiver, EncoderPool
from epd.types import content_hash
from tests.encoders.fakes import FakeFamily, fake_frames, fake_key, fake_plan
from tests.encoders.families import Family, Picture
from tests.encoders.tolerances import assert_same_but_for_batching
from tests.media import write_image, write_video
from tests.stages.encode.group_frames import frames_from
from tests.stages.encode.sharded_encoding import ShardedEncoding
from tests.stages.encode.workers import SAMPLING, Workers, clip_of, merged, noise, plan_all

NUM_ENCODERS = (1, 2, 3, 5, 8)


@pytest.mark.parametrize("num_encoders", NUM_ENCODERS)
def test_sharded_equals_unsharded(tiled_or_not: Family, num_encoders: int) -> None:
    family = tiled_or_not
    media = [Picture(noise(90, 150, 3, seed=1)), clip_of(family)]
    plans, groups = plan_all(family, media)
    workers = Workers(family, num_encoders)
    results = workers.encode(media, groups)
    assert [group for group, _ in results] == groups
    for item, plan, embeddings in zip(media, plans, merged(family.adapter, plans, results), strict=True):
        assert_same_but_for_batching(embeddings, family.encode(item, plan))
    assert workers.num_encoded == len(groups)
    assert sum(encoder.counts.num_groups > 0 for encoder in workers.encoders) >= min(num_encoders, 2)
    workers.check()


def test_groups_encoded_one_by_one_are_equal_bit_by_bit_however_they_are_sharded(family: Family) -> None:
    """With the same batches on every encoder nothing is left to differ."""
    media = [Picture(noise(90, 150, 3, seed=1)), clip_of(family)]
    plans, groups = plan_all(family, media)
    outcomes = [
        merged(family.adapter, plans, Workers(family, number, max_batch_patches=1).encode(media, groups))
        for number in NUM_ENCODERS
    ]
    for outcome in outcomes[1:]:
        for ours, theirs in zip(outcome, outcomes[0], strict=True):
            assert torch.equal(ours.rows, theirs.rows)
            assert all(map(torch.equal, ours.deepstack, theirs.deepstack))


@pytest.mark.parametrize("num_receivers", [1, 2, 3])
def test_distinct_images_give_distinct_embeddings_in_order(family: Family, num_receivers: int) -> None:
    """Every receiver gets every image, each its own: shards do not carry the last one, nor wait for ever."""
    media = [Picture(noise(60, 60, 3, seed=seed)) for seed in range(5)]
    plans, groups = plan_all(family, media, group_tokens=10_000)
    workers = Workers(family, 3)
    expected = [family.encode(item, plan) for item, plan in zip(media, plans, strict=True)]
    for number in range(num_receivers):
        receiver = workers.new_receiver(f"receiver {number}")
        results = workers.encode(media, groups, receiver, f"request {number}")
        for ours, theirs in zip(merged(family.adapter, plans, results), expected, strict=True):
            assert_same_but_for_batching(ours, theirs)
    sums = {round(float(each.rows.sum()), 3) for each in expected}
    assert len(sums) == len(media)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_any_order_of_arrival_is_taken_in_the_order_of_the_prompt(
    families: dict[str, Family], order: tuple[int, ...]
) -> None:
    family = families["internvl"]
    media = [Picture(noise(60, 60, 3, seed=seed)) for seed in range(3)]
    plans, groups = plan_all(family, media, group_tokens=10_000)
    workers = Workers(family, 3)
    receiver = workers.receiver
    receiver.open("r", [group.spec for group in groups])
    for grant, group, encoder in zip(receiver.grant(), groups, workers.encoders, strict=True):
        encoder.submit(workers.job(media, group, grant.ticket))
    taken: list[int] = []
    for arrived, number in enumerate(order):
        workers.encoders[number].step()
        receiver.poll()
        for index, embeddings, _ in receiver.take("r"):
            assert_same_but_for_batching(embeddings, family.encode(media[index], plans[index]))
            taken.append(index)
        assert taken == [index for index in range(3) if set(range(index + 1)) <= set(order[: arrived + 1])]
    assert taken == [0, 1, 2]


def test_results_stream_on_before_all_are_there(families: dict[str, Family]) -> None:
    family = families["qwen2_5_vl"]
    media = [clip_of(family)]
    _, groups = plan_all(family, media)
    workers = Workers(family, 2, max_batch_patches=1)
    stream = ShardedEncoding(workers.encoders, workers.receiver, max_run_patches=1).encode(
        "r", groups, lambda group: workers.frames(media, group)
    )
    next(stream)
    assert workers.num_encoded == 2 < len(groups)
    stream.close()


def test_a_second_question_decodes_and_encodes_nothing(family: Family) -> None:
    media = [Picture(noise(90, 150, 3)), clip_of(family)]
    _, groups = plan_all(family, media)
    workers = Workers(family, 2)
    first = workers.encode(media, groups)
    asked, encoded = len(workers.frames_asked), workers.num_encoded
    second = workers.encode(media, groups, request_id="second question")
    assert len(workers.frames_asked) == asked == len(groups)
    assert workers.num_encoded == encoded == len(groups)
    for (_, ours), (_, theirs) in zip(second, first, strict=True):
        assert torch.equal(ours.rows, theirs.rows)


def test_another_receiver_is_served_from_the_encoders_cache(families: dict[str, Family]) -> None:
    family = families["qwen3_vl"]
    media = [clip_of(family)]
    _, groups = plan_all(family, media)
    workers = Workers(family, 1)
    workers.encode(media, groups)
    workers.encode(media, groups, workers.new_receiver("p1"), "r2")
    assert workers.num_encoded == len(groups) == len(workers.frames_asked)


def test_an_overlapping_clip_reuses_the_common_groups(tiled_or_not: Family) -> None:
    """Frames at one a second: the clip [8 s, 24 s) after the clip [0 s, 16 s) of the same video."""
    family = tiled_or_not
    clip = clip_of(family, length=96)
    plan = family.plan(clip, SAMPLING)
    unit = plan.frames_per_unit

    def of(first: int, last: int) -> tuple[MediaPlan, list[MediaGroup]]:
        indices = tuple(range(first * 4, last * 4, 4))
        part = replace(
            plan,
            grid=plan.grid.cut((last - first) // unit),
            times_s=tuple((index + 0.5) / 4 for index in indices),
            frame_indices=indices,
            unit_span_s=float(unit),
        )
        return part, plan_groups([part], ["the video"], model="tiny", group_tokens=2 * plan.tokens_per_unit)

    workers = Workers(family, 2)
    _, early = of(0, 16)
    workers.encode([clip], early)
    late_plan, late = of(8, 24)
    results = workers.encode([clip], late, request_id="late")
    common = {group.spec.key for group in early} & {group.spec.key for group in late}
    assert len(common) == len(late) // 2
    assert workers.num_encoded == len(early) + len(late) - len(common)
    frames = clip.frames[list(late_plan.frame_indices)]
    whole = Embeddings(torch.cat([embeddings.rows for _, embeddings in results]))
    direct = _encoded(family, late_plan, frames)
    assert whole.rows.shape == direct.rows.shape
    assert_same_but_for_batching(whole, replace(direct, deepstack=()))


@torch.inference_mode()
def _encoded(family: Family, plan: MediaPlan, frames: Tensor) -> Embeddings:
    run = PatchRun(plan.kind, family.adapter.preprocess(frames, plan), plan.grid)
    return family.adapter.encode_batch(family.tower, [run])[0]


@pytest.mark.parametrize("change", ["content", "model", "size", "times", "tower share"])
def test_a_key_depends_on_whatever_the_embeddings_depend_on(families: dict[str, Family], change: str) -> None:
    family = families["qwen2_5_vl"]
    plan = family.plan(clip_of(family), SAMPLING)
    base = plan_groups([plan], ["a"], model="m", group_tokens=20)
    plans = {
        "size": replace(plan, size=(28, 28)),
        "times": replace(plan, times_s=tuple(time + 0.25 for time in plan.times_s)),
    }
    other = plan_groups(
        [plans.get(change, plan)],
        ["b" if change == "content" else "a"],
        model="n" if change == "model" else "m",
        group_tokens=20,
        tower_shares=[0.5 if change == "tower share" else None],
    )
    assert {group.spec.key for group in base}.isdisjoint(group.spec.key for group in other)


def test_groups_are_cut_on_the_lattice_of_the_source() -> None:
    plan = MediaPlan(
        "video", (1, 1), Grid(7, 1, 1), 1, 1, times_s=tuple(2.5 + t for t in range(7)), unit_span_s=1.0
    )
    assert cut(plan, 4) == [(0, 2), (2, 6), (6, 7)]
    assert cut(replace(plan, kind="image"), 4) == [(0, 4), (4, 7)]


def test_a_time_that_was_rounded_down_does_not_move_the_lattice() -> None:
    plan = MediaPlan(
        "video", (1, 1), Grid(5, 1, 1), 1, 1, times_s=tuple(3.9 + t for t in range(5)), unit_span_s=1.0
    )
    assert cut(plan, 4) == [(0, 4), (4, 5)]


def test_more_than_the_cache_holds_streams_through_it(families: dict[str, Family]) -> None:
    family = families["llava_onevision"]
    media = [clip_of(family)]
    plans, groups = plan_all(family, media)
    workers = Workers(family, 2, num_blocks=3)
    results = workers.encode(media, groups)
    assert workers.receiver.cache.counts.evictions > 0
    (whole,) = merged(family.adapter, plans, results)
    assert_same_but_for_batching(whole, family.encode(media[0], plans[0]))
    workers.check()


def test_a_group_that_can_never_fit_is_refused(families: dict[str, Family]) -> None:
    family = families["internvl"]
    media = [clip_of(family)]
    _, groups = plan_all(family, media, group_tokens=64)
    with pytest.raises(InfeasibleError, match="do not fit"):
        Workers(family, 1, num_blocks=1).encode(media, groups)


def test_frames_that_cannot_be_had_fail_the_request_and_leak_nothing(families: dict[str, Family]) -> None:
    family = families["internvl"]
    media = [clip_of(family)]
    _, groups = plan_all(family, media)
    workers = Workers(family, 2)

    def broken(group: MediaGroup) -> Tensor:
        if group.start == 3:
            raise ValueError("frame 3 is broken")
        return workers.frames(media, group)

    sharded = ShardedEncoding(workers.encoders, workers.receiver)
    with pytest.raises(EncodeError, match="frame 3 is broken"):
        list(sharded.encode("r", groups, broken))
    for _ in range(3):
        sharded.settle()
    workers.check()


def test_two_requests_in_turns_share_what_both_want(families: dict[str, Family]) -> None:
    family = families["internvl"]
    media = [clip_of(family)]
    _, groups = plan_all(family, media)
    workers = Workers(family, 2)
    sharded = ShardedEncoding(workers.encoders, workers.receiver, max_run_patches=16)
    streams = [sharded.encode(name, groups, lambda group: workers.frames(media, group)) for name in "ab"]
    pairs = list(zip(*streams, strict=True))
    assert len(pairs) == len(groups)
    assert all(torch.equal(ours.rows, theirs.rows) for (_, ours), (_, theirs) in pairs)
    assert workers.num_encoded == len(groups)


def test_batches_mix_requests_of_one_shape_within_the_patch_budget() -> None:
    layout, hub, family = EmbeddingLayout(2, torch.float32), InProcessHub(), FakeFamily()
    memory = [(EncoderCacheManager(20, 2), EncoderPool(20, 2, layout)) for _ in range(2)]
    encoder = FrameEncoder(family, nn.Identity(), max_patches=4)
    stage = EncodeStage(encoder, *memory[0], hub.connect("e", memory[0][1]))
    receiver = EmbeddingReceiver(*memory[1], hub.connect("p", memory[1][1]))
    shapes = {"a": (1, 2), "b": (2, 2), "c": (1, 2), "d": (1, 1)}  # of each request: side, units
    for value, (name, (_, units)) in enumerate(shapes.items()):
        receiver.open(name, [GroupSpec(fake_key(value, units), units, units)])
    for value, grant in enumerate(receiver.grant()):
        side, units = shapes[grant.request_id]
        frames = fake_frames(value, units, side)
        stage.submit(EncodeJob(grant.ticket, fake_plan(units, side), lambda frames=frames: frames))
    num_encoded = [sum(each.num_encoded for each in stage.step()) for _ in range(4)]
    assert num_encoded == [2, 1, 1, 0]  # a and c; b of another shape; d
    assert family.batch_sizes == [2, 1, 1]


def test_from_files_a_second_question_opens_no_file_again(
    families: dict[str, Family], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With real H.264 and a real image: what is counted are the decoder's calls."""
    family = families["qwen2_5_vl"]
    paths = [write_video(tmp_path / "video.mp4"), write_image(tmp_path / "image.png")]
    info = video.probe(paths[0])
    pixels = video.load_image(paths[1])
    plans = [
        family.adapter.plan_video(VideoFacts(info.num_frames, info.fps, info.height, info.width), SAMPLING),
        family.adapter.plan_image(pixels.shape[0], pixels.shape[1]),
    ]
    calls: list[str] = []
    for name in ("decode", "load_image"):
        monkeypatch.setattr(video, name, counted(name, getattr(video, name), calls))
    groups = plan_groups(plans, [content_hash(path) for path in paths], model="tiny", group_tokens=8)
    workers = Workers(family, 2)
    sharded = ShardedEncoding(workers.encoders, workers.receiver)
    frames_of = frames_from(family.adapter, paths)
    first = list(sharded.encode("first", groups, frames_of))
    assert calls.count("decode") == len(groups) - 1
    assert calls.count("load_image") == 1
    calls.clear()
    again = plan_groups(plans, [content_hash(path) for path in paths], model="tiny", group_tokens=8)
    second = list(sharded.encode("second", again, frames_of))
    assert calls == []
    assert workers.num_encoded == len(groups)
    assert all(
        torch.equal(ours.rows, theirs.rows) for (_, ours), (_, theirs) in zip(second, first, strict=True)
    )


def counted(name: str, function: Callable[..., object], calls: list[str]) -> Callable[..., object]:
    """The function, noting each call."""

    def call(*arguments: object, **options: object) -> object:
        calls.append(name)
        return function(*arguments, **options)

    return call
