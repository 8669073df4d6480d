"""What reduction costs and saves, measured and not timed: operations, KV blocks held, bytes sent.

    python -m benchmarks.reduction.reduction_costs [--quick] [--section NAME]

    tower -> prefill worker: prompt, first token -> decode worker: the rest

Operations are those of the matrix products that torch carries out, in the tower and for a prompt to its
first token, without the half of attention that a causal kernel leaves out. Blocks and bytes are those of the
pools: embeddings that one encoder sends to the prefill worker, keys and values sent to the decode worker.
encoders: embeddings that several encoders of a server send, and whether the answer is that of one.
Nothing depends on the clock. Results go to benchmarks/results/reduction_costs.{json,md}.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.reporting import Row, Section, run_sections, setting
from epd import LLM
from epd.control.routing import Router
from epd.encode.encoder_cache import CachedGroup
from epd.encoders import load_adapter
from epd.encoders.adapter import Embeddings
from epd.encoders.groups import prompt_identity
from epd.encoders.plans import PromptPlan
from epd.encoders.reduction import reduce_prompt
from epd.encoders.reduction.reading import ItemReducer, ItemReduction, is_cut_at_encoder
from epd.engine_config import DEFAULT_ENGINE, EngineConfig
from epd.models import embedded_model_path
from epd.reduction import KEEP_ALL, METHODS, ReductionPolicy
from epd.sampling_params import SamplingParams
from epd.shapes import make_scene
from epd.stages.connectors.mailbox import InProcessHub
from epd.stages.decode import DecodeStage
from epd.stages.encode.encoder_pool import EmbeddingSplicer, EncoderPool
from epd.stages.engine.engine import LanguageEngine
from epd.stages.engine.generation import GenerateRequest, generation_settings
from epd.stages.engine.kv_pool import KVPools
from epd.stages.engine.setup import build_engine
from epd.stages.loading.weights import load_role
from epd.stages.placement import Placement
from epd.stages.prefill import PrefillStage
from epd.stages.visual_inputs import PlacedEmbeddings
from epd.transfer.connectors import KVChunk, KVTicket
from epd.video.demo_video import write_demo_video
from tests.colocated import ColocatedPipeline, EncodedMedia

RETENTIONS = (0.5, 0.25, 0.2, 0.15, 0.1, 0.078)
# Of FastKV's two rates: what is kept, and what later layers compute; 10 % of 20 % is published.
TWO_RATES = ((0.25, 0.5), (0.1, 0.2), (0.1, 0.5))
FRAMES = (32, 128, 512)
NUM_ENCODERS = (1, 2, 4)
ENCODED = (0.1, 0.25, 0.5)
SEVERAL = ("balanced", "funnel", "evs", "mustdrop")
ALL_TOKENS = "all tokens"
QUESTION = "Which shape appears first?"
SEED = 5_000_001
# Room of each worker.
KV_TOKENS = 2**13


@dataclass(frozen=True, slots=True)
class PromptCosts:
    """Holds what one prompt took.

    decoder_flops: of the prompt to its first token, what chooses tokens included.
    encoded_bytes: of embeddings on their way to the prefill worker. handed_over_bytes: of keys and values.
    peak_blocks, prefill_blocks, decode_blocks: of keys and values: the most that the prefill worker held for
        the prompt, what it held once that was computed, and what the decode worker did.
    """

    decoder_flops: int
    encoded_bytes: int
    handed_over_bytes: int
    peak_blocks: int
    prefill_blocks: int
    decode_blocks: int


@contextmanager
def counted_flops() -> Iterator[FlopCounterMode]:
    """Counts the operations of all matrix products in the block: `get_total_flops`."""
    products = {torch.ops.mkldnn._linear_pointwise: _linear_flops}
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with FlopCounterMode(display=False, custom_mapping=products | {attention: _attention_flops}) as counter:
        yield counter


def _linear_flops(rows: Sequence[int], *_: Any, out_shape: Sequence[int], **__: Any) -> int:
    return int(2 * prod(rows) * out_shape[-1])


def _attention_flops(
    query: Sequence[int],
    key: Sequence[int],
    value: Sequence[int],
    dropout: float = 0.0,  # noqa: ARG001 - passed by place
    is_causal: bool = False,
    **_: Any,
) -> int:
    """Returns two operations for each product of scores and of values; shapes are [B, H, T, D]."""
    pairs = query[2] * key[2]
    if is_causal:  # row i sees the first i + 1 keys
        num_seen = min(query[2], key[2])
        pairs = num_seen * (num_seen + 1) // 2 + max(query[2] - num_seen, 0) * key[2]
    return 2 * query[0] * query[1] * pairs * (query[3] + value[3])


def prompt_costs(
    pipeline: ColocatedPipeline, model: Any, encoded: EncodedMedia, question: str, policy: ReductionPolicy
) -> PromptCosts:
    """Runs one prompt through a prefill and a decode worker of this model, until it decodes."""
    plan = reduce_prompt(pipeline.adapter.plan_prompt(encoded.plans, question), policy)
    request = GenerateRequest("r", plan, prompt_identity(plan, _names(encoded)), SamplingParams(max_tokens=2))
    hub, here, there = InProcessHub(), _engine(pipeline, model), _engine(pipeline, model)
    received = _WatchedPools(there.pools)
    prefill = PrefillStage(here, hub.connect("p", here.pools))
    decode = DecodeStage(there, hub.connect("d", received))
    prefill.submit(request, decode.reserve("r", "p", request.identity, request.sampling, plan.num_dropped))
    peak = num_bytes = 0
    with counted_flops() as counter:
        for placed, sent in _sent(pipeline, encoded, plan):
            num_bytes += _num_bytes(sent)
            if placed is not None:
                here.add_embeddings("r", placed)
        while not here.scheduler.is_held("r"):
            prefill.step()
            peak = max(peak, len(here.kv.block_table("r")))
    decode.reception.poll()
    return PromptCosts(
        decoder_flops=counter.get_total_flops(),
        encoded_bytes=num_bytes,
        handed_over_bytes=received.num_bytes,
        peak_blocks=peak,
        prefill_blocks=len(here.kv.block_table("r")),
        decode_blocks=len(there.kv.block_table("r")),
    )


def _sent(
    pipeline: ColocatedPipeline, encoded: EncodedMedia, plan: PromptPlan
) -> Iterator[tuple[PlacedEmbeddings | None, Embeddings]]:
    """Yields what each group completes of the prompt, and what one encoder of all groups sends of it."""
    adapter, whole = pipeline.adapter, [group for group, _ in encoded.groups]
    splicer, readers = EmbeddingSplicer(adapter, plan), dict[int, ItemReducer]()
    for number, (group, embeddings) in enumerate(encoded.groups):
        if is_cut_at_encoder(plan, [each for each in whole if each.item == group.item]):
            reading = ItemReduction.of(plan, whole[number:])
            if reading is not None:
                readers[group.item] = ItemReducer(adapter.join, reading, group)
            kept, places = readers[group.item].read(group, embeddings)
            yield splicer.place(group, kept, places), kept
        else:
            yield splicer.push(group, embeddings), embeddings


class _WatchedPools:
    """Counts the bytes that a decode worker receives."""

    def __init__(self, pools: KVPools) -> None:
        self._pools = pools
        self.device = pools.device
        self.num_bytes = 0

    def receive(self, ticket: KVTicket, source: KVChunk, source_pool: KVPools) -> None:
        for span in source.spans:
            layout = self._pools.groups[span.layer_group].layout
            self.num_bytes += (span.stop - span.start) * layout.bytes_per_token
        self._pools.receive(ticket, source, source_pool)


def _engine(pipeline: ColocatedPipeline, model: Any) -> LanguageEngine:
    options = EngineConfig(num_kv_tokens=KV_TOKENS)
    return build_engine(model, pipeline.adapter, pipeline.settings, options=options)


def _names(encoded: EncodedMedia) -> list[str]:
    return [f"item {number}" for number in range(len(encoded.plans))]


def _num_bytes(embeddings: Embeddings) -> int:
    return sum(rows.nbytes for rows in (embeddings.rows, *embeddings.deepstack))


@contextmanager
def drawn_video(num_frames: int) -> Iterator[Path]:
    """Draws a video of as many seconds, and removes it after the block."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "video.mp4"
        write_demo_video(path, make_scene(SEED, float(num_frames)), fps=2, height=360, width=640)
        yield path


def encoded_video(
    pipeline: ColocatedPipeline, num_frames: int, policy: ReductionPolicy = KEEP_ALL
) -> EncodedMedia:
    """Encodes a drawn video of one frame a second, with neighbours merged in the tower if the policy does."""
    with drawn_video(num_frames) as path:
        return pipeline.encode_media([path], num_frames=num_frames, reduction=policy)


def embedded_pipeline(config: EngineConfig = DEFAULT_ENGINE) -> tuple[ColocatedPipeline, Any]:
    """Loads the embedded model, on one thread, and what is behind the pipeline."""
    path = embedded_model_path()
    adapter, model = load_adapter(path), load_role(path, "whole", Placement.resolve(model_path=path)).model
    torch.set_num_threads(1)
    settings = generation_settings(path, adapter)
    return ColocatedPipeline(model, adapter, settings=settings, config=config), model


def cost_rows(num_frames: int) -> list[Row]:
    """Measures every method at every retention, all tokens first."""
    pipeline, model = embedded_pipeline()
    policies = [ReductionPolicy()]
    policies += [ReductionPolicy(method, retention) for method in METHODS for retention in RETENTIONS]
    policies += [ReductionPolicy("fastkv", *shares) for shares in TWO_RATES]
    encoded: dict[float | None, EncodedMedia] = {}
    towers: dict[float | None, int] = {}
    for policy in policies:
        if policy.tower_share not in encoded:
            with counted_flops() as tower:
                encoded[policy.tower_share] = encoded_video(pipeline, num_frames, policy)
            towers[policy.tower_share] = tower.get_total_flops()
    costs = [prompt_costs(pipeline, model, encoded[each.tower_share], QUESTION, each) for each in policies]
    return [
        _row(policy, each, costs[0], (towers[policy.tower_share], towers[None]))
        for policy, each in zip(policies, costs, strict=True)
    ]


def _row(policy: ReductionPolicy, costs: PromptCosts, whole: PromptCosts, towers: tuple[int, int]) -> Row:
    """towers: operations of the tower, here and with all tokens."""
    decoder, tower_flops, both = costs.decoder_flops, towers[0], costs.decoder_flops + towers[0]
    return {
        "method": policy.method if policy.is_on else ALL_TOKENS,
        "retention": policy.retention,
        "compute_share": policy.later_share,
        "tower_gflop": round(tower_flops / 1e9, 2),
        "prompt_gflop": round(decoder / 1e9, 3),
        "fewer_in_tower": f"{1 - tower_flops / towers[1]:.1%}",
        "fewer_in_prompt": f"{1 - decoder / whole.decoder_flops:.1%}",
        "fewer_in_all": f"{1 - both / (whole.decoder_flops + towers[1]):.1%}",
        "kv_blocks_at_most": costs.peak_blocks,
        "kv_blocks_prefill": costs.prefill_blocks,
        "kv_blocks_decode": costs.decode_blocks,
        "sent_to_prefill_mb": round(costs.encoded_bytes / 1e6, 3),
        "sent_to_decode_mb": round(costs.handed_over_bytes / 1e6, 3),
    }


def encoder_rows(num_frames: int, method: str) -> list[Row]:
    """Asks servers of 1, 2 and 4 encoders the same, with all tokens and at every retention of ENCODED.

    Encoders get work in turns: one that is idle would get all of it.
    """
    rows: list[Row] = []
    with drawn_video(num_frames) as path, counted_copies() as copies, in_turns():
        for num_encoders in NUM_ENCODERS:
            with LLM("shapes-vl", topology=f"{num_encoders}e1p1d", num_threads=1) as llm:
                for retention in (*ENCODED, 1.0):
                    copies.clear()
                    answer = _answer(llm, path, num_frames, method, retention)
                    rows.append(_encoder_row(num_encoders, method, retention, copies, answer))
    ones = {row["retention"]: row["answer"] for row in rows if row["encoders"] == 1}
    for row in rows:
        row["equals_one"] = row.pop("answer") == ones[row["retention"]]
    return rows


def _answer(llm: LLM, path: Path, num_frames: int, method: str, retention: float) -> str:
    video = {"type": "video_url", "video_url": {"url": path.as_uri()}}
    message = {"role": "user", "content": [video, {"type": "text", "text": "Describe the video."}]}
    fields: dict[str, Any] = {"num_frames": num_frames, "retention": retention}
    fields |= {"reduction": method} if retention < 1 else {}
    sampling = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}
    return str(llm.chat([message], epd=fields, **sampling)["choices"][0]["message"]["content"])


def _encoder_row(n: int, method: str, retention: float, copies: list[tuple[str, int]], answer: str) -> Row:
    """copies: the pool of each group that was copied, and its bytes."""
    return {
        "encoders": n,
        "method": method,
        "retention": retention,
        "sent_to_prefill_mb": round(sum(each for _, each in copies) / 1e6, 3),
        "groups": len(copies),
        "most_from_one_encoder": max(Counter(pool for pool, _ in copies).values()),
        "answer": answer,
    }


@contextmanager
def in_turns() -> Iterator[None]:
    """Lets routers choose encoders in turns while the block runs."""
    turns = count()

    def chosen(_: Router, names: Collection[str], wanted: str | None = None, num_patches: int = 1) -> str:  # noqa: ARG001
        return wanted if wanted in names else sorted(names)[next(turns) % len(names)]

    with patch.object(Router, "encoder", chosen):
        yield


@contextmanager
def counted_copies() -> Iterator[list[tuple[str, int]]]:
    """Lists the copies between pools of embeddings while the block runs."""
    copies, copy = list[tuple[str, int]](), EncoderPool.copy

    def counted(pool: EncoderPool, source: EncoderPool, place: CachedGroup, to: CachedGroup) -> None:
        copies.append((str(id(source)), place.num_embeddings * source.layout.bytes_per_embedding))
        copy(pool, source, place, to)

    with patch.object(EncoderPool, "copy", counted):
        yield copies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the shortest video; writes nothing")
    parser.add_argument("--section", action="append", help="one or several of those below")
    options = parser.parse_args()
    is_quick = options.quick
    sections = {
        f"{frames} frames": Section(f"{frames} frames", partial(cost_rows, frames))
        for frames in (FRAMES[:1] if is_quick else FRAMES)
    }
    for method in SEVERAL:
        title, frames = f"Several encoders, {method}", FRAMES[0 if is_quick else -1]
        sections[f"encoders, {method}"] = Section(title, partial(encoder_rows, frames, method))
    run_sections(
        "reduction_costs",
        "What reduction costs and saves",
        sections,
        options.section or list(sections),
        lambda: setting(("torch", "transformers"), checkpoint="shapes-vl, float32, blocks of 16 tokens"),
        save=not is_quick,
        module="reduction.reduction_costs",
    )


if __name__ == "__main__":
    main()
