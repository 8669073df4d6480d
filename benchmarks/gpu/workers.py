"""Encode, prefill and decode as three threads of one process on one device, each with its own stream.

ask ->  D reserves room | P opens the request, grants rooms for groups | E encodes them
        P takes embeddings, prefills, hands keys and values over       | D decodes to the end
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from epd.encode.sharding import GROUP_TOKENS
from epd.encoders.groups import MediaGroup, plan_groups, prompt_identity
from epd.encoders.plans import MediaPlan
from epd.sampling_params import SamplingParams
from epd.serve_app.worker.worker_settings import WorkerSettings
from epd.serve_app.worker.worker_stages import StageBuilder
from epd.stages.connectors.mailbox import InProcessHub
from epd.stages.encode.encoder import EncodeJob
from epd.stages.encode.encoder_pool import EmbeddingSplicer, EncoderPool, EncoderPoolShape
from epd.stages.engine.generation import GenerateRequest, StepResult
from epd.stages.engine.kv_pool import KVPools, KVPoolsShape
from epd.stages.placement import Placement
from epd.stages.ranks.group_pools import PoolSharing
from epd.transfer.connectors import EncoderConnector, KVConnector

_IDLE_S = 0.0002
_ANSWER_S = 120.0  # after which an answer that has not come is an error


class OneProcess:
    """The transport of workers that share a process."""

    def __init__(self) -> None:
        self._embeddings, self._kv = InProcessHub(), InProcessHub()

    def embeddings(
        self, name: str, shape: EncoderPoolShape, device: torch.device
    ) -> tuple[EncoderPool, EncoderConnector]:
        pool = shape.build(device=device)
        return pool, self._embeddings.connect(name, pool)

    def kv(
        self,
        name: str,
        shape: KVPoolsShape,
        device: torch.device,
        sharing: PoolSharing | None = None,  # noqa: ARG002 # workers here have one rank
    ) -> tuple[KVPools, KVConnector]:
        pools = shape.build(device=device)
        return pools, self._kv.connect(name, pools)

    def weights(self, path: Path, placement: Placement) -> Path | None:  # noqa: ARG002 # each loads its own
        return None

    def routes(self) -> dict[str, str]:
        return {}

    def close(self, name: str) -> None:
        self._embeddings.disconnect(name)
        self._kv.disconnect(name)


class StageThread(threading.Thread):
    """Calls `step` as long as it has something to do, and what others ask for in between."""

    def __init__(self, name: str, step: Callable[[], bool], device: torch.device) -> None:
        super().__init__(name=name, daemon=True)
        self._step, self._device = step, device
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._is_over = threading.Event()
        self.error: BaseException | None = None

    def call(self, work: Callable[[], Any]) -> Future[Any]:
        """Runs `work` in the thread, between two steps."""
        done: Future[Any] = Future()
        self._calls.put((work, done))
        return done

    def stop(self) -> None:
        self._is_over.set()
        self.join()

    def run(self) -> None:
        with ExitStack() as contexts:
            contexts.enter_context(torch.inference_mode())
            if self._device.type == "cuda":
                contexts.enter_context(torch.cuda.stream(torch.cuda.Stream(self._device)))
            try:
                while not self._is_over.is_set():
                    if not (self._answer_calls() or self._step()):
                        time.sleep(_IDLE_S)
            except BaseException as error:  # noqa: BLE001 # who waits for the thread raises it
                self.error = error

    def _answer_calls(self) -> bool:
        has_called = False
        while not self._calls.empty():
            work, done = self._calls.get()
            has_called = True
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001 # it belongs to the caller
                done.set_exception(error)
        return has_called


@dataclass(slots=True)
class Answer:
    """Tokens by place, and seconds from the request to the first of them."""

    tokens: dict[int, int] = field(default_factory=dict)
    start_s: float = 0.0
    first_s: float = 0.0

    def take(self, index: int, token_id: int) -> None:
        self.first_s = self.first_s or time.perf_counter() - self.start_s
        self.tokens[index] = token_id

    def in_order(self) -> list[int]:
        return [self.tokens[index] for index in sorted(self.tokens)]


@dataclass(slots=True)
class _Open:
    """A request whose media are on their way. frames: of each item, uint8 [N, h, w, 3]."""

    splicer: EmbeddingSplicer
    groups: Sequence[MediaGroup]
    frames: Sequence[Tensor]

    def frames_of(self, group: MediaGroup) -> Tensor:
        part = group_range(group)
        return self.frames[group.item][part.start : part.stop]


def group_range(group: MediaGroup) -> range:
    """The frames or tiles of its item that a group shows."""
    first = group.start * group.plan.frames_per_unit
    return range(first, first + len(group.plan.frame_range(0, group.plan.num_units)))


class SplitPipeline:
    """One checkpoint on three threads. Weights of the language model are shared by P and D."""

    def __init__(self, settings: WorkerSettings, group_tokens: int = GROUP_TOKENS) -> None:
        builder = StageBuilder(settings, OneProcess())
        self.adapter, self._group_tokens = builder.adapter, group_tokens
        self._encode = builder.encode("e0")
        self._receiver, self._prefill = builder.receiver("p0"), builder.prefill("p0")
        self._decode = builder.decode("d0")
        self._open: dict[str, _Open] = {}
        self._answers: dict[str, Answer] = {}
        device = builder.placement.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # weights were loaded in another stream
        steps = {"encode": self._step_encode, "prefill": self._step_prefill, "decode": self._step_decode}
        self._threads = {name: StageThread(name, step, device) for name, step in steps.items()}

    def __enter__(self) -> Self:
        for thread in self._threads.values():
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        for thread in self._threads.values():
            thread.stop()

    def ask(
        self,
        request_id: str,
        plans: Sequence[MediaPlan],
        frames: Sequence[Tensor],
        question: str,
        num_tokens: int,
        logit_bias: tuple[tuple[int, float], ...] = (),
    ) -> Answer:
        """Answers greedily with exactly `num_tokens` tokens. frames: of each item, uint8 [N, h, w, 3]."""
        hashes = [f"{request_id} {index}" for index in range(len(plans))]
        answer = self._answers[request_id] = Answer(start_s=time.perf_counter())
        groups = plan_groups(plans, hashes, model="random", group_tokens=self._group_tokens)
        prompt = self.adapter.plan_prompt(plans, question)
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, logit_bias=logit_bias)
        request = GenerateRequest(request_id, prompt, prompt_identity(prompt, hashes), sampling)
        reserve = partial(self._decode.reserve, request_id, "p0", request.identity, sampling)
        ticket = self._threads["decode"].call(reserve).result(_ANSWER_S)
        if ticket is None:
            raise RuntimeError(f"no room for the {len(prompt)} tokens of '{request_id}' in the KV pool")
        opened = _Open(EmbeddingSplicer(self.adapter, prompt), groups, frames)

        def begin() -> None:
            self._prefill.submit(request, ticket)
            if groups:
                self._receiver.open(request_id, [group.spec for group in groups])
                self._open[request_id] = opened

        self._threads["prefill"].call(begin).result(_ANSWER_S)
        self._wait(answer, num_tokens)
        return self._answers.pop(request_id)

    def _wait(self, answer: Answer, num_tokens: int) -> None:
        end_s = time.monotonic() + _ANSWER_S
        while len(answer.tokens) < num_tokens:
            for thread in self._threads.values():
                if thread.error is not None:
                    raise thread.error
            if time.monotonic() > end_s:
                raise TimeoutError(f"{len(answer.tokens)} of {num_tokens} tokens after {_ANSWER_S:.0f} s")
            time.sleep(_IDLE_S)

    def _step_encode(self) -> bool:
        return bool(self._encode.step())

    def _step_prefill(self) -> bool:
        grants = self._receiver.grant()
        for grant in grants:
            opened = self._open[grant.request_id]
            group = opened.groups[grant.group]
            job = EncodeJob(grant.ticket, group.plan, partial(opened.frames_of, group), grant.request_id)
            self._threads["encode"].call(partial(self._encode.submit, job))
        failed = self._receiver.poll()
        if failed:
            raise RuntimeError(f"a group could not be encoded: {next(iter(failed.values()))}")
        has_taken = [self._take_embeddings(request_id) for request_id in list(self._open)]
        return self._take_tokens(self._prefill.step()) or bool(grants) or any(has_taken)

    def _take_embeddings(self, request_id: str) -> bool:
        opened, taken = self._open[request_id], self._receiver.take(request_id)
        for index, embeddings, _ in taken:
            placed = opened.splicer.push(opened.groups[index], embeddings)
            if placed is not None:
                self._prefill.engine.add_embeddings(request_id, placed)
            self._receiver.release(request_id, index + 1)
            if index + 1 == len(opened.groups):
                self._receiver.close(request_id)
                del self._open[request_id]
        return bool(taken)

    def _step_decode(self) -> bool:
        return self._take_tokens(self._decode.step())

    def _take_tokens(self, result: StepResult) -> bool:
        for fault in result.faults:
            raise fault.cause
        for output in result.outputs:
            answer = self._answers.get(output.request_id)
            if answer is not None:
                answer.take(output.index, output.token.token_id)
        return result.num_tokens > 0
