"""Prefill and decode workers of one to four ranks: the tokens of one process, nothing read too late."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from epd.sampling_params import SamplingParams
from epd.stages.connectors.mailbox import SourceLostError
from epd.stages.decoder import decoder
from epd.stages.decoder.rank_cut import cut_model
from epd.stages.engine.engine import LanguageEngine
from epd.stages.engine.setup import build_engine, kv_shape
from epd.stages.loading.weights import load_role
from epd.stages.placement import CPU_FLOAT32
from epd.stages.rank import Rank
from epd.stages.ranks.group_pools import GroupPools, PoolSharing
from epd.stages.ranks.shared_pools import SharedPools, SharePools
from epd.transfer.connectors import TransferOutcome
from tests.engine_options import parted
from tests.stages.conftest import Subject, make
from tests.stages.prompts import MAX_TOKENS
from tests.stages.ranks.thread_ranks import ThreadRanks
from tests.stages.split_deployment import GREEDY, Deployment, feed
from tests.stages.test_moving import run_moving
from tests.tiny_models import build_qwen2_5_vl

SAMPLED = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, n=2)
LATE_S = 0.05


@dataclass(slots=True)
class Group:
    """The ranks of a checkpoint. part: rank 0's."""

    part: Any
    ranks: ThreadRanks

    @property
    def pools(self) -> SharedPools:
        """Rank 1's, once it has done all that it was told."""
        self.ranks.ask(SharePools(0))
        engine = self.ranks.follower._engines[""]
        return engine.pools


def group_of(path: Path, size: int = 2) -> Group:
    part = load_role(path, "language", CPU_FLOAT32, cut=partial(cut_model, rank=Rank(0, size))).model
    return Group(part, ThreadRanks(path, size))


@dataclass
class Ranked:
    """A checkpoint in one process, and in groups. workers: of the engines to come, the last one first."""

    subject: Subject
    groups: tuple[Group, Group]
    workers: list[Group | None] = field(default_factory=list)

    def deployment(self, prefill: int, decode: int, **options: Any) -> Deployment:
        """prefill, decode: ranks, which are one or those of the first and of the second group.

        options: of Deployment.
        """
        sizes = zip(self.groups, (prefill, decode), strict=True)
        return self.deployed([group if size > 1 else None for group, size in sizes], **options)

    def deployed(self, workers: Sequence[Group | None], **options: Any) -> Deployment:
        """workers: of prefill, then those of decode; None for one process."""
        self.workers = list(reversed(workers))
        for group in self.groups:
            group.ranks.steps.clear()
        seed = sum(1 if group is None else group.ranks.rank.size for group in workers)
        return Deployment(self, len(workers) - 1, random.Random(seed), **options)

    def engine(self, *, num_kv_tokens: int = 4096, block_size: int = 8, **options: Any) -> LanguageEngine:
        """The engine of the next worker."""
        group = self.workers.pop()
        model, ranks = (self.subject.model, None) if group is None else (group.part, group.ranks)
        pools = GroupPools(kv_shape(model, num_kv_tokens, block_size), PoolSharing(ranks, 4))
        config, others = parted(options)
        adapter, settings = self.subject.adapter, self.subject.settings
        return build_engine(model, adapter, settings, pools, options=config, ranks=ranks, **others)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def ranked(
    request: pytest.FixtureRequest, checkpoints: dict[str, Path], subjects: Callable[[str], Subject]
) -> Iterator[Ranked]:
    """Two are enough, with and without deepstack features."""
    path = checkpoints[request.param]
    groups = [group_of(path) for _ in range(2)]
    yield Ranked(subjects(request.param), (groups[0], groups[1]))
    for group in groups:
        group.ranks.close()


@pytest.mark.parametrize("sizes", [(2, 2), (1, 2), (2, 1)])
def test_tokens_equal_generate_whatever_the_sizes(ranked: Ranked, sizes: tuple[int, int]) -> None:
    prompts = ranked.subject.mix(6)
    deployment = ranked.deployment(*sizes)
    assert deployment.run(prompts, GREEDY) == {name: prompt.expected for name, prompt in prompts.items()}
    deployment.settle()


@pytest.fixture(scope="module")
def uneven(media: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranked]:
    """Groups of two and of four ranks, which have a head each."""
    path = build_qwen2_5_vl(tmp_path_factory.mktemp("uneven") / "model", num_key_value_heads=4)
    two, four = (group_of(path, size) for size in (2, 4))
    yield Ranked(make("uneven", path, media), (two, four))
    for group in (two, four):
        group.ranks.close()


@pytest.mark.parametrize("to_more", [True, False])
def test_groups_of_two_and_four_hand_over_to_each_other(uneven: Ranked, to_more: bool) -> None:
    prompts = uneven.subject.mix(4)
    groups = uneven.groups if to_more else tuple(reversed(uneven.groups))
    deployment = uneven.deployed(groups)
    assert deployment.run(prompts, GREEDY) == {name: prompt.expected for name, prompt in prompts.items()}
    deployment.settle()
    assert "ReceiveTokens" in groups[1].ranks.steps


def test_answers_move_between_groups_of_two_and_four(uneven: Ranked) -> None:
    """Two of each prompt, to and fro."""
    prompts = uneven.subject.mix(4)
    expected = uneven.deployed([None, None]).run(prompts, SAMPLED)
    deployment = uneven.deployed([None, *uneven.groups])
    assert run_moving(deployment, prompts, SAMPLED) > 5
    assert {name: deployment.tokens(name) for name in prompts} == expected


def test_drawn_tokens_are_those_of_one_process(ranked: Ranked) -> None:
    prompts = ranked.subject.mix(4)
    alone = ranked.deployment(1, 1).run(prompts, SAMPLED)
    for sizes in ((2, 2), (2, 1)):
        deployment = ranked.deployment(*sizes)
        assert deployment.run(prompts, SAMPLED) == alone
        deployment.settle()


def test_preempted_answers_keep_their_tokens(ranked: Ranked) -> None:
    prompts = ranked.subject.mix(6)
    longest = max(len(prompt.plan) for prompt in prompts.values())
    deployment = ranked.deployment(2, 2, decode_kv_tokens=2 * (longest + 8))
    assert deployment.run(prompts, GREEDY) == {name: prompt.expected for name, prompt in prompts.items()}
    deployment.settle()
    assert "OffloadTokens" in ranked.groups[1].ranks.steps


@pytest.mark.parametrize("steps", range(0, 9, 4))
def test_an_abort_at_any_point_frees_both_workers(ranked: Ranked, steps: int) -> None:
    deployment = ranked.deployment(2, 2, chunk=16)
    prompts = ranked.subject.mix(5)
    feed(deployment, prompts)
    for _ in range(steps):
        deployment.step()
    for name in prompts:
        deployment.prefill.abort(name)
        deployment.decode["d0"].abort(name)
    deployment.settle()
    again = ranked.subject.mix(1)
    deployment.outputs.clear()
    assert deployment.run(again, GREEDY) == {name: prompt.expected for name, prompt in again.items()}


def test_blocks_are_kept_until_the_other_rank_has_copied(
    ranked: Ranked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank is late, so that rank 0 would have answered long before."""
    deployment = ranked.deployment(2, 2, chunk=64)
    copy, copied, has_copied = SharedPools.copy_from, list[int](), threading.Event()

    def copy_late(pools: SharedPools, *args: Any) -> None:
        rank = pools.shape.rank.index
        if rank:
            has_copied.wait()
            time.sleep(LATE_S)
        copy(pools, *args)
        copied.append(rank)
        has_copied.set()

    monkeypatch.setattr(SharedPools, "copy_from", copy_late)
    prompts = ranked.subject.mix(1)
    feed(deployment, prompts)
    prefill, decode = deployment.prefill, deployment.decode["d0"]
    deployment.take(prefill.step())
    outbox = prefill.outbox
    assert outbox is not None
    assert not outbox.is_settled("r0")
    decode.reception.poll()
    outbox.poll()
    assert outbox.is_settled("r0")
    assert copied == [0, 1]


def test_nothing_is_offered_before_the_other_rank_has_written(
    ranked: Ranked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank is late with the last layer of passes of which rank 0 needs no logits."""
    write = decoder.norm_rotate_write

    def write_late(*args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(LATE_S)
        return write(*args)

    monkeypatch.setattr(decoder, "norm_rotate_write", write_late)
    prompts = {"r": ranked.subject.mix(3)["r2"]}
    assert ranked.deployment(2, 1).run(prompts, GREEDY) == {"r": prompts["r"].expected}


@pytest.mark.parametrize(
    ("error", "is_lost", "reason"),
    [(SourceLostError(), True, "'p0' is gone"), (OSError("denied"), False, "1 of the processes of 'd0'")],
)
def test_a_rank_that_cannot_read_fails_the_hand_over_alone(
    ranked: Ranked, error: Exception, is_lost: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = ranked.deployment(2, 2)
    prompts = ranked.subject.mix(1)
    feed(deployment, prompts)
    with monkeypatch.context() as patched:

        def fail(*_: Any) -> None:
            raise error

        patched.setattr(ranked.groups[1].pools, "copy_from", fail)
        deployment.prefill.step()
        (end,) = deployment.decode["d0"].step().handovers
        assert (end.outcome, end.is_lost) == (TransferOutcome.FAILED, is_lost)
        assert reason in end.error
        assert deployment.decode["d0"].fail_sender("p0") == (["r0"] if is_lost else [])
    deployment.prefill.abort("r0")
    deployment.settle()
    assert deployment.run(prompts, GREEDY) == {"r0": prompts["r0"].expected}
