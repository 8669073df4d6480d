"""Ranks as processes: they answer as one does, a lost one ends the worker, and nothing is left of them."""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import epd.stages.ranks.group
from epd.engine_config import EngineConfig
from epd.errors import InfeasibleError, RankLostError, RequestError, UnsupportedModelError
from epd.stages.placement import CPU_FLOAT32
from epd.stages.rank import Rank
from epd.stages.ranks.communicator import EXCHANGE_S, Communicator
from epd.stages.ranks.group import ProcessRanks, load_with_ranks
from tests.colocated import ColocatedPipeline
from tests.stages.ranks.thread_ranks import Meeting, ThreadCommunicator, recorded

LATE_S = 1.0
# Of the largest logit: sums are taken in another order.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def pipeline(checkpoints: dict[str, Path]) -> Iterator[ColocatedPipeline]:
    """Two ranks of the checkpoint with deepstack features."""
    with mock.patch.dict(os.environ, RAY_AUTH_TOKEN="secret"):
        made = ColocatedPipeline.load(
            checkpoints["qwen3_vl"], EngineConfig(tensor_parallel_size=2, num_kv_tokens=4096)
        )
    yield made
    ranks_of(made).close()


def ranks_of(pipeline: ColocatedPipeline) -> ProcessRanks:
    ranks = pipeline.engine._moves._ranks
    assert isinstance(ranks, ProcessRanks)
    return ranks


def is_running(process_id: int) -> bool:
    return Path(f"/proc/{process_id}").exists()


def test_the_other_process_has_no_token_of_ray(pipeline: ColocatedPipeline) -> None:
    (other,) = ranks_of(pipeline)._followers
    environment = Path(f"/proc/{other.process.pid}/environ").read_bytes()
    assert b"PATH=" in environment
    assert b"secret" not in environment


def test_two_processes_answer_as_one_does(
    pipeline: ColocatedPipeline, checkpoints: dict[str, Path], media: dict[str, Path]
) -> None:
    alone = ColocatedPipeline.load(checkpoints["qwen3_vl"], EngineConfig(num_kv_tokens=4096))
    ours, theirs = recorded(pipeline.engine), recorded(alone.engine)
    for names in ([], ["video", "image"]):
        question = ([media[name] for name in names], "What is shown?")
        answers = [each.ask(*question, max_tokens=12) for each in (pipeline, alone)]
        assert answers[0].token_ids == answers[1].token_ids
        assert answers[0].usage == answers[1].usage
    assert all(
        (mine - their).abs().max() <= 1e-5 * their.abs().max()
        for mine, their in zip(ours, theirs, strict=True)
        if len(their)
    )


def test_the_other_process_holds_half_of_the_language_model(
    pipeline: ColocatedPipeline, checkpoints: dict[str, Path]
) -> None:
    loaded, ranks = load_with_ranks(checkpoints["qwen3_vl"], "language", CPU_FLOAT32, 1)
    assert ranks is None
    whole = sum(each.nbytes for each in loaded.parameters())
    assert 0.49 < ranks_of(pipeline).weight_bytes[0] / whole < 0.51


def test_a_rank_that_hangs_ends_the_worker_in_time(pipeline: ColocatedPipeline) -> None:
    """The last test of this pair: the process is stopped, so that its connections stay open."""
    ranks = ranks_of(pipeline)
    (process_id,) = ranks.process_ids
    ranks._connected._group._set_default_timeout(timedelta(seconds=LATE_S))
    os.kill(process_id, signal.SIGSTOP)
    start_s = time.monotonic()
    with pytest.raises(RankLostError, match=r"one of 2 processes .* is lost .*; start it again"):
        pipeline.ask([], "What is shown?", max_tokens=4)
    assert LATE_S <= time.monotonic() - start_s < EXCHANGE_S, "it waited as long as ever"
    assert not is_running(process_id)
    with pytest.raises(RankLostError, match="one of 2 processes"):
        pipeline.ask([], "again?", max_tokens=4)


def test_a_rank_that_ends_while_it_loads_is_lost_at_once(checkpoints: dict[str, Path]) -> None:
    ranks = ProcessRanks(checkpoints["qwen3_vl"], CPU_FLOAT32, 2)
    folder, (process_id,) = ranks._folder, ranks.process_ids
    assert folder.exists()
    os.kill(process_id, signal.SIGKILL)
    with pytest.raises(RankLostError, match="one of 2 processes"):
        ranks.connect()
    assert not folder.exists()
    assert not is_running(process_id)


def test_a_rank_ends_with_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is all that tells it of the end of rank 0, which may have been killed; it may be in an exchange."""
    statuses: list[int] = []

    def end(status: int) -> None:
        statuses.append(status)
        raise SystemExit

    monkeypatch.setattr(os, "_exit", end)
    ours, theirs = Pipe()
    steps: queue.SimpleQueue[object] = queue.SimpleQueue()
    ours.send("a step")
    ours.close()
    with pytest.raises(SystemExit):
        epd.stages.ranks.group._read(theirs, steps)
    assert steps.get_nowait() == "a step"
    assert statuses == [0]


def test_what_another_rank_refuses_is_raised_here(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    boot = (
        "import sys; sys.path[:] = {path!r}; from multiprocessing.connection import Connection; "
        "from epd.errors import InfeasibleError; told = Connection({descriptor}); told.recv_bytes(); "
        "told.send(InfeasibleError('no room'))"
    )
    monkeypatch.setattr(epd.stages.ranks.group, "_BOOT", boot)
    ranks = ProcessRanks(checkpoints["qwen3_vl"], CPU_FLOAT32, 2)
    (process_id,) = ranks.process_ids
    with pytest.raises(InfeasibleError, match="no room"):
        ranks.connect()
    assert not is_running(process_id)


def test_what_cannot_be_shared_is_refused_before_a_process_starts(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        epd.stages.ranks.group, "ProcessRanks", lambda *_, **__: pytest.fail("one was started")
    )
    with pytest.raises(UnsupportedModelError, match="allowed: 1, 2;"):
        load_with_ranks(checkpoints["qwen3_vl"], "language", CPU_FLOAT32, 4)


def test_more_ranks_than_gpus_are_refused(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    placement = replace(CPU_FLOAT32, device=torch.device("cuda", 1))
    with pytest.raises(RequestError, match=r"size of 4 on 'cuda:1'; allowed: up to 2, the GPUs"):
        ProcessRanks(checkpoints["qwen3_vl"], placement, 4)


def test_a_sum_has_the_same_bits_at_all_ranks(tmp_path: Path) -> None:
    """Else ranks would choose different tokens to drop, or experts, and nothing would tell."""
    size = 3

    def sums(index: int) -> list[torch.Tensor]:
        ranks = Communicator(Rank(index, size), tmp_path / "meeting", torch.device("cpu"))
        draw = torch.Generator().manual_seed(index)
        tensors = [torch.randn(count, generator=draw) for count in (1, 7, 1000, 100_003)]
        for tensor in tensors:
            ranks.add_up(tensor)
        return tensors

    with ThreadPoolExecutor(size) as threads:
        first, *others = threads.map(sums, range(size))
    for other in others:
        assert all(torch.equal(one, another) for one, another in zip(first, other, strict=True))


def test_threads_exchange_what_gloo_does(tmp_path: Path) -> None:
    """Most tests of ranks are of threads without gloo. Whole numbers have one sum, whatever their order."""
    size, meeting = 3, Meeting(3)

    def exchanged(index: int, ranks: Communicator) -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(index)
        summed, shared, mine = torch.randint(1000, (3, 5, 7), generator=draw).float().unbind()
        ranks.add_up(summed)
        ranks.share(shared)
        return [summed, shared, *ranks.gather(mine)]

    def both(index: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        rank = Rank(index, size)
        over_gloo = Communicator(rank, tmp_path / "meeting", torch.device("cpu"))
        return exchanged(index, over_gloo), exchanged(index, ThreadCommunicator(rank, meeting))

    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(both, range(size)))
    assert [len(over_gloo) for over_gloo, _ in found] == [2 + size, 2, 2]
    for over_gloo, by_threads in found:
        assert [each.tolist() for each in by_threads] == [each.tolist() for each in over_gloo]


def test_gpus_follow_each_other_and_meet_over_nccl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As far as that can be seen without one: the group is asked for, and never made."""
    chosen: list[object] = []

    class Nccl:
        Options = torch.distributed.ProcessGroupNCCL.Options

        def __init__(self, _store: object, rank: int, size: int, options: Any) -> None:
            chosen.append((rank, size, options._timeout.total_seconds()))

        def allreduce(self, tensors: list[torch.Tensor]) -> Any:
            chosen.append(tensors[0].device)
            return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Nccl)
    first = replace(CPU_FLOAT32, device=torch.device("cuda"))
    second = epd.stages.ranks.group._placement(first, 1, 2)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for index, placement in enumerate((first, second)):
            Communicator(Rank(index, 2), tmp_path / "meeting", placement.device, 7.0)
    assert chosen == [0, (0, 2, 7.0), torch.device("cuda", 0), 1, (1, 2, 7.0), torch.device("cuda", 1)]
