"""Simulated faults: answers have the undisturbed tokens, nothing is left, and few innocents are blamed."""

from __future__ import annotations

import asyncio
import gc
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from epd.serve_app.network.worker_server import WorkerServer
from epd.serve_app.worker.worker_thread import WorkerThread
from epd.stages.decoder.decoder import FusedDecoder
from tests.faults.__main__ import MAX_BLAMED, Totals, needed, results
from tests.faults.mutants import MUTANTS, ROOT, broken, verdict
from tests.faults.plan import AIMS, SIZES, Asked, Fault, FaultPlan, drawn, size_of
from tests.faults.pool import Pool, _SharedReader, build_pool, read_once
from tests.faults.simulation import Result, simulate

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array_wrap__ must accept:DeprecationWarning",
    "ignore:coroutine .* was never awaited:RuntimeWarning",  # of processes that were killed
    "ignore::pytest.PytestUnraisableExceptionWarning",
)

NUM_SEEDS = 200  # the first; `make faults` runs a thousand
LARGE_EVERY, MERGED_EVERY = 3, 20  # seeds
MIN_ANSWERED = 0.7  # of the questions


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with read_once():
        yield build_pool(tmp_path_factory.mktemp("faults"))


@pytest.mark.timeout(900)
def test_seeds_leave_nothing_and_change_no_token(pool: Pool) -> None:
    counts, num_pool = Counter[str](), len(pool.questions)
    sizes = ["large" if seed % LARGE_EVERY == 0 else size_of(seed) for seed in range(NUM_SEEDS)]
    # Merged roles are only drawn where they are asked for.
    aims = ["merged roles" if seed % MERGED_EVERY == 1 else "" for seed in range(NUM_SEEDS)]
    plans = [
        drawn(seed, num_pool, aim, size) for seed, (aim, size) in enumerate(zip(aims, sizes, strict=True))
    ]
    num_asked = sum(len(plan.asked) for plan in plans)
    for plan in plans:
        result = simulate(plan, pool)
        assert not result.findings, (plan.seed, result.findings)
        counts += result.counts
    assert counts["answered"] > MIN_ANSWERED * num_asked
    assert {plan.aim for plan in plans} == AIMS.keys()
    assert {plan.size for plan in plans} == SIZES.keys()
    assert counts["wrong"] == counts["hung"] == 0
    assert counts["blamed"] <= MAX_BLAMED * num_asked
    # What is to be survived has happened.
    for fault in (
        "kill",
        "strike",
        "machine",
        "freeze",
        "cut",
        "switched",
        "drain",
        "board",
        "front",
        "left",
        "copy",
    ):
        assert counts[fault] > 0, fault
    assert counts["redirects"] > 0
    assert counts["ended from beside"] > 0
    assert counts["encode fallbacks"] > 0
    assert counts["retries"] > counts["redirects"] / 10


# Seeds that have found a fault which smaller tests hold too.
FOUND = [
    ("lost leaders", 265, (2, 5)),
    ("lost leaders", 9389, (0, 1, 2)),
    ("encoders", 14794, (1, 2, 3, 4, 5)),
]


@pytest.mark.parametrize(("aim", "seed", "few"), FOUND)
def test_seeds_that_found_a_fault_find_none(aim: str, seed: int, few: tuple[int, ...], pool: Pool) -> None:
    plan = drawn(seed, len(pool.questions), aim)
    for kept in (plan.faults, [plan.faults[number] for number in few]):
        assert not simulate(replace(plan, faults=tuple(kept)), pool).findings


SMALLER = [
    ("anything", 1888, "small"),
    ("anything", 2040, "small"),
    ("anything", 2573, "small"),
    ("next boards", 21072, "small"),
    ("anything", 24423, "middle"),
    ("next boards", 24885, "middle"),
    ("lost leaders", 30464, "small"),
]


@pytest.mark.parametrize(("aim", "seed", "size"), SMALLER)
def test_smaller_worlds_that_found_a_fault_find_none(aim: str, seed: int, size: str, pool: Pool) -> None:
    """While the board is restarted, a worker leaves, a front accuses another member, and a worker joins.

    A lost worker continues there too: it counts where a request is blamed. Fronts that continue after their
    loss blame no request for it, and tell the next board of no loss. Room for an answer that moves is given
    back where its client left before the room was there.
    """
    assert not simulate(drawn(seed, len(pool.questions), aim, size), pool).findings


def test_a_worker_that_continues_after_its_loss_counts_once(pool: Pool) -> None:
    """So blame that counts the loss of a frozen worker twice is a finding, where the board has ended too."""
    (twice,) = [each for each in MUTANTS if each.name == "counts a loss twice"]
    plan = drawn(21072, len(pool.questions), "next boards", "small")
    frozen, board = (replace(plan.faults[0], lasts_s=12.0), replace(plan.faults[1], other=0.9))
    plan = replace(plan, faults=(frozen, board))
    assert not simulate(plan, pool).findings
    with broken(twice):
        findings = simulate(plan, pool).findings
    assert any("blamed for 1 lost workers" in each for each in findings)


def test_members_end_a_lost_process_beside_them_and_none_that_is_joining(
    pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A frozen worker is ended before it continues. One that registers while the board ends is not lost."""
    result = simulate(replace(_frozen(pool, 0.3), ends_lost=True), pool, is_printed=True)
    assert not result.findings
    assert _ended(capsys.readouterr().out) == ["stage3 e0 it is lost, and another process has ended it"]
    joining = drawn(2573, len(pool.questions), "anything", "small")
    result = simulate(replace(joining, ends_lost=True), pool)
    assert not result.findings
    assert result.counts["ended from beside"] == 0


def test_a_prompt_whose_answer_was_moved_is_freed_when_the_worker_that_had_it_is_lost(pool: Pool) -> None:
    """Its prefill worker never gets the receipts, and the request decodes elsewhere by then."""
    plan, long = drawn(7, len(pool.questions), "anything"), 24
    numbers = [n for n, each in enumerate(pool.questions) if each.question.sampling.max_tokens == long]
    asked = tuple(
        replace(each, number=numbers[n % len(numbers)], at_s=n / 5) for n, each in enumerate(plan.asked[:9])
    )
    handed, muted = Fault(0.0, "strike", lasts_s=6.0, struck_at="HandedOver", struck="nobody"), "prefill"
    mutes = tuple(replace(handed, muted=muted, question=nth) for nth in (1, 2, 3, 4))
    kill = Fault(0.0, "strike", lasts_s=0.6, question=1, struck_at="Move", struck="itself")
    faults = (*mutes, kill, Fault(1.0, "switch", 0.1, 0.001))
    plan = replace(plan, topology="1e1p2d", num_fronts=1, num_media=1, slowness=0.3, num_kv_tokens=4096)
    result = simulate(replace(plan, asked=asked, faults=faults), pool)
    assert not result.findings
    assert result.counts["strike"] == 5
    assert result.counts["answered"] == 9


def _frozen(pool: Pool, target: float, *faults: Fault, lasts_s: float = 12.0) -> FaultPlan:
    """Returns a plan in which one process does nothing for longer than the board waits for it."""
    plan = replace(drawn(7, len(pool.questions), "anything"), topology="1e1p2d", num_fronts=2)
    plan = replace(plan, num_media=1, slowness=0.3, num_kv_tokens=4096)
    return replace(plan, faults=(Fault(0.9, "freeze", target, lasts_s=lasts_s), *faults))


@pytest.fixture(params=["told", "untold"])
def told(request: pytest.FixtureRequest) -> Iterator[None]:
    """A front that continues after its loss hears of it from workers, or not, as one that was cut off."""
    (unheard,) = [each for each in MUTANTS if each.name == "hears of no loss of its own"]
    with broken(unheard) if request.param == "untold" else nullcontext():
        yield


def _ended(printed: str) -> list[str]:
    """Returns which processes have ended, and why, as a trace says."""
    return [line.split(maxsplit=2)[2] for line in printed.splitlines() if line.split()[1] == "end"]


def test_a_member_whose_loss_was_handled_is_not_taken_back_by_the_next_board(
    pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is silent until the board has declared it lost, and calls again while no board is there."""
    for name, target in (("d1", 0.05), ("e0", 0.3), ("p0", 0.5), ("v0", 0.6)):
        result = simulate(_frozen(pool, target, Fault(11.6, "board", other=0.9)), pool, is_printed=True)
        assert not result.findings, (name, result.findings)
        assert result.counts["answered"] == 10
        printed = capsys.readouterr().out
        assert f"'{name}' is lost: silent for 10 s" in printed
        assert f"'{name}' is lost: its loss was handled" in printed


@pytest.mark.usefixtures("told")
def test_a_front_that_continues_after_its_loss_takes_no_worker_with_it(
    pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Workers have ended their links to it, which looks as if all of them were lost."""
    result = simulate(_frozen(pool, 0.95), pool, is_printed=True)
    assert not result.findings
    assert result.counts["answered"] == 10
    assert _ended(capsys.readouterr().out) == ["front2 front2 it was declared lost"]


@pytest.mark.usefixtures("told")
def test_a_front_that_continues_while_the_next_board_regroups_takes_no_worker_with_it(
    pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    """It accuses all workers of a board that has not heard of its own loss yet."""
    for lasts_s in (12.0, 14.0, 18.0):
        result = simulate(
            _frozen(pool, 0.95, Fault(11.2, "board", other=0.9), lasts_s=lasts_s), pool, is_printed=True
        )
        assert not result.findings
        assert result.counts["answered"] == 10
        assert _ended(capsys.readouterr().out) == ["board", "front2 front2 it was declared lost"]


@pytest.mark.usefixtures("told")
def test_a_front_that_the_next_board_has_never_heard_takes_no_worker_with_it(
    pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was silent from before the end of the former board until after the next one had regrouped."""
    plan = replace(_frozen(pool, 0.95, Fault(1.5, "board", other=0.9)), num_fronts=1)
    assert not simulate(plan, pool, is_printed=True).findings
    assert _ended(capsys.readouterr().out) == ["board", "front1 front1 it was declared lost"]


def test_of_a_worker_and_the_one_that_has_its_place_the_later_stays_with_the_next_board(
    pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The earlier one calls first: it was frozen, and its place was given when another worker was killed."""
    faults = Fault(11.5, "kill", 0.3), Fault(14.0, "board", other=0.9)
    for lasts_s in (13.2, 13.6, 15.6):
        result = simulate(_frozen(pool, 0.05, *faults, lasts_s=lasts_s), pool, is_printed=True)
        assert not result.findings
        ended = ["stage2 d0 killed", "board", "stage1 d1 it was declared lost"]
        assert _ended(capsys.readouterr().out) == ended


@pytest.mark.usefixtures("told")
def test_two_that_continue_while_the_next_board_regroups_take_no_worker_with_them(
    pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each member tells the board of both at once: one of them accuses all workers."""
    faults = Fault(1.0, "freeze", 0.5, lasts_s=13.6), Fault(12.4, "board", other=0.9)
    result = simulate(_frozen(pool, 0.95, *faults, lasts_s=15.0), pool, is_printed=True)
    assert not result.findings
    ended = _ended(capsys.readouterr().out)
    assert ended[0] == "board"
    assert {text.split()[1] for text in ended[1:]} == {"p0", "front2"}


def test_a_front_that_a_view_on_its_way_does_not_show_takes_no_worker_with_it(pool: Pool) -> None:
    """Nothing goes wrong here but that messages of a worker's board take longer than those of a new front."""
    for seed in (2, 6, 9):
        plan = drawn(seed, len(pool.questions), "next boards", "small")
        assert not simulate(replace(plan, faults=()), pool).findings


def test_a_world_that_does_not_start_is_a_finding(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(_server: WorkerServer) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(WorkerServer, "start", start)
    (finding,) = simulate(drawn(6, len(pool.questions), size="small"), pool).findings
    assert "it has not started" in finding


def test_a_worker_that_starts_at_the_end_of_a_simulation_has_no_thread(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would go on in the next simulation."""
    begun: list[str] = []
    monkeypatch.setattr(WorkerThread, "_run", lambda thread: begun.append(thread.name))
    assert not simulate(drawn(500_115, len(pool.questions), size="small"), pool).findings
    assert begun == []


def test_a_seed_leaves_no_objects_of_models(pool: Pool) -> None:
    """Its collections would look at those of all seeds before it, and take ever longer."""
    plan, nums = drawn(6, len(pool.questions), size="small"), []
    for _ in range(2):
        assert not simulate(plan, pool).findings
        gc.collect()
        nums.append(sum(isinstance(each, FusedDecoder | nn.Module) for each in gc.get_objects()))
    assert nums[0] == nums[1]


def test_what_a_killed_process_had_not_begun_gives_no_warning_in_the_next_seed(pool: Pool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert not simulate(drawn(21215, len(pool.questions), size="small"), pool).findings
        gc.collect()
    assert not [each.message for each in caught if "never awaited" in str(each.message)]


def test_media_that_were_read_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks draw new media for each round: what all rounds have read would fill the memory."""
    monkeypatch.setattr("tests.faults.pool._MAX_READ", 3)
    reader, again = _SharedReader(), []
    for name in "abcadad":
        reader.once((name,), lambda name=name: again.append(name))
    assert again == list("abcd")
    reader.once(("b",), lambda: again.append("b"))
    assert again == list("abcdb")


def test_two_runs_of_a_seed_are_equal(pool: Pool) -> None:
    """Whatever ran here before, and whatever order sets of tasks have: 8443 once cancelled in that order."""
    for seed, size in ((18, "large"), (23, "large"), (6, "small"), (8443, "small")):
        plan = drawn(seed, len(pool.questions), size=size)
        assert len(plan.faults) > (3 if size == "large" else 1)
        assert simulate(plan, pool).digest == simulate(plan, pool, run=2).digest


def test_seeds_that_processes_share_come_in_order_and_are_the_same(pool: Pool) -> None:
    seeds = (3, 4, 6)
    arguments = Namespace(processes=2, only=None, aim="", size="small", trace=False, twice=True)
    shared = list(results(arguments, pool, seeds))
    assert [each.plan.seed for each in shared] == list(seeds)
    alone = [simulate(drawn(seed, len(pool.questions), size="small"), pool) for seed in seeds]
    assert [each.digest for each in shared] == [each.digest for each in alone]
    assert [each.counts["equal runs"] for each in shared] == [1, 1, 1]


def test_clocks_that_are_set_by_hours_change_no_answer(pool: Pool) -> None:
    """Both ways, on each machine, while requests are answered: nothing is refused or retried."""
    for seed, ways in ((5, (0.0, 0.9)), (8, (0.9, 0.0))):
        plan = drawn(seed, len(pool.questions), "anything")
        plan = replace(plan, topology="2e2p2d", num_fronts=2)
        times = [(place, way) for place in (0.0, 0.4, 0.8) for way in ways]
        clocks = [Fault(0.2 + number / 4, "clock", *each) for number, each in enumerate(times)]
        result = simulate(replace(plan, faults=tuple(clocks)), pool)
        assert not result.findings
        assert result.counts["clock"] == 6
        assert result.counts["answered"] == len(plan.asked)
        assert result.counts["retries"] == 0


def test_a_poisoned_request_ends_after_few_processes(pool: Pool) -> None:
    plan = drawn(3, len(pool.questions))
    for place in (0.0, 0.3, 0.6):
        poison = Fault(0.5, "poison", other=place, question=2)
        result = simulate(replace(plan, topology="2e2p2d", faults=(poison,)), pool)
        assert not result.findings
        assert result.counts["poisoned workers"] <= 4


def test_a_request_whose_video_is_poison_ends_and_another_that_reads_beside_it_is_answered(
    pool: Pool,
) -> None:
    """The only media worker is lost while it reads for both, until the suspects read one after the other."""
    asked = Asked(0.1, 12, 0.0), Asked(0.1, 1, 0.0)
    plan = replace(drawn(14, len(pool.questions), "poison", "small"), topology="1ep1p2d", asked=asked)
    plan = replace(plan, num_fronts=1, num_media=1, slowness=0.3, faults=(Fault(0.0, "poison", other=0.9),))
    result = simulate(plan, pool)
    assert not result.findings
    assert (result.counts["answered"], result.counts["PoisonedRequestError"]) == (1, 1)
    assert result.counts["poisoned workers"] <= 3


def test_a_failing_plan_is_reduced_to_the_faults_that_it_needs() -> None:
    plan = replace(drawn(0, 40), faults=tuple(Fault(float(number), "kill") for number in range(6)))
    smallest = needed(plan, lambda each: {fault.at_s for fault in each.faults} >= {1.0, 4.0})
    assert [fault.at_s for fault in smallest.faults] == [1.0, 4.0]


def test_runs_are_counted_together_and_go_on_with_new_seeds(tmp_path: Path) -> None:
    counted = tmp_path / "faults.json"
    for seed, found in ((7, []), (8, ["left behind"])):
        totals = Totals.read(counted)
        totals.add(Result(drawn(seed, 40), found, Counter(answered=9, kill=1), "", 1800.0))
        totals.write(counted)
    totals = Totals.read(counted)
    assert (totals.num_seeds, totals.next_seed, totals.failed) == (2, 9, [8])
    rows = dict(totals.rows)
    assert rows["answers with the undisturbed tokens"] == "18"
    assert rows["simulated hours"] == "1.0"


def test_a_broken_line_is_found_and_whole_again(pool: Pool) -> None:
    (counts,) = [each for each in MUTANTS if each.name == "keeps counts of what ended"]
    assert verdict(counts, pool, 0, 3).startswith("found by seed")
    for mutant in MUTANTS:  # each names one line that is there
        with broken(mutant):
            pass
    assert not simulate(drawn(0, len(pool.questions)), pool).findings
    with pytest.raises(ValueError, match="name one line"):
        replace(counts, old="return").source((ROOT / counts.file).read_text())
