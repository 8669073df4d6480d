"""Breaks one line of the recovery at a time, and says which seed finds it.

python -m tests.faults.mutants --seeds 20             all of them
python -m tests.faults.mutants --only placement.py    those whose file or name has this text
python -m tests.faults.mutants --only accuse --beside "hears of no loss"    where another line is broken too
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch

from tests.faults.__main__ import Totals, write_broken
from tests.faults.plan import SIZES, drawn
from tests.faults.pool import Pool, build_pool, read_once
from tests.faults.simulation import simulate

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One line of a file that is replaced. name: what the code does then. aim: of the seeds that find it."""

    name: str
    aim: str
    file: str
    old: str
    new: str = "pass"

    @property
    def module(self) -> str:
        return "epd." + self.file.removeprefix("epd/").removesuffix(".py").replace("/", ".")

    def source(self, text: str) -> str:
        """Returns the broken text. Raises ValueError unless the line is there once."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {text.count(self.old)} times {self.old!r}; name one line")
        return text.replace(self.old, self.new)


_READER = "serve_app/orchestration/event_reader.py"
_CALLS = "serve_app/orchestration/worker_calls.py"
_SWITCH = "serve_app/orchestration/role_switch.py"
_HANDOVER = "epd/transfer/handover.py"
_PEERS = "serve_app/worker/peer_losses.py"
_BOARD = "serve_app/network/board.py"
MUTANTS = (
    Mutant(
        "never redirects", "hand-overs",
        _READER, "return await self._moves.redirect(attempt)", "return False",
    ),
    Mutant(
        "recovers no attempt", "hand-overs",
        _READER, "tasks.spawn(self._recover(attempt, name, replies, outcome))",
    ),
    Mutant("leaves prompts that are over", "hand-overs", _READER, "if over:", "if False:"),
    Mutant(
        "leaves prompts whose answers were moved", "late receipts",
        _READER, "return attempt.is_handed_over and lost not in decodes and worker not in decodes",
        "return False",
    ),
    Mutant(
        "redirects what looks for room already", "second losses",
        _READER,
        "if attempt.id in self._shared.requests.redirecting:",
        "if False:",
    ),
    Mutant("saves what has no token", "unheard tokens", _READER, " and attempt.answer.has_begun", ""),
    Mutant("saves what decode lost", "hand-overs", _READER, "attempt.id not in lost and", "True and"),
    Mutant(
        "keeps groups of a lost encoder", "encoders",
        _READER, "tasks.spawn(self._shared.dispatcher.lost(name))",
    ),
    Mutant("ignores failed hand-overs", "copies", _READER, "attempt.end(Outcome.LOST)"),
    Mutant(
        "counts a loss twice", "lone losses",
        "serve_app/orchestration/loss_counter.py",
        'self._record(f"{worker}/{incarnation}", there)',
        '[self._record(f"{worker}/{incarnation}/{time}", there) for time in "12"]',
    ),
    Mutant(
        "ignores claims", "poison",
        "serve_app/orchestration/isolation.py",
        "return [each for each in free if self._claimant(each) in (None, attempt)]",
        "return list(workers)",
    ),
    Mutant(
        "keeps counts of what ended", "anything",
        "serve_app/orchestration/requests.py",
        "attempt.placement.close()",
        "attempt.placement.end_prefill()",
    ),
    Mutant(
        "counts a move after the end", "leaving clients",
        "epd/control/placement.py",
        "self.decode_worker, self._is_decoding = worker, not self._is_closed",
        "self.decode_worker, self._is_decoding = worker, True",
    ),
    Mutant(
        "sends what names a lost worker",
        "second losses",
        _CALLS,
        "if is_taken and self.seen(attempt) != seen:",
        "if False:",
    ),
    Mutant(
        "leaves a paused answer", "little room",
        _CALLS,
        'await self._calls.ask(attempt, "decode", former, Resume(attempt.id))',
    ),
    Mutant(
        "aborts an answer where it has moved", "unheard moves",
        _CALLS, "if is_taken or attempt.decode_worker == room.worker:", "if is_taken:",
    ),
    Mutant(
        "redirects what is redirected already", "little room",
        _CALLS, "if attempt.id in requests.redirecting:", "if requests.redirecting.pop(attempt.id, None):",
    ),
    Mutant("forgets where an answer is moved to", "moved answers", _READER, "attempt.moving_to,", ""),
    Mutant(
        "leaves receipts of a lost receiver", "moves",
        _HANDOVER, "self._receipts += self._connector.poll()",
    ),
    Mutant("awaits receipts of a lost receiver", "hand-overs", _HANDOVER, "sending.unanswered.clear()"),
    Mutant(
        "takes a lost peer for a live one", "board",
        _PEERS, "peer.incarnation <= self", "peer.incarnation < self",
    ),
    Mutant("drops a peer's next incarnation", "board", _PEERS, "peer.incarnation - 1)", "peer.incarnation)"),
    Mutant(
        "keeps prompts of a lost sender", "hand-overs",
        "serve_app/worker/worker_roles.py",
        "return tuple(lost for sender in senders for lost in self.stage.fail_sender(sender))",
        "return ()",
    ),
    Mutant(
        "keeps what a lost front had", "anything",
        "serve_app/worker/worker_core.py",
        "role.drop_owner(message.owner, self._reports)",
    ),
    Mutant(
        "reports no failed hand-over", "copies",
        "serve_app/worker/prefill_role.py",
        "reports.events.append(RequestFailed(request_id, error, is_final=False))",
    ),
    Mutant(
        "tells nobody what failed at a closed stage", "closed stages",
        "serve_app/worker/prefill_role.py",
        'self.drop_peer(worker) if "decode" in stages else ()',
        'self.drop_peer(worker)[:0] if "decode" in stages else ()',
    ),
    Mutant(
        "takes a member back", "late members",
        _BOARD,
        "return self._has_former and (seen >= 0 or member.is_ready) and time.monotonic() > self._regrouped_s",
        "return False",
    ),
    Mutant(
        "believes a board that takes back whom it lost", "late members",
        "serve_app/network/membership.py", " if not self._lost.get(epoch)", "",
    ),
    Mutant(
        "gives an incarnation again", "board",
        _BOARD,
        "return max(following, self._version + 1) if self._has_former else following",
        "return following",
    ),
    Mutant(
        "hears of no loss of its own", "next boards",
        "serve_app/network/remote_fleet.py",
        "if isinstance(value, FrontLost):\n            self.is_closed = True",
        "if isinstance(value, FrontLost):\n            return",
    ),
    Mutant(
        "believes who accuses first", "next boards",
        _BOARD, "sorted(accusations, key=lambda each: -numbers[each[0]])", "accusations",
    ),
    Mutant(
        "believes an accuser that it does not know", "board",
        _BOARD, "not accuser or accuser in self._entries", "accuser not in self._ended",
    ),
    Mutant(
        "drops a front that is newer than a view", "anything",
        "serve_app/network/members.py", "if since > view.version", "if False",
    ),
    Mutant(
        "accuses one after the other", "next boards",
        "serve_app/network/membership.py",
        "await asyncio.gather(*(self.accuse(epoch, reason) for epoch in again))",
        "[await self.accuse(epoch, reason) for epoch in again]",
    ),
    Mutant("waits for no other accusers", "next boards", _BOARD, "self._told_s - time.monotonic()", "0.0"),
    Mutant("keeps a worker whose place another one has", "next boards", _BOARD, "self._lose_former(info)"),
    Mutant(
        "leaves a place vacant", "sole workers",
        "serve_app/orchestration/replacement.py",
        "self._vacated = vacated",
        "self._vacated = frozenset()",
    ),
    Mutant("tells nobody of closed stages", "switches", _SWITCH, "await self._report_closed()"),
    Mutant(
        "leaves an abandoned switch", "lost leaders",
        _SWITCH, "if info.is_alive and is_abandoned:", "if False:",
    ),
)  # fmt: skip


def _functions(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    """Yields the functions of a module and its classes, by qualified name."""
    for const in code.co_consts:
        if isinstance(const, CodeType) and "<" not in const.co_qualname:
            yield const.co_qualname, const
            yield from _functions(const)


def _function(module: Any, name: str) -> FunctionType | None:
    """Returns the function that is called by a name; None for a class."""
    for part in name.split("."):
        module = inspect.getattr_static(module, part)
    found: Any = module.fget if isinstance(module, property) else module
    found = inspect.unwrap(getattr(found, "__func__", found))
    return found if isinstance(found, FunctionType) else None


@contextmanager
def broken(mutant: Mutant) -> Iterator[None]:
    """Lets the functions of a mutant's module do what the broken text says: no file is changed."""
    path, module = ROOT / mutant.file, importlib.import_module(mutant.module)
    text = path.read_text()
    whole = dict(_functions(compile(text, str(path), "exec", dont_inherit=True)))
    mutated = dict(_functions(compile(mutant.source(text), str(path), "exec", dont_inherit=True)))
    changed = {name: code for name, code in mutated.items() if code != whole[name]}
    functions = {name: found for name in changed if (found := _function(module, name)) is not None}
    codes = {name: function.__code__ for name, function in functions.items()}
    assert codes, f"no function of {mutant.file} has changed"
    try:
        _set(functions, changed)
        yield
    finally:
        _set(functions, codes)


def _set(functions: Mapping[str, FunctionType], codes: Mapping[str, CodeType]) -> None:
    for name, function in functions.items():
        function.__code__ = codes[name]


def verdict(mutant: Mutant, pool: Pool, start: int, num_seeds: int, size: str = "large") -> str:
    """Runs seeds until one finds a mutant. Returns how it was found."""
    totals = Totals()
    with broken(mutant):
        for seed in range(start, start + num_seeds):
            result = simulate(drawn(seed, len(pool.questions), mutant.aim, size), pool)
            totals.add(result)
            if result.findings:
                return f"found by seed {seed} | {result.findings[0].splitlines()[0][:90]}"
    lacking = ", ".join(totals.lacking)
    return f"found by {num_seeds} seeds | {lacking}" if lacking else f"survived {num_seeds} seeds | "


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.mutants", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--seeds", type=int, default=20, help="how many seeds each may take")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--size", choices=SIZES, default="large", help="of all worlds")
    parser.add_argument("--only", default="", help="text of the names or files to run")
    parser.add_argument("--beside", help="text of the names of lines that are always broken")
    parser.add_argument("--results", type=Path, help="page that gets the table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [each for each in MUTANTS if arguments.only in f"{each.file} {each.name}"]
    rows = ["| the recovery ... | file | aim | verdict | finding |", "|---|---|---|---|---|"]
    beside = [each for each in MUTANTS if arguments.beside and arguments.beside in each.name]
    with tempfile.TemporaryDirectory(prefix="epd-mutants-") as folder, read_once(), ExitStack() as stack:
        pool = build_pool(Path(folder))
        for mutant in beside:
            stack.enter_context(broken(mutant))
        for mutant in chosen:
            said = verdict(mutant, pool, arguments.start, arguments.seeds, arguments.size)
            rows.append(f"| {mutant.name} | {Path(mutant.file).name} | {mutant.aim} | {said} |")
            print(rows[-1], flush=True)
    if arguments.results is not None:
        command = f"python -m tests.faults.mutants --start {arguments.start} --seeds {arguments.seeds}"
        command += f" --size {arguments.size}"
        write_broken(arguments.results, "\n".join([*rows, f"\nRepeat it with `{command}`."]))
    return 1 if any("| survived" in row for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
