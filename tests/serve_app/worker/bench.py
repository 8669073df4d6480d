"""Workers on one thread, driven message by message."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from epd.encoders.groups import MediaGroup
from epd.engine_config import EngineConfig
from epd.kv.pass_limits import PassLimits
from epd.sampling_params import SamplingParams
from epd.serve_app.local.fleet import LocalTransport
from epd.serve_app.media.frame_reader import FrameReader, FrameStream, stream_here
from epd.serve_app.media_messages import DecodeOrder, ReadFrames
from epd.serve_app.messages import EncodeGroup, Message, Prefill, Reserve, WorkerEvent, endpoint
from epd.serve_app.orchestration.live_answer import AnswerPlan
from epd.serve_app.orchestration.request_planner import RequestPlanner
from epd.serve_app.service import HeldItem
from epd.serve_app.worker.worker_core import WorkerCore
from epd.serve_app.worker.worker_settings import WorkerSettings
from epd.stages.engine.generation import TokenOutput
from epd.topology import Stage
from epd.transfer.connectors import KVTicket
from epd.transfer.transfers import Grant
from epd.types import UInt8Array
from epd.video import open_file
from tests.engine_options import parted
from tests.serve_app.deployments import Question, num_held, workers_of
from tests.serve_app.media_fleet import image_pixels, planned_here


def _opened(order: DecodeOrder) -> FrameStream:
    """Holds are named by the paths of their media."""
    return stream_here(open_file(Path(order.source.hold), "the video"), "the video", order)


@dataclass
class Bench:
    """Workers on one thread. Everything said to and by them goes through pickle, as between processes."""

    path: Path
    topology: str
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        base = WorkerSettings(
            self.path,
            EngineConfig(num_kv_tokens=4096),
            num_embeddings=2048,
            scheduler=PassLimits(max_chunk_tokens=32),
        )
        engine, others = parted(self.settings, base.engine)
        self.worker_settings = replace(base, engine=engine, **others)
        self.transport = LocalTransport()
        self.planner = RequestPlanner(self.path, "tiny", group_tokens=8)
        self.reader = FrameReader(_opened)
        roles = workers_of(self.topology)
        del roles["v0"]
        self.cores = {name: self.new(name, each) for name, each in roles.items()}
        self.events: list[tuple[str, WorkerEvent]] = []
        self.outputs: dict[str, dict[int, TokenOutput]] = {}

    def new(self, name: str, roles: frozenset[Stage]) -> WorkerCore:
        return WorkerCore(name, roles, self.worker_settings, self.transport)

    def lose(self, name: str) -> None:
        """The worker is gone; nobody is told yet."""
        del self.cores[name]
        for stage in ("encode", "prefill", "decode"):
            self.transport.close(f"{name}.{stage}")

    def plan(self, question: Question) -> AnswerPlan:
        return planned_here(self.planner, self.path, question.request(), question.media)

    def pixels(self, question: Question, group: MediaGroup) -> UInt8Array:
        """The units of an image's group."""
        return image_pixels(self.path, question.media[group.item])[1][group.start : group.stop]

    def tell(self, worker: str, message: Message[Any], frames: UInt8Array | None = None) -> Any:
        reply = self.cores[worker].handle(pickle.loads(pickle.dumps(message)), frames)
        return pickle.loads(pickle.dumps(reply))

    def reserve(
        self, request_id: str, plan: AnswerPlan, sender: str = "p0", worker: str = "d0", incarnation: int = 0
    ) -> KVTicket | None:
        """Reserves room. incarnation: of the sender."""
        message = Reserve(request_id, endpoint(sender, "prefill"), plan.identity, plan.sampling, incarnation)
        ticket: KVTicket | None = self.tell(worker, message)
        return ticket

    def submit(self, request_id: str, plan: AnswerPlan, worker: str = "p0") -> bool:
        is_merged = "decode" in self.cores[worker].roles
        return self.submit_with(
            request_id, plan, worker, None if is_merged else self.reserve(request_id, plan, worker)
        )

    def submit_with(self, request_id: str, plan: AnswerPlan, worker: str, ticket: KVTicket | None) -> bool:
        """ticket: for the room at the decode worker, which was reserved."""
        message = Prefill(plan.generate_request(request_id), plan.groups, ticket)
        taken: bool = self.tell(worker, message)
        return taken

    def encode(self, question: Question, plan: AnswerPlan, granted: Grant, worker: str) -> bool:
        """Hands a granted group to an encoder, with its frames."""
        group = plan.groups[granted.group]
        frames: UInt8Array | None
        if group.plan.kind == "image":
            frames = self.pixels(question, group)
        else:
            stream_id = f"{granted.request_id} {group.item}"
            whole = plan.media[group.item]
            sizes = tuple(each.num_frames for each in plan.groups if each.item == group.item)
            source = HeldItem(str(question.media[group.item]), 0)
            order = DecodeOrder(source, whole.times_s, sizes, whole.size)
            _, frames = self.reader.handle(ReadFrames(stream_id, group.index, order))
        message = EncodeGroup(granted.request_id, granted.ticket, group)
        taken: bool = self.tell(worker, message, frames)
        return taken

    def step(self, num_steps: int = 1) -> list[tuple[str, WorkerEvent]]:
        """All workers, so many times; returns the new events."""
        num_before = len(self.events)
        for _ in range(num_steps):
            for name, core in self.cores.items():
                core.step()
                core.check_integrity()
                report = core.take_report()
                if report is not None:
                    report = pickle.loads(pickle.dumps(report))
                    self.events += [(name, event) for event in report.events]
                    for output in report.outputs:
                        self.outputs.setdefault(output.request_id, {})[output.index] = output
        return self.events[num_before:]

    def granted(self, events: Iterable[tuple[str, WorkerEvent]]) -> list[Grant]:
        return [event for _, event in events if isinstance(event, Grant)]

    def finish(self, questions: dict[str, tuple[Question, AnswerPlan]], encoder: str = "e0") -> None:
        """Serves every grant until all answers have ended."""
        for _ in range(600):
            for granted in self.granted(self.step()):
                assert self.encode(*questions[granted.request_id], granted, encoder)
            if all(self.is_over(name) for name in questions):
                return
        raise AssertionError("the answers did not come to an end")

    def is_over(self, request_id: str) -> bool:
        outputs = self.outputs.get(request_id, {})
        return any(output.finish_reason for output in outputs.values())

    def tokens(self, request_id: str) -> list[int]:
        outputs = self.outputs[request_id]
        assert sorted(outputs) == list(range(len(outputs)))
        return [outputs[index].token.token_id for index in sorted(outputs)]

    def settle(self) -> None:
        self.step(4)
        for core in self.cores.values():
            assert not core.has_work()
            assert not core.load().kv_usage
            assert num_held(core) == 0


def answered(
    path: Path,
    topology: str,
    media: tuple[Path, ...],
    prepare: Callable[[Bench], None] = lambda _: None,
    **settings: Any,
) -> list[int]:
    """The tokens of one question about media in 1epd or 1e1p1d, in float32. settings: of workers.

    prepare: called with the workers before the question.

    Drawn, so that they depend on all of the logits: the likeliest one may be the same whatever is computed.
    """
    sampling = SamplingParams(max_tokens=8, ignore_eos=True, temperature=2.0, seed=5)
    question = Question(media, sampling=sampling)
    bench = Bench(path, topology, {"device": "cpu", "dtype": "float32", **settings})
    prepare(bench)
    plan = bench.plan(question)
    assert bench.submit("r", plan, "p0" if topology == "1e1p1d" else "epd0")
    bench.finish({"r": (question, plan)}, "e0" if topology == "1e1p1d" else "epd0")
    tokens = bench.tokens("r")
    bench.settle()
    for core in bench.cores.values():
        core.close()
    assert len(tokens) == 8
    return tokens
