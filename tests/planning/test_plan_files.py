"""From `epd plan --out plan.yaml` to the arguments of `epd serve --plan plan.yaml`; nothing is started.

Modules: `epd/planning/files.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from epd.errors import RequestError
from epd.planning.files import PlanFile, load_plan
from epd.profiles.analytic import analytic_profile
from epd.profiles.files import dump_profile
from epd.reduction import ReductionPolicy
from epd.serve_app.app_args import AppArgs
from epd.serve_app.cli import serve as cli_serve
from epd.serve_app.cli.program import app
from epd.topology import role_letters
from tests.planning.layouts import mixes


@dataclass
class Served:
    """What `epd serve` would have started."""

    args: list[AppArgs] = field(default_factory=list)

    def with_plan(self, path: Path, *options: str) -> AppArgs:
        assert app(["serve", "--plan", str(path), *options], standalone_mode=False) in (None, 0)
        return self.args[-1]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    found = Served()

    def once(
        serving: Callable[[threading.Event], AbstractContextManager[str]], *_: Any, **_more: Any
    ) -> None:
        with serving(threading.Event()):
            pass

    @contextmanager
    def note(args: AppArgs, *_others: Any) -> Iterator[str]:
        found.args.append(args)
        yield "http://nowhere"

    monkeypatch.setattr(cli_serve, "_served_on_ray", note)
    monkeypatch.setattr(cli_serve, "serve_until_signal", once)
    return found


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan for the embedded model's name, by the costs of another, on two devices."""
    folder = tmp_path_factory.mktemp("plan")
    options = {"kv_cache_dtype": "int8_values", "quantization": "fp8"}
    text = dump_profile(analytic_profile("a100-80gb", "qwen2.5-vl-7b", **options))
    profile = folder / "profile.json"
    profile.write_text(text.replace('"model": "qwen2.5-vl-7b"', '"model": "shapes-vl-2"'))
    path = folder / "plan.yaml"
    options = ["--gpus", "2", "--workload", "images", "--slo-ttft-s", "2.5", "--slo-tpot-s", "0.05"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("epd.planning.asked.MOST_REQUESTS", 30)  # rather than 250
        app(
            [
                *("plan", *options, "--cpu-threads", "6", "--video-gpus", "1"),
                *("--profile", str(profile), "--out", str(path)),
            ],
            standalone_mode=False,
        )
    return path


def edited(path: Path, tmp_path: Path, **changes: Any) -> Path:
    """A copy with other fields; those of `settings` by name."""
    record = yaml.safe_load(path.read_text())
    record["settings"] |= changes.pop("settings", {})
    copy = tmp_path / "edited.yaml"
    copy.write_text(yaml.safe_dump(record | changes))
    return copy


def test_the_app_gets_what_the_plan_decides(plan_path: Path, served: Served) -> None:
    record = yaml.safe_load(plan_path.read_text())
    args = served.with_plan(plan_path)
    assert {name: getattr(args, name) for name in record["settings"]} == record["settings"]
    assert args.topology == record["topology"]
    assert args.slo_ttft_s == 2.5
    assert (args.num_video_threads, args.video_device) == (6, "cuda")
    assert (args.dtype, args.kv_cache_dtype, args.quantization) == ("bfloat16", "int8_values", "fp8")
    assert (args.num_kv_tokens or 0) > 100_000


def test_every_decision_reaches_its_worker(plan_path: Path, served: Served, tmp_path: Path) -> None:
    settings = {"max_num_seqs": 3, "decode_max_num_seqs": 7, "max_chunk_tokens": 33, "num_threads": 4}
    path = edited(plan_path, tmp_path, topology="2e1p1d", settings={**settings, "sharding": "request"})
    args = served.with_plan(path)
    assert (args.scheduler(is_decode=False).max_num_seqs, args.scheduler(is_decode=True).max_num_seqs) == (
        3,
        7,
    )
    assert args.scheduler(is_decode=True).max_chunk_tokens == 33
    assert args.threads_per_worker == 4
    assert args.sharding == "request"
    assert sorted(args.workers) == ["d0", "e0", "e1", "p0", "v0"]


def test_every_mix_of_four_devices_is_served(plan_path: Path, served: Served, tmp_path: Path) -> None:
    """The text that a plan writes is one that the application reads: so many workers, of these roles."""
    for topology in mixes(4):
        args = AppArgs(topology=str(topology)).resolved()
        roles = sorted(role_letters(each) for each in args.workers.values() if "video" not in each)
        assert roles == sorted(g.letters for g in topology.groups for _ in range(g.num_workers))
    path = edited(plan_path, tmp_path, topology="1ed3ep", settings={"sharding": "local"})
    args = served.with_plan(path)
    assert sorted(args.workers) == ["ed0", "ep0", "ep1", "ep2", "v0"]
    assert args.sharding == "local"


def test_options_that_are_given_win(plan_path: Path, served: Served) -> None:
    options = ("--topology", "1e1p1d", "--slo-ttft-s", "9", "--num-kv-tokens", "4096", "--dtype", "float32")
    others = ("--num-video-threads", "2", "--kv-cache-dtype", "auto")
    args = served.with_plan(plan_path, *options, *others)
    assert (args.topology, args.slo_ttft_s, args.num_kv_tokens) == ("1e1p1d", 9.0, 4096)
    assert (args.dtype, args.kv_cache_dtype, args.num_video_threads) == ("float32", "auto", 2)


def test_a_default_that_is_given_wins_too(plan_path: Path, served: Served, tmp_path: Path) -> None:
    path = edited(plan_path, tmp_path, topology="3e1pd")
    assert served.with_plan(path).topology == "3e1pd"
    assert served.with_plan(path, "--topology", "1e1p1d").topology == "1e1p1d"


def test_a_plan_that_drops_visual_tokens_is_served_so(
    plan_path: Path, served: Served, tmp_path: Path
) -> None:
    path = edited(plan_path, tmp_path, settings={"retention": 0.25})
    assert served.with_plan(path).reduction_policy == ReductionPolicy(retention=0.25)
    args = served.with_plan(path, "--reduction", "evs", "--retention-min", "0.1")
    assert args.reduction_policy == ReductionPolicy("evs", 0.25)
    assert args.load_retention is not None
    assert served.with_plan(path, "--retention", "1").retention == 1.0
    assert served.with_plan(path, "--retention", "0.5").retention == 0.5


def test_without_a_plan_nothing_changes(served: Served) -> None:
    app(["serve"], standalone_mode=False)
    assert served.args[-1] == AppArgs(allowed_hosts=served.args[-1].allowed_hosts).resolved()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"extra": 1}, "extra: Extra inputs"),
        ({"settings": {"max_seqs": 1}}, "settings.max_seqs: Extra inputs"),
        ({"settings": {"max_num_seqs": 0}}, "settings.max_num_seqs: Input should be greater"),
        ({"format": "epd plan, version 9"}, "format: Input should be"),
        ({"topology": "2e1p"}, "no worker does decode"),
        ({"model": "qwen2.5-vl-7b"}, "the plan is for 'qwen2.5-vl-7b', the model to serve is 'shapes-vl-2'"),
        ({"settings": {"retention": 0.01}}, "--retention: Input should be greater than or equal to 0.05"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_usage(
    plan_path: Path,
    served: Served,
    tmp_path: Path,
    changes: dict[str, Any],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = edited(plan_path, tmp_path, **changes)
    assert app(["serve", "--plan", str(path)], standalone_mode=False) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert served.args == []


@pytest.mark.parametrize(("text", "words"), [("a: [", "is no YAML"), ("- 1", "Input should be a valid")])
def test_what_is_no_plan_is_told(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(RequestError, match=words):
        load_plan(path)
    with pytest.raises(RequestError, match="cannot be read"):
        load_plan(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("planned", "served_name", "is_same"),
    [
        ("qwen2.5-vl-7b", "Qwen2.5-VL-7B-Instruct", True),
        ("minicpm-v-2.6", "MiniCPM-V-2_6", True),
        ("qwen2.5-vl-7b", "Qwen2.5-VL-72B-Instruct", False),
        ("qwen3-vl-4b", "Qwen2.5-VL-4B", False),
    ],
)
def test_names_of_one_model(plan_path: Path, planned: str, served_name: str, is_same: bool) -> None:
    plan: PlanFile = load_plan(plan_path).model_copy(update={"model": planned})
    if is_same:
        plan.check_model(served_name)
    else:
        with pytest.raises(RequestError, match="--model-name"):
            plan.check_model(served_name)
