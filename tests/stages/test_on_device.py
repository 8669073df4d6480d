"""Every stage on a device that computes nothing: no tensor of another device, no wait that is not listed.

A change of roles: `tests/serve_app/worker/test_roles_on_device.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
import torch

from epd.encode.encoder_cache import EncoderCacheManager
from epd.encoders import FrameSampling
from epd.encoders.adapter import Embeddings
from epd.encoders.groups import FrameEncoder, plan_groups, prompt_identity
from epd.encoders.reduction import reduce_prompt
from epd.engine_config import RECURRENT_FAMILIES, EngineConfig
from epd.kv.pass_limits import SchedulerConfig
from epd.reduction import KEEP_ALL, PREFILL_METHODS, QUESTION_METHODS, SELECTION_METHODS, ReductionPolicy
from epd.sampling_params import SamplingParams
from epd.stages.attention import device as attention_device
from epd.stages.connectors.mailbox import InProcessHub
from epd.stages.decode import DecodeStage
from epd.stages.encode.encoder import EncodeJob, EncodeStage
from epd.stages.encode.encoder_pool import EmbeddingLayout, EmbeddingReceiver, EmbeddingSplicer, EncoderPool
from epd.stages.engine.engine import LanguageEngine
from epd.stages.engine.generation import GenerateRequest, GenerationSettings, StepResult
from epd.stages.engine.graphs import GraphMaker
from epd.stages.engine.setup import build_engine, kv_shape
from epd.stages.loading.quantized_linear import products_text
from epd.stages.prefill import PrefillStage
from tests.encoders.families import QUESTION, Family
from tests.fake_cuda import CUDA, FakeCuda, draw_exactly, fake_cuda, model_like
from tests.stages.decoder.quantized_matrices import to_fp8
from tests.stages.encode.workers import clip_of

MAX_TOKENS = 4
SAMPLING = FrameSampling(num_frames=6)
# By family: what has no values can be used again.
_MODELS: dict[str, Any] = {}
_ENCODED: dict[str, list[tuple[int, Embeddings]]] = {}


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with fake_cuda() as mode:
        yield mode


@dataclass
class OnDevice:
    """One family's model on the device, and the workers made of it."""

    family: Family
    mode: FakeCuda

    def __post_init__(self) -> None:
        if self.family.name not in _MODELS:
            with self.mode.unchecked():
                _MODELS[self.family.name] = model_like(self.family.model.config)
        self.model: Any = _MODELS[self.family.name]
        self.hub, self.kv_hub = InProcessHub(), InProcessHub()
        deepstack = 2 if self.family.name == "qwen3_vl" else 0
        self.layout = EmbeddingLayout(64, torch.float32, deepstack)
        self._ids = count()

    def engine(
        self,
        num_tokens: int = 4096,
        graphs: GraphMaker | None = None,
        *,
        shares_prefixes: bool = False,
        runs_ahead: bool | None = None,
        **options: Any,
    ) -> LanguageEngine:
        config = SchedulerConfig(**({"max_chunk_tokens": 64} | options))
        pools = kv_shape(self.model, num_tokens, 4).build(device="cuda")
        settings = GenerationSettings(eos_ids=frozenset())
        return build_engine(
            self.model,
            self.family.adapter,
            settings,
            pools,
            options=EngineConfig(async_scheduling=runs_ahead),
            config=config,
            graphs=graphs,
            enable_prefix_caching=shares_prefixes,
        )

    def prefill(self, **options: Any) -> PrefillStage:
        engine = self.engine(**options)
        return PrefillStage(engine, self.kv_hub.connect("p0", engine.pools))

    def decode(self, **options: Any) -> DecodeStage:
        engine = self.engine(**options)
        return DecodeStage(engine, self.kv_hub.connect("d0", engine.pools))

    def pool(self) -> EncoderPool:
        return EncoderPool(400, 8, self.layout, device="cuda")

    def encoder(self) -> EncodeStage:
        pool = self.pool()
        tower = self.family.adapter.vision_tower(self.model)
        cache, connector = EncoderCacheManager(400, 8), self.hub.connect("e0", pool)
        encoder = FrameEncoder(self.family.adapter, tower, max_patches=200)
        return EncodeStage(encoder, cache, pool, connector)

    def receiver(self) -> EmbeddingReceiver:
        pool = self.pool()
        return EmbeddingReceiver(EncoderCacheManager(400, 8), pool, self.hub.connect("p0", pool))

    def request(
        self, sampling: SamplingParams | None = None, policy: ReductionPolicy = KEEP_ALL
    ) -> GenerateRequest:
        plan = self.family.plan(clip_of(self.family), SAMPLING)
        self.groups = plan_groups([plan], ["clip"], model="tiny", group_tokens=8)
        prompt = reduce_prompt(self.family.adapter.plan_prompt([plan], QUESTION), policy)
        sampling = sampling or SamplingParams(max_tokens=MAX_TOKENS)
        identity = prompt_identity(prompt, ["clip"])
        return GenerateRequest(f"r{next(self._ids)}", prompt, identity, sampling, seed=3)

    def feed(self, request: GenerateRequest, stages: list[PrefillStage | LanguageEngine]) -> None:
        """Gives the stages the clip's embeddings."""
        if self.family.name not in _ENCODED:
            _ENCODED[self.family.name] = list(self.encoded())
        splicer = EmbeddingSplicer(self.family.adapter, request.prompt)
        for index, embeddings in _ENCODED[self.family.name]:
            placed = splicer.push(self.groups[index], embeddings)
            for stage in stages if placed is not None else []:
                engine = stage.engine if isinstance(stage, PrefillStage) else stage
                engine.add_embeddings(request.request_id, placed)

    def encoded(self) -> Iterator[tuple[int, Embeddings]]:
        """Encodes the clip on a worker, and receives it: groups by their numbers."""
        encoder, receiver = self.encoder(), self.receiver()
        receiver.open("clip", [group.spec for group in self.groups])
        clip = clip_of(self.family)
        while grants := receiver.grant():
            for grant in grants:
                group = self.groups[grant.group]
                frames = self.family.frames(clip, group.plan)
                encoder.submit(EncodeJob(grant.ticket, group.plan, lambda frames=frames: frames))
            while encoder.num_waiting:
                encoder.step()
            receiver.poll()
            for index, embeddings, _ in receiver.take("clip"):
                yield index, embeddings
                receiver.release("clip", index + 1)
        receiver.close("clip")


def steps(*stages: Any, until: int = 1, least: int = 1) -> list[StepResult]:
    """Steps until as many requests have ended, at least `least` times; nothing may go wrong."""
    results: list[StepResult] = []
    for number in range(200):
        results += [stage.step() for stage in stages]
        assert not [fault for result in results for fault in result.faults]
        num_ended = sum(out.finish_reason is not None for result in results for out in result.outputs)
        if num_ended >= until and number + 1 >= least:
            return results
    raise AssertionError("no end")


def test_frames_become_embeddings(family: Family, cuda: FakeCuda) -> None:
    model = OnDevice(family, cuda).model
    encoder = FrameEncoder(family.adapter, family.adapter.vision_tower(model))
    clip = clip_of(family)
    plan = family.plan(clip, SAMPLING)
    with torch.inference_mode():
        (embeddings,) = encoder.encode([encoder.patches(family.frames(clip, plan), plan)])
        joined = family.adapter.join(embeddings, plan, 0, plan.num_units)
    assert joined.rows.device.type == CUDA.type
    assert len(joined) == plan.num_tokens
    assert not cuda.waits


def test_a_prompt_is_encoded_prefilled_handed_over_and_decoded(family: Family, cuda: FakeCuda) -> None:
    device = OnDevice(family, cuda)
    prefill, decode = device.prefill(), device.decode()
    request = device.request()
    _ENCODED.pop(family.name, None)  # here, at least, the clip is encoded and received
    ticket = decode.reserve(request.request_id, "p0", request.identity, request.sampling)
    prefill.submit(request, ticket)
    device.feed(request, [prefill])
    results = steps(prefill, decode)
    assert decode.engine.counts.num_generated_tokens == MAX_TOKENS - 1
    assert sum(len(result.handovers) for result in results) >= 1


SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=MAX_TOKENS),
    "temperature": SamplingParams(max_tokens=MAX_TOKENS, temperature=0.7, seed=1),
    "top_k": SamplingParams(max_tokens=MAX_TOKENS, temperature=0.7, top_k=5),
    "top_p": SamplingParams(max_tokens=MAX_TOKENS, temperature=0.7, top_p=0.9),
    "both": SamplingParams(max_tokens=MAX_TOKENS, temperature=0.7, top_k=8, top_p=0.9, min_p=0.1),
    "penalties": SamplingParams(
        max_tokens=MAX_TOKENS, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5
    ),
    "logprobs": SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, logprobs=3),
    "min_tokens": SamplingParams(max_tokens=MAX_TOKENS, min_tokens=2, stop_token_ids=(5,)),
    "several": SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, n=2),
}


@pytest.mark.parametrize("name", list(SAMPLINGS))
def test_tokens_are_sampled(
    families: dict[str, Family], cuda: FakeCuda, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside others, which have other wishes; once in each step, the host reads."""
    draw_exactly(monkeypatch)
    device = OnDevice(families["qwen2_5_vl"], cuda)
    engine = device.engine()
    wishes = [SAMPLINGS[name], SAMPLINGS["greedy"], SAMPLINGS["top_p"]]
    requests = [device.request(sampling) for sampling in wishes]
    for request in requests:
        engine.add(request)
        device.feed(request, [engine])
    results = steps(engine, until=sum(each.n for each in wishes))
    has_logprobs = any(out.token.logprob is not None for each in results for out in each.outputs)
    assert has_logprobs == (name == "logprobs")
    assert len(cuda.waits) == sum(bool(result.outputs) for result in results)


class Replays:
    """Stands in for CUDA graphs. A replay is one launch on the device, and does nothing else.

    replayed: numbers of captures.
    """

    def __init__(self, mode: FakeCuda) -> None:
        self._mode = mode
        self.replayed: list[int] = []
        self._num_captured = 0

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        number = self._num_captured
        self._num_captured += 1

        def replay() -> None:
            self._mode.launches.append("replay")
            self.replayed.append(number)

        return replay


PENALISED = SamplingParams(max_tokens=12, repetition_penalty=1.05)


@pytest.mark.parametrize(("sampling", "most"), [(SamplingParams(max_tokens=12), 9), (PENALISED, 22)])
def test_a_step_of_decodes_is_one_replay(
    families: dict[str, Family], cuda: FakeCuda, sampling: SamplingParams, most: int
) -> None:
    """And what the sampler launches, whatever the layers of the model; the host reads once, at the end."""
    device = OnDevice(families["qwen2_5_vl"], cuda)
    engine = device.engine(graphs=Replays(cuda), max_num_seqs=3)
    requests = [device.request(sampling) for _ in range(3)]
    for request in requests:
        engine.add(request)
        device.feed(request, [engine])
    while not all(each.is_decoding for each in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    engine.step()  # begins to run ahead
    for _ in range(4):
        cuda.launches.clear()
        cuda.waits.clear()
        assert len(engine.step().outputs) == 3
        assert cuda.launches.count("replay") == 1
        assert len(cuda.launches) <= most
        assert cuda.waits == [("stages/sampling/sampler.py", "_on_host")]


@pytest.mark.parametrize(("name", "most"), [("qwen2_5_vl", 13), ("qwen3_vl", 18)])
def test_a_pass_with_a_chunk_is_one_replay(
    families: dict[str, Family], cuda: FakeCuda, name: str, most: int
) -> None:
    """Alone, then beside a decode, whatever the layers; features for the first of them are placed before."""
    device, counts = OnDevice(families[name], cuda), list[list[int]]()
    for graphs in (None, Replays(cuda)):
        engine, found = device.engine(graphs=graphs, runs_ahead=False, max_num_seqs=3), list[int]()
        for _ in range(2):
            engine.add(request := device.request(SamplingParams(max_tokens=12)))
            device.feed(request, [engine])
            while engine.scheduler.waiting or not all(each.is_decoding for each in engine.scheduler.running):
                cuda.launches.clear()
                cuda.waits.clear()
                result = engine.step()
                assert len(cuda.waits) == bool(result.outputs)
                assert cuda.launches.count("replay") == (graphs is not None)
                found.append(len(cuda.launches))
        counts.append(found)
    eager, replayed = counts
    assert len(eager) == len(replayed) > 1
    assert max(replayed) <= most
    assert min(eager) >= 70 * device.model.config.get_text_config().num_hidden_layers


@pytest.mark.parametrize(("sampling", "most"), [(SamplingParams(max_tokens=40), 20), (PENALISED, 32)])
def test_a_prompt_ends_no_running_ahead(
    families: dict[str, Family], cuda: FakeCuda, sampling: SamplingParams, most: int
) -> None:
    """Step for step, two decodes give a token, one pass is replayed, and the host waits for the one before.

    The new request comes in chunks, then decodes with them.
    """
    device = OnDevice(families["qwen2_5_vl"], cuda)
    engine = device.engine(graphs=Replays(cuda), max_num_seqs=3, max_chunk_tokens=8)
    for _ in range(2):
        engine.add(request := device.request(SamplingParams(max_tokens=60)))
        device.feed(request, [engine])
    while not all(each.is_decoding for each in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    engine.step()  # begins to run ahead
    engine.add(request := device.request(sampling))
    device.feed(request, [engine])
    launches, nums_outputs = list[int](), list[int]()
    for _ in range(len(request.prompt) // 8 + 4):
        cuda.launches.clear()
        cuda.waits.clear()
        nums_outputs.append(len(engine.step().outputs))
        launches.append(len(cuda.launches))
        assert cuda.launches.count("replay") == 1
        assert cuda.waits == [("stages/sampling/sampler.py", "_on_host")]
    assert nums_outputs == sorted(nums_outputs)
    assert (nums_outputs[0], nums_outputs[-1]) == (2, 3)
    assert max(launches) <= most


def test_a_pass_with_recurrent_states_is_one_replay(
    families: dict[str, Family], cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, beside a decode too, and decodes; kernels of the states are launched as on a GPU."""
    jit = pytest.importorskip("triton.runtime.jit")
    monkeypatch.setattr(
        jit.JITFunction, "run", lambda kernel, *_, **_named: cuda.launches.append(kernel.__name__)
    )
    for module in ("delta_layer", "delta_rule"):
        monkeypatch.setattr(f"epd.stages.decoder.{module}.uses_kernels", lambda tensor: tensor.is_cuda)
    device, counts = OnDevice(families["qwen3_5"], cuda), list[list[int]]()
    text = device.model.config.get_text_config()
    num_recurrent = text.layer_types.count("linear_attention")
    for graphs in (None, Replays(cuda)):
        engine, found = device.engine(graphs=graphs, max_num_seqs=3), list[int]()
        for _ in range(2):
            engine.add(request := device.request(SamplingParams(max_tokens=12)))
            device.feed(request, [engine])
            while engine.scheduler.waiting or not all(each.is_decoding for each in engine.scheduler.running):
                found.append(_launched(engine, cuda, num_recurrent, is_replayed=graphs is not None))
        found += [_launched(engine, cuda, num_recurrent, is_replayed=graphs is not None) for _ in range(2)]
        counts.append(found)
    eager, replayed = counts
    assert len(eager) == len(replayed) > 4
    assert max(replayed) <= 13
    assert min(eager) >= 20 * text.num_hidden_layers


def _launched(engine: LanguageEngine, cuda: FakeCuda, num_recurrent: int, *, is_replayed: bool) -> int:
    """Steps, and returns what that launched; the host reads tokens alone."""
    cuda.launches.clear()
    cuda.waits.clear()
    result = engine.step()
    assert len(cuda.waits) == bool(result.outputs)
    assert cuda.launches.count("replay") == is_replayed
    for name in ("_delta_inputs_kernel", "_gate_norm_kernel"):
        assert cuda.launches.count(name) == (0 if is_replayed else num_recurrent)
    return len(cuda.launches)


def test_in_fp8_nothing_waits_for_scales(
    families: dict[str, Family], cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of rows are computed on the device, in prefill and in decodes that are captured."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    monkeypatch.setattr("epd.stages.loading.quantized_linear.can_multiply", lambda *_: True)
    device = OnDevice(families["qwen2_5_vl"], cuda)
    with cuda.unchecked():
        device.model = to_fp8(model_like(device.family.model.config))
    assert "quantised matrices multiplied in FP8 by rows" in products_text(device.model)
    engine = device.engine(graphs=Replays(cuda))
    engine.add(request := device.request())
    device.feed(request, [engine])
    results = steps(engine)
    assert {"_scaled_mm_v2", "replay"} <= set(cuda.launches)
    assert {file for file, _ in cuda.waits} == {"stages/sampling/sampler.py"}
    assert len(cuda.waits) == sum(bool(result.outputs) for result in results)


def test_a_step_of_decodes_that_share_a_prefix_is_one_replay(
    families: dict[str, Family], cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the pass that reads it once, and as many launches beside it as where nothing is shared."""
    monkeypatch.setattr(attention_device, "LEAST_KEYS", 8)
    monkeypatch.setattr(attention_device, "LAUNCH_BYTES", 0)
    device = OnDevice(families["qwen2_5_vl"], cuda)
    graphs = Replays(cuda)
    engine = device.engine(graphs=graphs, shares_prefixes=True, max_num_seqs=3)
    for _ in range(3):  # one after another, so that later ones find the blocks of the first
        request = device.request(SamplingParams(max_tokens=24))
        engine.add(request)
        device.feed(request, [engine])
        while engine.scheduler.waiting or not all(each.is_decoding for each in engine.scheduler.running):
            engine.step()
    engine.step()  # begins to run ahead
    for _ in range(4):
        cuda.launches.clear()
        cuda.waits.clear()
        graphs.replayed.clear()
        assert len(engine.step().outputs) == 3
        assert graphs.replayed == [0], "the capture for three that share"
        assert len(cuda.launches) <= 9
        assert cuda.waits == [("stages/sampling/sampler.py", "_on_host")]


def test_tokens_that_the_likeliest_do_not_decide_are_drawn_from_all(
    families: dict[str, Family], cuda: FakeCuda
) -> None:
    """The fake device reads zeros: no draw from the likeliest is exact."""
    device = OnDevice(families["qwen2_5_vl"], cuda)
    engine = device.engine()
    engine.add(request := device.request(SAMPLINGS["top_k"]))
    device.feed(request, [engine])
    steps(engine)
    assert ("stages/sampling/candidates.py", "_top_k") in cuda.waits


@pytest.mark.parametrize("mode", ["offload", "recompute"])
def test_requests_are_preempted_and_restored(family: Family, cuda: FakeCuda, mode: str) -> None:
    device = OnDevice(family, cuda)
    requests = [device.request(SamplingParams(max_tokens=8)) for _ in range(2)]
    room = 2 * len(requests[0].prompt) + 8
    engine = device.engine(num_tokens=room - room % 4, preemption=mode, max_chunk_tokens=256)
    for request in requests:
        engine.add(request)
        device.feed(request, [engine])
    steps(engine, until=len(requests))
    assert engine.scheduler.num_preempted > 0


def test_a_request_is_moved_in_the_middle_of_its_answer(families: dict[str, Family], cuda: FakeCuda) -> None:
    """A decode worker gives up its role: what it decodes goes on at another."""
    device = OnDevice(families["qwen2_5_vl"], cuda)
    prefill, decode = device.prefill(), device.decode()
    request = device.request(SamplingParams(max_tokens=10))
    prefill.submit(request, decode.reserve(request.request_id, "p0", request.identity, request.sampling))
    device.feed(request, [prefill])
    steps(prefill, decode, until=0, least=6)
    assert 0 < decode.engine.counts.num_generated_tokens < 9
    engine = device.engine()
    other = DecodeStage(engine, device.kv_hub.connect("d1", engine.pools))
    paused = decode.moving.pause(request.request_id)
    assert paused is not None
    ticket = other.reserve(request.request_id, "d0", paused[0], request.sampling)
    assert ticket is not None
    assert decode.moving.move(request.request_id, ticket)
    steps(other, decode)
    assert other.engine.counts.num_generated_tokens > 0


SELECTING = [ReductionPolicy(name, 0.5) for name in SELECTION_METHODS]
POLICIES = [
    *SELECTING,
    *(ReductionPolicy(name, 0.5) for name in (*PREFILL_METHODS, *QUESTION_METHODS)),
]


def test_reduced_prompts_are_answered(family: Family, cuda: FakeCuda) -> None:
    """Of every method that the family's language model computes, at once."""
    policies = SELECTING if family.name in RECURRENT_FAMILIES else POLICIES
    device = OnDevice(family, cuda)
    engine = device.engine(max_chunk_tokens=512, max_num_batched_tokens=4096)
    requests = [device.request(SamplingParams(max_tokens=3), policy) for policy in policies]
    for request in requests:
        engine.add(request)
        device.feed(request, [engine])
    steps(engine, until=len(requests))
    reading = [each for each, policy in zip(requests, policies, strict=True) if not policy.is_in_prefill]
    num_windows = sum(len(item.windows) for request in reading for item in request.prompt.media)
    reads = [place for place in cuda.waits if place[0].startswith("encoders/reduction")]
    assert 0 < len(reads) <= num_windows, "one for each window; none for methods inside of prefill"


@pytest.mark.parametrize("name", ["qwen2_5_vl", "internvl"])
def test_units_that_stand_still_are_skipped(families: dict[str, Family], cuda: FakeCuda, name: str) -> None:
    family = families[name]
    model = OnDevice(family, cuda).model
    encoder = FrameEncoder(family.adapter, family.adapter.vision_tower(model), skip_static=0.0)
    clip = clip_of(family)
    plan = family.plan(clip, SAMPLING)
    with torch.inference_mode():
        (embeddings,) = encoder.encode([encoder.patches(family.frames(clip, plan), plan)])
    assert encoder.num_skipped == plan.num_units - 1, "the fake device reads zeros: nothing is new"
    assert len(embeddings) == plan.num_units * plan.tokens_per_unit
