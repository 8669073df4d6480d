"""Keys and values between real processes: pools that are files in memory, workers that are killed."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess

from epd.transfer.connectors import KVTicket, TransferOutcome
from tests.stages.connectors.shared_memory import MessageQueue, SharedMemoryConnector, SharedPoolFile
from tests.stages.handover_workers import DecodeWorker, PrefillWorker, pools_shape

# One process imports torch and what workers need, and each worker is a copy of it. Whoever sets the list last
# sets it for all tests of this process: it has the modules of both.
WORKERS: ForkServerContext = multiprocessing.get_context("forkserver")
WORKERS.set_forkserver_preload([__name__, "tests.serve_app.network.test_two_processes"])
Queues = dict[str, MessageQueue]
Files = dict[str, SharedPoolFile]
PROMPTS = {"a": list(range(1, 40)), "b": [5, 4, 3, 2, 1], "c": list(range(1, 30))}
NEVER_S = 3600.0  # a test that hangs is ended before


@contextmanager
def shared_workers() -> Iterator[tuple[Queues, Files]]:
    """Queues and pools of a prefill and a decode worker."""
    queues: Queues = {name: WORKERS.Queue() for name in ("p", "d")}
    with (
        SharedPoolFile.create(pools_shape(40, 4)) as theirs,
        SharedPoolFile.create(pools_shape(60, 2)) as ours,
    ):
        yield queues, {"p": theirs, "d": ours}
        assert theirs.path.exists()
    assert not theirs.path.exists()


def new_prefill(queues: Queues, files: Files) -> PrefillWorker:
    end = SharedMemoryConnector("p", queues, files)
    return PrefillWorker(end.pool, end)


def new_decode(queues: Queues, files: Files) -> DecodeWorker:
    end = SharedMemoryConnector("d", queues, files)
    return DecodeWorker(end.pool, end)


def reserve(decode: DecodeWorker, *request_ids: str) -> list[KVTicket]:
    tickets = [decode.reserve(request_id, "p", PROMPTS[request_id]) for request_id in request_ids]
    return [ticket for ticket in tickets if ticket is not None]


def prefill_elsewhere(queues: Queues, files: Files, tickets: list[KVTicket]) -> None:
    """What the other process does: all prompts, seven tokens at a time, until every receipt has come."""
    worker = new_prefill(queues, files)
    for ticket in tickets:
        assert worker.start(ticket.request_id, PROMPTS[ticket.request_id])
        worker.outbox.open(ticket)
    waiting = {ticket.request_id for ticket in tickets}
    while waiting:
        for request_id, (token_ids, _) in worker.prompts.items():
            if worker.cache.num_tokens(request_id) < len(token_ids):
                worker.compute(request_id, 7)
        for end in worker.outbox.poll():
            assert end.outcome is TransferOutcome.DELIVERED
            waiting.remove(end.request_id)
            assert worker.free_if_settled(end.request_id)
    worker.check()


def prefill_a_part(queues: Queues, files: Files, tickets: list[KVTicket]) -> None:
    """Sends one chunk of each and then nothing, as if it hung."""
    worker = new_prefill(queues, files)
    for ticket in tickets:
        assert worker.start(ticket.request_id, PROMPTS[ticket.request_id])
        worker.outbox.open(ticket)
        worker.compute(ticket.request_id, 3)
    time.sleep(NEVER_S)


def started(target: Callable[..., None], *args: object) -> BaseProcess:
    process = WORKERS.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def wait_until(is_done: Callable[[], bool], process: BaseProcess | None = None) -> None:
    """Returns when it is done, and fails when the process that should do it has failed."""
    while not is_done():
        assert process is None or process.exitcode in (None, 0), f"it ended with {process.exitcode}"
        time.sleep(0.005)


def test_prompts_come_from_another_process_through_shared_memory() -> None:
    with shared_workers() as (queues, files):
        decode = new_decode(queues, files)
        process = started(prefill_elsewhere, queues, files, reserve(decode, "a", "b", "c"))
        arrived: set[str] = set()

        def poll() -> bool:
            for end in decode.poll():
                assert end.outcome is TransferOutcome.DELIVERED
                assert end.state is not None
                assert end.state.prompt_token_ids.tolist() == PROMPTS[end.request_id]
                arrived.add(end.request_id)
            return len(arrived) == 3

        wait_until(poll, process)
        process.join()
        assert process.exitcode == 0
        assert all(decode.holds(request_id, PROMPTS[request_id]) for request_id in PROMPTS)
        decode.check()


def test_nothing_is_kept_of_a_process_that_was_killed_and_another_takes_over() -> None:
    with shared_workers() as (queues, files):
        decode = new_decode(queues, files)
        process = started(prefill_a_part, queues, files, reserve(decode, "a", "b"))

        def has_begun() -> bool:
            assert decode.poll() == []
            return decode.reception.num_missing("b") == len(PROMPTS["b"]) - 3

        wait_until(has_begun, process)
        process.kill()
        process.join()
        assert sorted(decode.reception.fail_sender("p")) == ["a", "b"]
        assert [decode.cache.num_free_blocks(group) for group in (0, 1)] == [60, 60]
        with SharedPoolFile.create(pools_shape(40, 4)) as successor:
            files["p"] = successor
            # Killed in the middle of a `put`, it has left the queue that it wrote to locked.
            queues |= {"p": WORKERS.Queue(), "d": WORKERS.Queue()}
            prefill = new_prefill(queues, files)
            (ticket,) = reserve(decode, "a")
            prefill.start("a", PROMPTS["a"])
            prefill.outbox.open(ticket)
            prefill.compute("a")
            ends: list[TransferOutcome] = []

            def is_there() -> bool:
                ends.extend(end.outcome for end in decode.poll())
                return bool(ends)

            wait_until(is_there)
            assert ends == [TransferOutcome.DELIVERED]
            assert decode.holds("a", PROMPTS["a"])
