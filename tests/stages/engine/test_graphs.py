"""Passes that replay a captured one give the tokens of `generate`; each of them is one replay.

A CPU has no graphs: what is captured is run again, over the same memory. Before each run that memory has
nothing of the pass before, and the block of the rows that pad a pass is not a number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from epd.kv.drafting import DraftConfig
from epd.kv.pass_limits import SchedulerConfig
from epd.sampling_params import SamplingParams
from epd.stages.attention import device as attention_device
from epd.stages.engine import chunk_graphs
from epd.stages.engine.chunk_graphs import ChunkGraphs, chunk_sizes
from epd.stages.engine.engine import LanguageEngine
from epd.stages.engine.graphs import DecodeGraphs, _HostBatch, graph_sizes
from epd.stages.engine.kv_pool import KVGroupShape, KVPoolsShape
from epd.stages.engine.model_runner import ModelRunner, kv_layouts
from epd.stages.engine.packed_pass import PackedPass, Segment
from epd.types import ceil_div
from tests.stages.conftest import Subject
from tests.stages.prompts import Drive

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")
CHUNK_SIZES = (16, 64, 128)


@dataclass
class Repeats:
    """Stands in for CUDA graphs: replays are runs of what was captured. replayed: numbers of captures."""

    replays: int = 0
    num_captured: int = 0
    replayed: list[int] = field(default_factory=list)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        number = self.num_captured
        self.num_captured += 1

        def replay() -> None:
            self.replays += 1
            self.replayed.append(number)
            run()

        return replay


@dataclass
class Watched:
    """What runners did meanwhile. eager: passes that were not replayed. chunks: those with more that were."""

    eager: list[PackedPass] = field(default_factory=list)
    chunks: list[PackedPass] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    runners: list[ModelRunner] = field(default_factory=list)

    @property
    def num_eager_decodes(self) -> int:
        return sum(map(_has_decodes_alone, self.eager))


def _is_mixed(packed: PackedPass) -> bool:
    lens = np.diff(packed.batches[0].query_starts)
    return lens.min() == 1 < lens.max()


def _has_decodes_alone(packed: PackedPass) -> bool:
    batch = packed.batches[0]
    is_each_one = bool((np.diff(batch.query_starts) == 1).all() and (batch.context_lens > 1).all())
    return is_each_one and not len(packed.visual_rows)


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Poisons all memory of a captured pass before it is replayed."""
    found, run, decode, build = Watched(), DecodeGraphs.run, ModelRunner._decode, ModelRunner._captured
    run_chunks = ChunkGraphs.run

    def poisoned_chunks(graphs: ChunkGraphs, packed: PackedPass, *embedded: Any) -> Tensor:
        for memory, value in ((graphs._memory, 0x7F), (graphs._tables, 2**30)):
            memory.fill_(value)
        for rows in (graphs._hidden, graphs._out, graphs._deepstack):
            rows.fill_(torch.nan)
        for pool in found.runners[-1].pools.groups:
            pool.storage[-1] = torch.nan
        found.chunks.append(packed)
        return run_chunks(graphs, packed, *embedded)

    def poisoned(graphs: DecodeGraphs, packed: PackedPass, token_ids: Tensor | None) -> Tensor:
        assert graphs._logits is not None
        graphs._memory.fill_(0x7F)  # of every type a number that is no place
        graphs._logits.fill_(torch.nan)
        for pool in found.runners[-1].pools.groups:
            pool.storage[-1] = torch.nan
        found.batches.append(len(packed.token_ids))
        return run(graphs, packed, token_ids)

    def watching(runner: ModelRunner, packed: PackedPass, inputs: Any, visual: Any) -> Tensor:
        found.eager.append(packed)
        return decode(runner, packed, inputs, visual)

    def building(runner: ModelRunner, *arguments: Any) -> Any:
        found.runners.append(runner)
        return build(runner, *arguments)

    monkeypatch.setattr(DecodeGraphs, "run", poisoned)
    monkeypatch.setattr(ChunkGraphs, "run", poisoned_chunks)
    monkeypatch.setattr(chunk_graphs, "SIZES", CHUNK_SIZES)
    monkeypatch.setattr(ModelRunner, "_decode", watching)
    monkeypatch.setattr(ModelRunner, "_captured", building)
    return found


def captured(subject: Subject, graphs: Repeats, **options: Any) -> LanguageEngine:
    config = SchedulerConfig(max_chunk_tokens=512, max_num_seqs=6)
    return subject.engine(graphs=graphs, **({"num_kv_tokens": 2048, "config": config} | options))


@pytest.mark.parametrize(
    ("name", "runs_ahead"),
    [
        ("qwen2_5_vl", True),
        ("qwen2_5_vl", False),
        ("qwen3_vl", True),
        ("internvl", True),
        ("smolvlm", False),
        ("qwen3_5", True),  # which does not run ahead
        ("qwen3_5_moe", False),
    ],
)
def test_tokens_equal_generate(
    subjects: Callable[[str], Subject], name: str, runs_ahead: bool, watched: Watched
) -> None:
    """Requests come and go, then end one after another; each pass of few tokens is one replay."""
    subject, graphs = subjects(name), Repeats()
    engine = captured(subject, graphs, async_scheduling=runs_ahead)
    prompts = subject.mix(7)
    drive = Drive(engine, seed=5)
    tokens = drive.run(prompts)
    assert tokens == {name: prompt.expected for name, prompt in prompts.items()}
    for count in range(4, 9):
        engine.add(subject.prompts[0].request(f"{count}", sampling=SamplingParams(max_tokens=count)))
    while engine.has_work():
        drive.step()
    assert all(drive.tokens(f"{count}") == subject.prompts[0].expected[:count] for count in range(4, 9))
    assert len(graph_sizes(6)) == 4
    assert graphs.num_captured == 7 + len(CHUNK_SIZES), "each size above one also for what is read together"
    assert graphs.replays == len(watched.batches) + len(watched.chunks)
    assert len(watched.batches) > 10
    assert watched.num_eager_decodes == 0
    assert all(len(packed.token_ids) > CHUNK_SIZES[-1] for packed in watched.eager)
    assert any(len(packed.visual_rows) for packed in watched.chunks)
    assert any(_is_mixed(packed) for packed in watched.chunks), "chunks were meant to be beside decodes"
    assert {2, 3, 4, 5} <= set(watched.batches), "batches were meant to be padded, and not to be"


@pytest.mark.parametrize(("kind", "num_captured"), [("decodes", 7), ("chunks", len(CHUNK_SIZES))])
def test_a_worker_with_one_kind_of_passes_captures_these(
    subjects: Callable[[str], Subject], kind: str, num_captured: int, watched: Watched
) -> None:
    """Those of the other kind give the same tokens."""
    subject, graphs = subjects("qwen2_5_vl"), Repeats()
    engine = captured(subject, graphs, captures=frozenset({kind}), async_scheduling=True)
    prompts = subject.mix(3)
    assert Drive(engine, seed=5).run(prompts) == {name: each.expected for name, each in prompts.items()}
    assert graphs.num_captured == num_captured
    assert graphs.replays == len(watched.batches) + len(watched.chunks) > 3
    assert bool(watched.batches) == (kind == "decodes")
    assert engine.kv.spec.num_blocks == (2048 // 16 - 1,), "the last block is nobody's"


def test_questions_about_one_video_replay_the_pass_that_reads_it_once(
    subjects: Callable[[str], Subject], monkeypatch: pytest.MonkeyPatch, watched: Watched
) -> None:
    """Where that pays; captures 0, 2 and 4 are of it, for 6, 4 and 2 rows."""
    monkeypatch.setattr(attention_device, "LEAST_KEYS", 32)
    subject = subjects("qwen2_5_vl")
    for launch_bytes, shared in ((0, {2, 4}), (2**40, set())):
        monkeypatch.setattr(attention_device, "LAUNCH_BYTES", launch_bytes)
        engine = captured(subject, graphs := Repeats(), enable_prefix_caching=True)
        prompt = max(subject.prompts, key=lambda each: len(each.plan))
        drive = Drive(engine, seed=5)
        assert drive.run({"first": prompt}) == {"first": prompt.expected}
        graphs.replayed.clear()
        names = ["a", "b", "c"]
        assert drive.run(dict.fromkeys(names, prompt)) == dict.fromkeys(names, prompt.expected)
        assert {number for number in graphs.replayed if number % 2 == 0 and number < 6} == shared
        assert watched.num_eager_decodes == 0


@pytest.mark.parametrize(
    ("name", "mode"), [("qwen2_5_vl", "offload"), ("qwen3_vl", "recompute"), ("qwen3_5", "offload")]
)
def test_preemption_changes_no_token(
    subjects: Callable[[str], Subject], name: str, mode: str, watched: Watched
) -> None:
    """With tables that grow every fourth token, and prefixes that are shared."""
    subject = subjects(name)
    longest = max(len(prompt.plan) for prompt in subject.prompts)
    config = SchedulerConfig(max_chunk_tokens=96, max_num_seqs=6, preemption=mode)  # type: ignore[arg-type]
    room = 2 * longest + 28
    engine = captured(
        subject,
        graphs := Repeats(),
        config=config,
        block_size=4,
        num_kv_tokens=room,
        enable_prefix_caching=True,
        async_scheduling=True,
    )
    prompts = subject.mix(8)
    tokens = Drive(engine, seed=1).run(prompts)
    assert tokens == {name: prompt.expected for name, prompt in prompts.items()}
    assert engine.scheduler.num_preempted > 0, "the pool was meant to be too small"
    assert graphs.replays > 0
    assert watched.num_eager_decodes == 0
    assert engine.kv.spec.num_blocks == (room // 4 - 1,), "the last block is nobody's"


SAMPLINGS = {
    "repeated": SamplingParams(max_tokens=10, repetition_penalty=1.05),
    "drawn and reported": SamplingParams(max_tokens=10, temperature=0.9, repetition_penalty=1.3, logprobs=2),
    "several": SamplingParams(max_tokens=10, temperature=1.0, top_p=0.9, n=3),
}


@pytest.mark.parametrize("name", list(SAMPLINGS))
def test_what_is_drawn_is_what_is_drawn_from_eager_passes(
    subjects: Callable[[str], Subject], name: str
) -> None:
    """Beside a greedy answer, with passes that are launched before the logits before them are looked at."""
    subject, graphs, found = subjects("qwen2_5_vl"), Repeats(), []
    for options in ({"enforce_eager": True}, {}):
        engine = captured(subject, graphs, async_scheduling=True, **options)
        drive = Drive(engine, seed=3)
        engine.add(subject.prompts[0].request("greedy"))
        drive.run({"r": subject.prompts[0]}, sampling=SAMPLINGS[name], seed=11)
        found.append({key: [out.token.token_id for out in outs] for key, outs in drive.outputs.items()})
    assert found[0] == found[1]
    assert graphs.replays >= 9


def test_a_draw_that_is_looked_at_again_has_its_own_logits(
    subjects: Callable[[str], Subject], watched: Watched
) -> None:
    """The next pass is replayed before a draw from the likeliest tokens is known to be wrong."""
    captured(subjects("qwen2_5_vl"), Repeats())
    runner = watched.runners[-1]
    packed = runner.packed([_decode(4), _decode(7)])
    first = runner.run_ahead(packed, None, None)
    kept = first.clone()
    again = runner.run_ahead(packed, None, torch.tensor([5, 9]))
    assert torch.equal(first, kept)
    assert not torch.equal(first, again)


def test_a_batch_that_goes_on_is_what_would_be_laid_out_anew(
    subjects: Callable[[str], Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its arrays, with rows that pad it, also after answers have ended; its work has each key once."""
    write, nums_rows = _HostBatch.write, list[int]()

    def compared(host: _HostBatch, packed: PackedPass) -> None:
        is_next = packed is host._planned
        write(host, packed)
        anew = _HostBatch(np.zeros(len(host._memory), np.uint8), host._shape, host._size)
        write(anew, packed)
        found, expected = host._arrays, anew._arrays
        for name in ("slots", "positions", "contexts"):
            assert np.array_equal(getattr(found, name), getattr(expected, name))
        for row, context in enumerate(found.contexts[0].tolist()):
            stop = ceil_div(context, host._shape.block_size)
            assert np.array_equal(found.tables[:stop, 0, row], expected.tables[:stop, 0, row])
            mine = [item for item in found.own[0].tolist() if item[0] == row and item[2]]
            assert {item[3] for item in mine} == {context - 1}
            assert sorted(key for item in mine for key in range(*item[4:6])) == list(range(context))
        if is_next:
            nums_rows.append(len(packed.token_ids))

    monkeypatch.setattr(_HostBatch, "write", compared)
    engine = captured(subjects("qwen2_5_vl"), Repeats(), async_scheduling=True, block_size=4)
    drive, prompt = Drive(engine, seed=0), subjects("qwen2_5_vl").prompts[0]
    for count in (40, 30, 9):
        sampling = SamplingParams(max_tokens=count, ignore_eos=True)
        engine.add(prompt.request(f"{count}", sampling=sampling))
    while engine.has_work():
        drive.step()
    assert set(nums_rows) == {1, 2, 3}, "batches were meant to go on, and to lose rows"


def _decode(num_cached: int, **options: Any) -> Segment:
    return _segment(1, num_cached, range(3), **options)


def _segment(num_new: int, num_cached: int, blocks: Sequence[int], **options: Any) -> Segment:
    places = num_cached + np.arange(num_new)
    table = np.array(blocks, dtype=np.int32)
    return Segment(places % 50, np.tile(places, (3, 1)), [num_cached], [table], **options)


@pytest.mark.parametrize(
    "segments",
    [
        [_segment(2, 4, [3])],
        [_decode(4, num_logits=0)],  # of media alone
        [_segment(16, 0, [5])],  # no padding
        [_decode(20), _segment(30, 7, [3, 4, 7]), _segment(5, 33, [8, 9, 2], num_logits=5), _decode(0)],
    ],
    ids=["chunk", "media", "full", "mixed and drafted"],
)
def test_passes_with_chunks_are_what_they_are_when_launched(
    subjects: Callable[[str], Subject], segments: list[Segment], watched: Watched
) -> None:
    """Logits, and keys and values; nothing else is written but the last block, which is nobody's."""
    segments = [
        replace(each, block_tables=[each.block_tables[0] + 20 * i]) for i, each in enumerate(segments)
    ]
    found = []
    for options in ({}, {"enforce_eager": True}):
        captured(subjects("qwen2_5_vl"), graphs := Repeats(), **options)
        runner = watched.runners[-1]
        (pool,) = runner.pools.groups
        pool.storage[:-1] = torch.randn(pool.storage[:-1].shape, generator=torch.Generator().manual_seed(1))
        found.append((runner.run(segments), pool.storage[:-1].clone()))
        assert graphs.replays == len(found) % 2
    (logits, stored), (expected, expected_stored) = found
    assert len(logits) == sum(each.num_logits for each in segments)
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(stored, expected_stored)


def test_passes_that_need_what_was_not_captured_do_not_fit(
    subjects: Callable[[str], Subject], watched: Watched
) -> None:
    captured(subjects("qwen2_5_vl"), Repeats())
    runner = watched.runners[-1]
    graphs, packed = runner._chunk_graphs, runner.packed([_segment(5, 0, [0])])
    assert graphs is not None
    assert graphs.fits(packed)
    (batch,) = packed.batches
    assert not graphs.fits(replace(packed, adapters=("tone",)))
    assert not graphs.fits(replace(packed, num_deepstack=1))
    assert not graphs.fits(replace(packed, batches=(replace(batch, both_ways=np.ones(5, np.bool_)),)))


@pytest.mark.parametrize(
    "segments",
    [
        [_segment(129, 4, range(9))],  # a large chunk
        [_decode(4, num_kept=1)],  # pruned
        [_decode(4)] * 7,  # more than are captured
        [Segment(np.arange(1), np.zeros((3, 1), np.int64), [2048], [np.zeros(129, np.int32)])],  # long
    ],
    ids=["large", "pruned", "many", "long"],
)
def test_other_passes_are_launched_as_they_are(
    subjects: Callable[[str], Subject], segments: list[Segment], watched: Watched
) -> None:
    captured(subjects("qwen2_5_vl"), graphs := Repeats())
    watched.runners[-1].run(segments)
    assert (graphs.replays, len(watched.eager)) == (0, 1)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_5"])
def test_drafts_are_checked_by_passes_that_are_replayed(
    subjects: Callable[[str], Subject], name: str, watched: Watched
) -> None:
    subject = subjects(name)
    engine = captured(subject, graphs := Repeats(), drafting=DraftConfig("recycling", 3))
    prompts = subject.mix(3)
    assert Drive(engine, seed=2).run(prompts) == {name: each.expected for name, each in prompts.items()}
    assert engine.counts.num_drafts > 0
    assert graphs.replays > 0, "a pass without drafts was meant to be among them"
    assert any(len(each.logit_rows) > len(each.batches[0].context_lens) for each in watched.chunks)
    assert all(len(packed.token_ids) > CHUNK_SIZES[-1] for packed in watched.eager)


def test_layer_groups_have_tables_of_their_own(subjects: Callable[[str], Subject], watched: Watched) -> None:
    subject = subjects("qwen2_5_vl")
    whole = kv_layouts(subject.model)[0][0]
    first, rest = (replace(whole, num_layers=number) for number in (1, whole.num_layers - 1))
    pools = KVPoolsShape((KVGroupShape(40, first), KVGroupShape(50, rest)), 16).build()
    engine = captured(subject, graphs := Repeats(), pools=pools)
    prompts = subject.mix(3)
    assert Drive(engine, seed=2).run(prompts) == {name: each.expected for name, each in prompts.items()}
    assert graphs.replays > 0
    assert watched.num_eager_decodes == 0


def test_a_pass_that_cannot_be_captured_is_launched_as_it_is(
    subjects: Callable[[str], Subject], caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing:
        def capture(self, run: Callable[[], None]) -> Callable[[], None]:
            run()
            raise RuntimeError("operation not permitted when stream is capturing")

    subject = subjects("qwen2_5_vl")
    engine = captured(subject, Refusing())  # type: ignore[arg-type]
    assert "could not be captured" in caplog.text
    prompts = subject.mix(1)
    assert Drive(engine, seed=0).run(prompts) == {name: each.expected for name, each in prompts.items()}
    assert engine.kv.spec.num_blocks == (2048 // 16,)


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [(1, [1]), (6, [1, 2, 4, 6]), (40, [1, 2, 4, 8, 16, 32, 40]), (64, [1, 2, 4, 8, 16, 32, 64])],
)
def test_batches_are_captured_up_to_what_runs_at_once(max_num_seqs: int, sizes: list[int]) -> None:
    assert graph_sizes(max_num_seqs) == sizes
    assert graph_sizes(10_000)[-1] == 512


def test_chunks_are_captured_up_to_the_largest_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert chunk_sizes(1) == [64]
    assert chunk_sizes(128) == [64, 128]
    assert chunk_sizes(129) == [64, 128, 192]
    assert chunk_sizes(8192)[-1] == 512
