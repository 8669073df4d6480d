"""Prefill and decode workers of one model in one process, and a router of their requests."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Protocol

from epd.kv.pass_limits import SchedulerConfig
from epd.sampling_params import SamplingParams
from epd.stages.connectors.mailbox import InProcessHub
from epd.stages.decode import DecodeStage
from epd.stages.engine.engine import LanguageEngine
from epd.stages.engine.generation import StepResult, TokenOutput
from epd.stages.prefill import PrefillStage
from epd.stages.visual_inputs import PlacedEmbeddings
from tests.stages.prompts import MAX_TOKENS, Prompt

GREEDY = SamplingParams(max_tokens=MAX_TOKENS)


class Engines(Protocol):
    """Builds the engine of each worker, of prefill first."""

    def engine(self, **options: Any) -> LanguageEngine: ...


@dataclass
class Deployment:
    """Workers of one model, and a router that does what a real one would: reserve, forward, redirect."""

    subject: Engines
    num_decode: int
    rng: random.Random
    decode_kv_tokens: int = 4096
    chunk: int = 24
    block_size: int = 16
    outputs: dict[tuple[str, int], list[TokenOutput]] = field(default_factory=dict)
    placed: dict[str, str] = field(default_factory=dict)
    num_dropped: dict[str, int] = field(default_factory=dict)
    num_refused: int = 0

    def __post_init__(self) -> None:
        self.hub = InProcessHub()
        config = SchedulerConfig(max_chunk_tokens=self.chunk)
        engine = self.subject.engine(config=config, enable_prefix_caching=True)
        self.prefill = PrefillStage(engine, self.hub.connect("p0", engine.pools))
        self.decode = {f"d{i}": self.new_decode(f"d{i}") for i in range(self.num_decode)}

    def new_decode(self, name: str) -> DecodeStage:
        engine = self.subject.engine(num_kv_tokens=self.decode_kv_tokens, enable_prefix_caching=True)
        return DecodeStage(engine, self.hub.connect(name, engine.pools))

    def submit(self, name: str, prompt: Prompt, sampling: SamplingParams) -> bool:
        """False when every decode worker has refused."""
        request = prompt.request(name, sampling=sampling, seed=3)
        for worker in self.rng.sample(sorted(self.decode), len(self.decode)):
            self.num_dropped[name] = dropped = prompt.plan.num_dropped
            ticket = self.decode[worker].reserve(name, "p0", request.identity, sampling, dropped)
            if ticket is not None:
                self.placed[name] = worker
                self.prefill.submit(request, ticket)
                return True
        self.num_refused += 1
        return False

    def take(self, result: StepResult) -> None:
        """Passes on what has not been passed on before."""
        for output in result.outputs:
            known = self.outputs.setdefault((output.request_id, output.choice), [])
            if output.index == len(known):
                known.append(output)
            else:
                assert (output.token, output.text) == (known[output.index].token, known[output.index].text)

    def step(self) -> None:
        self.take(self.prefill.step())
        self.prefill.check_integrity()
        for stage in self.decode.values():
            self.take(stage.step())
            stage.check_integrity()

    def tokens(self, name: str) -> tuple[int, ...]:
        choices = sorted(key for key in self.outputs if key[0] == name)
        return tuple(out.token.token_id for key in choices for out in self.outputs[key])

    def is_over(self, name: str, n: int = 1) -> bool:
        ends = [outs for (request_id, _), outs in self.outputs.items() if request_id == name]
        return len(ends) == n and all(outs[-1].finish_reason for outs in ends)

    def run(self, prompts: dict[str, Prompt], sampling: SamplingParams) -> dict[str, tuple[int, ...]]:
        waiting, feeding = list(prompts), dict[str, list[PlacedEmbeddings]]()
        for _ in range(5000):
            if waiting and self.rng.random() < 0.6 and self.submit(waiting[0], prompts[waiting[0]], sampling):
                name = waiting.pop(0)
                feeding[name] = list(prompts[name].groups)
            for name, groups in feeding.items():
                if groups and self.rng.random() < 0.7:
                    self.prefill.engine.add_embeddings(name, groups.pop(0))
            self.step()
            if not waiting and all(self.is_over(name, sampling.n) for name in prompts):
                return {name: self.tokens(name) for name in prompts}
        raise AssertionError("the deployment did not come to an end")

    def settle(self) -> None:
        for _ in range(3):
            self.step()
        assert not self.prefill.has_work()
        assert self.prefill.engine.kv.usage == 0
        for stage in self.decode.values():
            assert not stage.has_work()
            assert stage.engine.kv.usage == 0


def feed(deployment: Deployment, prompts: dict[str, Prompt]) -> None:
    for name, prompt in prompts.items():
        assert deployment.submit(name, prompt, GREEDY)
        for group in prompt.groups:
            deployment.prefill.engine.add_embeddings(name, group)
