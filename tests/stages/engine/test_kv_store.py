"""Keys and values on disk: another life of an engine computes the questions alone, with the same tokens.

Modules: `epd/store/pieces.py`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest

from epd.control.recent import Pace
from epd.encoders.groups import prompt_identity
from epd.engine_config import EngineConfig
from epd.sampling_params import SamplingParams
from epd.stages.engine.engine import LanguageEngine
from epd.stages.engine.kv_store import KVStore, _Kept, kv_files
from epd.store.piece_files import PieceFiles, stored
from epd.store.pieces import Piece
from epd.store.write_behind import WriteBehind, read_paces
from epd.types import Tier
from tests.stages.conftest import Subject, check
from tests.stages.prompts import MAX_TOKENS, Drive, Prompt

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

_PIECE = 16


def life(subject: Subject, folder: Path, max_bytes: int = 1 << 30, **options: object) -> LanguageEngine:
    """A new engine, with nothing in memory, over a folder."""
    engine = subject.engine(enable_prefix_caching=True, **options)
    engine.keep_in(PieceFiles(folder, "tests", max_bytes, {}), _PIECE)
    return engine


def run(subject: Subject, engine: LanguageEngine, count: int = 5, seed: int = 0) -> int:
    """Answers the mix rightly. Returns the tokens that were computed for it."""
    before = engine.counts.num_computed_tokens
    check(subject, Drive(engine, seed), count)
    engine.close()
    return engine.counts.num_computed_tokens - before


def least(subject: Subject, count: int = 5) -> int:
    """The tokens that are computed where all media are cached. Questions that begin alike may need fewer."""
    prompts = subject.mix(count).values()
    return sum(len(each.plan) - each.plan.prefix_length + len(each.expected) - 1 for each in prompts)


def files_of(folder: Path) -> list[Path]:
    return sorted(each.path for each in stored(folder))


@pytest.mark.parametrize("options", [{}, {"block_size": 5}])
def test_a_second_life_computes_only_the_questions(
    any_family: Subject, tmp_path: Path, options: dict[str, int]
) -> None:
    first = run(any_family, life(any_family, tmp_path, **options))
    names = files_of(tmp_path)
    engine = life(any_family, tmp_path, **options)
    assert run(any_family, engine, seed=1) <= least(any_family) < first
    assert engine.store is not None
    assert engine.store.counts.read_tokens > 0
    assert engine.store.counts.written_bytes == engine.store.counts.num_failed == 0
    assert files_of(tmp_path) == names, "nothing is written twice"


def test_media_need_not_come_again(a_family: Subject, tmp_path: Path) -> None:
    """Another question about the same media, of which no embedding arrives in the second life."""
    prompt = a_family.prompts[3]
    run(a_family, life(a_family, tmp_path))
    engine = life(a_family, tmp_path)
    other = a_family.adapter.plan_prompt([item.plan for item in prompt.plan.media], "And where is it?")
    engine.add(type(prompt)(other, prompt.mm_hashes, (), ()).request("second"))
    drive = Drive(engine, 0)
    for _ in range(10_000):
        drive.step()
        if not engine.has_work():
            break
    engine.close()
    in_memory = Drive(a_family.engine(enable_prefix_caching=True), 0)
    asked = type(prompt)(other, prompt.mm_hashes, prompt.groups, ())
    assert drive.tokens("second") == in_memory.run({"second": asked})["second"]


class Silent(PieceFiles):
    """Files that are there, and do not answer before they are told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "tests", 1 << 30, {})
        self.may_answer = Event()

    def read(self, key: str, index: int, payload: memoryview) -> Tier | None:
        self.may_answer.wait()
        return super().read(key, index, payload)


def answered(drive: Drive, prompt: Prompt, name: str, salt: str = "") -> tuple[int, ...]:
    """The tokens of a prompt, however long they take. salt: shares nothing with others."""
    identity = prompt_identity(prompt.plan, prompt.mm_hashes, cache_salt=salt)
    drive.engine.add(replace(prompt.request(name), identity=identity))
    for group in prompt.groups:
        drive.engine.add_embeddings(name, group)
    while drive.engine.has_work():
        drive.step()
    return drive.tokens(name)


def test_what_a_disk_does_not_give_is_computed(a_family: Subject, tmp_path: Path) -> None:
    """Once it is known how long that takes. Nothing waits for the disk, which never answers."""
    kept = a_family.prompts[3]
    first = life(a_family, tmp_path)
    expected = answered(Drive(first, 0), kept, "first")
    first.close()
    engine = a_family.engine(enable_prefix_caching=True)
    files = Silent(tmp_path)
    engine.keep_in(files, _PIECE)
    drive = Drive(engine, 0)
    assert answered(drive, kept, "cold", "salt") == expected
    assert answered(drive, kept, "again") == expected
    assert engine.store is not None
    num_left = engine.store.counts.left_tokens
    assert num_left == kept.plan.prefix_length
    assert engine.store.counts.read_tokens == engine.store.counts.num_failed == 0
    files.may_answer.set()
    engine.close()


def test_a_disk_that_is_known_to_be_slow_is_not_asked(a_family: Subject, tmp_path: Path) -> None:
    """What is left is told with the admission. After a while it is tried again."""
    kept = a_family.prompts[3]
    first = life(a_family, tmp_path)
    answered(Drive(first, 0), kept, "first")
    first.close()
    engine = life(a_family, tmp_path)
    assert engine.store is not None
    answered(Drive(engine, 0), kept, "cold", "salt")
    slow = engine.store._files
    slow.note_read("disk", 1, time.monotonic() - 1000.0)
    engine.add(kept.request("slow"))
    assert not engine.store.restoring
    (admission,) = engine.step().admissions
    (left,) = admission.reused
    assert (left.kind, left.tier, left.num) == ("kv", "left", kept.plan.prefix_length)
    engine.abort("slow")
    slow._paces = WriteBehind(slow.files, "tests")._paces
    engine.add(kept.request("again"))
    assert engine.store.restoring == {"again"}
    engine.close()


# Of the embedded model: bytes of a token's keys and values and of an embedding, seconds of a token in passes
# and until it came from media that were encoded. A unit has 4 visual tokens among 9.
_KV_BYTES, _EMBEDDING_BYTES, _PREFILL_S, _ENCODE_S = 6144, 1024, 220e-6, 310e-6


def known(subject: Subject, folder: Path, bytes_per_s: float, latency_s: float) -> KVStore:
    """A store that has read two pieces, and has seen media that were encoded, and passes."""
    engine, paces, now_s = subject.engine(enable_prefix_caching=True), read_paces(), time.monotonic()
    for size in (256 * _KV_BYTES, 28 * _KV_BYTES):
        taken_s = latency_s + size / bytes_per_s
        paces["disk"].add(size, now_s, now_s + taken_s)
        now_s += taken_s
    engine.keep_in(PieceFiles(folder, "tests", 1 << 30, {}), 256, _EMBEDDING_BYTES, paces)
    assert engine.store is not None
    engine.store.note_pass(1000, 1000 * _PREFILL_S)
    engine.store._arriving[None] = Pace()
    engine.store._arriving[None].add(1000, 0.0, 1000 * _ENCODE_S)
    return engine.store


def kept_tokens(num_tokens: int) -> list[_Kept]:
    every = [
        Piece(start // 256, start, min(start + 256, num_tokens), "") for start in range(0, num_tokens, 256)
    ]
    return [_Kept(each, "disk", each.num_tokens // 9, each.num_tokens // 9 * 4) for each in every]


@pytest.mark.parametrize("latency_s", [0.0, 1e-4])
@pytest.mark.parametrize("bytes_per_s", [2e6, 2e7, 1e9])
@pytest.mark.parametrize("num_tokens", [284, 2714, 3747])
def test_the_way_of_least_seconds_is_chosen(
    subjects: Callable[[str], Subject], tmp_path: Path, num_tokens: int, bytes_per_s: float, latency_s: float
) -> None:
    """Videos of 1, 10 and 60 minutes and three speeds of disk. Prefill runs beside what embeddings take."""
    store, units = known(subjects("shapes-vl"), tmp_path, bytes_per_s, latency_s), num_tokens / 9
    kv_s = latency_s * num_tokens / 256 + num_tokens * _KV_BYTES / bytes_per_s
    embeddings_s = units * (latency_s + 4 * _EMBEDDING_BYTES / bytes_per_s)
    computed_s = max(num_tokens * _PREFILL_S, min(embeddings_s, num_tokens * _ENCODE_S))
    assert not 0.95 < kv_s / computed_s < 1.05, "either is right"
    kept = kept_tokens(num_tokens)
    assert store._num_worth(kept) == (len(kept) if kv_s < computed_s else 0)
    store.close()


def test_a_piece_of_text_alone_waits_for_no_embeddings(
    subjects: Callable[[str], Subject], tmp_path: Path
) -> None:
    store = known(subjects("shapes-vl"), tmp_path, 2e6, 1e-4)
    text = _Kept(Piece(0, 0, 256, ""), "disk", 0, 0)
    assert store._costs(text, is_late=False).embeddings_s == 0.0
    assert store._num_worth([text]) == 0
    store.close()


def test_how_soon_embeddings_come_is_measured_by_where_they_are(
    a_family: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of new media take 5 s by the store's clock, and those that are kept on a slow disk 2 s."""
    kept, now_s = a_family.prompts[3], 1000.0
    first = life(a_family, tmp_path)
    answered(Drive(first, 0), kept, "first")
    first.close()
    monkeypatch.setattr("epd.stages.engine.kv_store.time.monotonic", lambda: now_s)
    engine = life(a_family, tmp_path)
    assert engine.store is not None
    for salt, seconds in (("new", 5.0), ("", 2.0)):
        identity = prompt_identity(kept.plan, kept.mm_hashes, cache_salt=salt)
        engine.add(replace(kept.request(salt or "kept"), identity=identity))
        assert engine.step().admissions
        now_s += seconds
        for group in kept.groups:
            engine.add_embeddings(salt or "kept", group)
        while engine.has_work():
            engine.step()
        engine.store._files.note_read("disk", 1, now_s - 1000.0)
    assert engine.store._arrival_s(None, kept.plan.prefix_length) == pytest.approx(5.0)
    assert engine.store._arrival_s("disk", kept.plan.prefix_length) == pytest.approx(2.0)
    engine.close()


def test_passes_count_once_their_results_were_read(
    subjects: Callable[[str], Subject], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launching one takes no time, on a device that works on: all before a token is read are one."""
    monkeypatch.setattr("epd.stages.engine.kv_store.time.monotonic", lambda: 1000.0)
    engine = life(subjects("shapes-vl"), tmp_path)
    store = engine.store
    assert store is not None
    for _ in range(3):
        store.note_pass(1000, 0.0, is_awaited=False)
    assert store._prefilling.seconds(1000, 1000.0) is None
    store.note_pass(1000, 8.0)
    assert store._prefilling.seconds(1000, 1000.0) == pytest.approx(2.0)
    store.note_pass(_PIECE // 4 - 1, 100.0)
    assert store._prefilling.seconds(1000, 1000.0) == pytest.approx(2.0), "a question alone says nothing"
    engine.close()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut off": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "one bit": lambda path: path.write_bytes(flipped(path.read_bytes(), -1)),
    "header": lambda path: path.write_bytes(flipped(path.read_bytes(), 3)),
    "missing": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "another piece's": lambda path: path.write_bytes(b"x" * path.stat().st_size),
}


def flipped(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 1
    return bytes(changed)


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_computed_again(a_family: Subject, tmp_path: Path, damage: str) -> None:
    run(a_family, life(a_family, tmp_path))
    DAMAGES[damage](files_of(tmp_path)[0])
    run(a_family, engine := life(a_family, tmp_path), seed=2)
    assert engine.store is not None
    assert engine.store.counts.num_failed + engine.store.counts.written_bytes > 0
    if damage != "a folder":
        assert run(a_family, life(a_family, tmp_path), seed=3) <= least(a_family), "it is kept anew"


def test_a_disk_that_is_full_ends_writing_alone(
    a_family: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PieceFiles, "write", full)
    run(a_family, life(a_family, tmp_path))
    assert not files_of(tmp_path)
    assert [each.message for each in caplog.records if "no longer" in each.message] == [
        f"keys and values are kept in {tmp_path} no longer: No space left on device"
    ]


def test_the_folder_stays_within_its_room(a_family: Subject, tmp_path: Path) -> None:
    run(a_family, life(a_family, tmp_path / "all"))
    total = sum(each.num_bytes for each in stored(tmp_path / "all"))
    for seed in range(3):
        run(a_family, life(a_family, tmp_path / "half", total // 2), seed=seed)
        assert 0 < sum(each.num_bytes for each in stored(tmp_path / "half")) <= total // 2


def test_requests_that_leave_while_they_wait_leave_nothing(a_family: Subject, tmp_path: Path) -> None:
    run(a_family, life(a_family, tmp_path))
    engine = life(a_family, tmp_path)
    prompts = a_family.mix(5)
    for name, prompt in prompts.items():
        engine.add(prompt.request(name))
    for number, name in enumerate(prompts):
        engine.abort(name)
        if number == 2:
            engine.step()
        engine.check_integrity()
    assert not engine.has_work()
    assert engine.kv.usage == 0
    engine.close()


def test_little_room_in_the_cache_gives_the_same_tokens(a_family: Subject, tmp_path: Path) -> None:
    """What is brought back is evicted again before, or while, the request is admitted."""
    longest = max(len(prompt.plan) for prompt in a_family.prompts) + MAX_TOKENS
    run(a_family, life(a_family, tmp_path, block_size=8))
    run(a_family, life(a_family, tmp_path, num_kv_tokens=longest + 32, block_size=8), count=15, seed=4)


def test_a_prompt_with_a_salt_finds_nothing_of_others(a_family: Subject, tmp_path: Path) -> None:
    prompt = a_family.prompts[3]
    run(a_family, life(a_family, tmp_path))
    engine = life(a_family, tmp_path)
    request = prompt.request("salted")
    salted = prompt_identity(prompt.plan, prompt.mm_hashes, cache_salt="of another")
    engine.add(replace(request, identity=salted))
    assert engine.store is not None
    assert not engine.store.restoring
    engine.add(prompt.request("plain"))
    assert engine.store.restoring == {"plain"}
    engine.close()


def test_several_answers_share_what_is_kept(a_family: Subject, tmp_path: Path) -> None:
    sampling = SamplingParams(max_tokens=2, n=2)
    Drive(engine := life(a_family, tmp_path), 0).run(a_family.mix(5), sampling=sampling)
    engine.close()
    assert run(a_family, life(a_family, tmp_path), seed=5) <= least(a_family)


def test_values_in_8_bits_have_files_of_their_own(subjects: Callable[[str], Subject], tmp_path: Path) -> None:
    """Those of another layout are never read, and a second life computes the questions alone."""
    subject, model = subjects("shapes-vl"), tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    expected, written = {}, {}
    for dtype in ("auto", "int8_values"):
        options = EngineConfig(cache_dir=tmp_path / "kept", kv_cache_dtype=dtype)
        for seed in range(2):
            engine = subject.engine(enable_prefix_caching=True, kv_cache_dtype=dtype)
            engine.keep_in(kv_files(model, options, engine.pools.shape, {}), _PIECE)
            tokens = Drive(engine, seed).run(subject.mix(5))
            engine.close()
            assert engine.store is not None
            assert tokens == expected.setdefault(dtype, tokens)
            assert (engine.store.counts.read_tokens > 0) == (seed == 1)
            written.setdefault(dtype, engine.store.counts.written_bytes)
    layouts = [subject.engine(kv_cache_dtype=each).pools.bytes_per_token for each in written]
    ratio = layouts[1] / layouts[0]
    assert written["int8_values"] / written["auto"] == pytest.approx(ratio, rel=0.01)  # files have headers
    assert ratio < 0.7


def test_an_adapters_name_hides_no_other_fact(a_family: Subject, tmp_path: Path) -> None:
    """One may be called as a fact is that changes what is kept."""
    for name in ("model", "adapter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    shape, modules = a_family.engine().pools.shape, frozenset([f"visual={tmp_path / 'adapter'}"])
    for skip_static in (0.0, 0.5):
        options = EngineConfig(cache_dir=tmp_path / "kept", lora_modules=modules, skip_static=skip_static)
        kv_files(tmp_path / "model", options, shape, {})
    assert sum(each.is_dir() for each in (tmp_path / "kept").iterdir()) == 2
