"""An encoder that reads an item sends what prefill would have kept of it, in any order of the groups."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from epd.encode.encoder_cache import CachedGroup
from epd.encoders.groups import FrameEncoder, MediaGroup, plan_groups
from epd.encoders.plans import PromptPlan
from epd.encoders.reduction import ItemReduction, begins_reading, is_cut_at_encoder, kept_spec, reduce_prompt
from epd.reduction import ReductionPolicy
from epd.stages.encode.encoder_pool import EmbeddingSplicer
from epd.stages.visual_inputs import PlacedEmbeddings
from epd.transfer.connectors import Ticket
from tests.encoders.families import Clip, Family
from tests.encoders.tolerances import assert_same_but_for_batching
from tests.stages.encode.workers import SAMPLING, Workers, clip_of, plan_all


@pytest.fixture
def clip(family: Family) -> Clip:
    return clip_of(family)


def reduced(
    family: Family, clip: Clip, method: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[PromptPlan, list[MediaGroup]]:
    """A prompt of one clip, and its groups of two units, each of which is a window or two."""
    num_tokens = 2 * family.plan(clip, SAMPLING).tokens_per_unit
    monkeypatch.setattr("epd.encoders.reduction.reading.WINDOW_TOKENS", num_tokens)
    plans, groups = plan_all(family, [clip], num_tokens)
    return reduce_prompt(family.adapter.plan_prompt(plans, "What?"), ReductionPolicy(method, 0.3)), groups


def read(
    workers: Workers, clip: Clip, prompt: PromptPlan, groups: list[MediaGroup], order: list[int]
) -> list[PlacedEmbeddings]:
    """What is placed of the groups, submitted in that order, one a step; each reading to another encoder."""
    assert is_cut_at_encoder(prompt, groups)
    receiver = workers.receiver
    # One encoder has them all from before; of several each encodes and keeps those that it has not.
    all_workers = (receiver, *workers.encoders) if len(workers.encoders) == 1 else (receiver,)
    num_free = [each.cache.num_free_blocks for each in all_workers]
    item = prompt.media[0]
    numbers = list(accumulate(int(begins_reading(item, group)) for group in groups))
    specs = [kept_spec(item, *each) for each in zip(groups, map("n{}".format, numbers), strict=True)]
    receiver.open("r", specs)
    tickets = {grant.group: grant.ticket for grant in receiver.grant()}
    splicer, placed = EmbeddingSplicer(workers.family.adapter, prompt), []
    for index in order:
        encoder = workers.encoders[numbers[index] % len(workers.encoders)]
        reading = ItemReduction.of(prompt, groups[index:])
        job = workers.job([clip], groups[index], tickets[index])
        encoder.submit(replace(job, request_id="r", group=groups[index], reading=reading))
        while encoder.step():
            encoder.check_integrity()
        receiver.poll()
        for number, embeddings, places in receiver.take("r"):
            placed.append(splicer.place(groups[number], embeddings, places))
            receiver.release("r", number + 1)
    receiver.close("r")
    for encoder in workers.encoders:
        encoder.step()
        assert encoder.num_readings == 0
    workers.check()
    assert [each.cache.num_free_blocks for each in all_workers] == num_free
    return placed


def spliced(
    workers: Workers, clip: Clip, prompt: PromptPlan, groups: list[MediaGroup]
) -> list[PlacedEmbeddings]:
    """The same from whole groups."""
    splicer = EmbeddingSplicer(workers.family.adapter, prompt)
    placed = [splicer.push(group, rows) for group, rows in workers.encode([clip], groups, request_id="w")]
    return [each for each in placed if each is not None]


@pytest.mark.parametrize(
    ("method", "num_encoders"),
    [("balanced", 1), ("uniform", 1), ("mustdrop", 1), ("uniform", 2), ("mustdrop", 4), ("balanced", 2)],
)
def test_what_is_sent_is_what_would_have_been_kept(
    family: Family, clip: Clip, method: str, num_encoders: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several encoders may choose, each from readings of its own."""
    prompt, groups = reduced(family, clip, method, monkeypatch)
    workers = Workers(family, num_encoders)
    expected = spliced(workers, clip, prompt, groups)
    assert len(groups) > 2
    num_encoded = workers.num_encoded
    first, *others = range(len(groups))
    for order in ([first, *others], [first, *reversed(others)], [*reversed(others), first]):
        placed = read(workers, clip, prompt, groups, order)
        assert len(placed) == len(expected)
        for ours, theirs in zip(placed, expected, strict=True):
            assert_same_but_for_batching(ours.embeddings, theirs.embeddings)
            assert (ours.positions == theirs.positions).all()
            assert (ours.indices == theirs.indices).all()
            if method == "mustdrop":
                assert ours.is_key is not None
                assert ours.is_key.any(), "of every window some must survive"
                assert (ours.is_key == theirs.is_key).all()
            else:
                assert ours.is_key is theirs.is_key is None
    assert num_encoders > 1 or workers.num_encoded == num_encoded


@torch.inference_mode()
def test_groups_are_merged_in_the_tower_as_their_keys_say(family: Family, clip: Clip) -> None:
    """Not in one call of the tower with those that are not."""
    plan = family.plan(clip, SAMPLING)
    whole, half = (
        plan_groups([plan], ["clip"], model="tiny", group_tokens=10**6, tower_shares=[share])[0]
        for share in (None, 0.5)
    )
    workers, encoder = Workers(family, 1), FrameEncoder(family.adapter, family.tower)
    run = encoder.patches(family.frames(clip, whole.plan), whole.plan)
    for group, share in ((whole, None), (half, 0.5)):
        ((_, found),) = workers.encode([clip], [group], request_id=f"{share}")
        assert_same_but_for_batching(found, encoder.encode([run], share)[0])
    ticket = Ticket("t", whole.spec.key, "p0", CachedGroup(1, (0,)))
    jobs = [workers.job([clip], each, replace(ticket, key=each.spec.key)) for each in (whole, half)]
    assert jobs[0].shape != jobs[1].shape


@pytest.mark.parametrize("a_method", ["balanced", "fastkv"])
def test_a_window_that_needs_a_later_group_is_not_cut(
    a_method: str, family: Family, clip: Clip, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is one of which the language model chooses."""
    prompt, groups = reduced(family, clip, a_method, monkeypatch)
    assert is_cut_at_encoder(prompt, groups) is (a_method == "balanced")
    _, units = plan_all(family, [clip])
    assert len(units) > len(groups)
    assert is_cut_at_encoder(prompt, units) is (
        a_method == "balanced" and len(prompt.media[0].windows) == len(units)
    )
