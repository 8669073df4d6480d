"""Runs an evaluation: each video is asked about with every setting, by a model of this process.

    video | keep all: one question, the others at once | keep a quarter: one, the others | ... | next video
          | cold request | cold request | ...                                       first few videos

The first question encodes the video, and the encoder cache keeps it for the others and for later settings.
Everything found out goes to the log at once, and what the log already contains is not repeated.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from epd import console
from epd.engine_config import EngineConfig
from epd.eval.items import FULL, EvalCase, EvalItem, EvalSetting, EvalVideo, FactCounts
from epd.eval.plan import EvalPlan, Todo, todos
from epd.eval.verdicts import TTFTSample, Verdict, VerdictLog
from epd.reduction import ReductionPolicy
from epd.serve_app.cli.own_model import OwnConversation, open_model, placement_of
from epd.serve_app.local.own_service import OwnService
from epd.types import Answer
from epd.video.demo_video import write_demo_video

__all__ = ["placement_of", "run_evaluation"]

_HEIGHT, _WIDTH, _FPS = 360, 640, 2
_IN_FLIGHT = 32  # questions about a video that are asked at once


def run_evaluation(model: Path | None, config: EngineConfig, plan: EvalPlan, log: VerdictLog) -> None:
    """Loads a model and adds the missing results to the log.

    Raises EPDError, such as MediaError for a video that cannot be read. What was found out before is in the
    log.
    """
    with open_model(model, config) as service, console.progress_bar("settings x videos") as show:
        _Evaluation(service, plan, log).run(show)


class _Evaluation:
    """Asks a model of this process."""

    def __init__(self, service: OwnService, plan: EvalPlan, log: VerdictLog) -> None:
        self._service = service
        self._plan = plan
        self._log = log

    def run(self, progress: Callable[[int, int], None]) -> None:
        """Adds the missing results to the log. progress: called with settings done, of all."""
        left = list(todos(self._plan, self._log))
        num_done, num_all = 0, sum(map(len, left))
        is_warm = False
        for todo in left:
            with self._video_file(todo.case.video) as source:
                for setting in todo.unjudged:
                    self._log.append(self._judge(todo.case, source, setting))
                    progress(num_done := num_done + 1, num_all)
                if todo.untimed and not is_warm:
                    self._time_cold(todo, source, FULL)
                    is_warm = True
                for setting in todo.untimed:
                    self._log.append([self._time_cold(todo, source, setting)])
                    progress(num_done := num_done + 1, num_all)

    @contextmanager
    def _video_file(self, video: EvalVideo) -> Iterator[str]:
        """Locates the video; one of the shapes world is drawn, encoded, and removed afterwards."""
        if isinstance(video.source, str):
            yield video.source
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "video.mp4"
            write_demo_video(path, video.source, fps=_FPS, height=_HEIGHT, width=_WIDTH)
            yield str(path)

    @cached_property
    def _kv_bytes_per_token(self) -> float:
        """Returns what a token takes in the KV cache, which the worker has told with its first answer."""
        memory = next(worker.memory for worker in self._service.status.workers if worker.memory)
        return memory.kv_bytes / memory.num_kv_tokens

    def _judge(self, case: EvalCase, source: str, setting: EvalSetting) -> list[Verdict]:
        """Asks all questions about one video with one setting: the first alone, which brings the video."""

        def verdict(item: EvalItem) -> Verdict:
            conversation = self._conversation(case, source, setting, max_tokens=self._plan.max_tokens)
            conversation.remember(item.earlier)
            return self._verdict(case, setting, item, conversation.ask(item.prompt))

        first, *others = case.video.items
        judged = [verdict(first)]
        with ThreadPoolExecutor(_IN_FLIGHT) as threads:
            return [*judged, *threads.map(verdict, others)]

    def _verdict(self, case: EvalCase, setting: EvalSetting, item: EvalItem, answer: Answer) -> Verdict:
        facts = item.count_facts(answer.text) if item.count_facts else FactCounts()
        return Verdict(
            method=setting.method,
            retention=setting.retention,
            num_frames=case.num_frames,
            video=case.video.name,
            item_id=item.item_id,
            kind=item.kind,
            truth=item.answer,
            answer=answer.text,
            is_right=item.is_answered_by(answer.text),
            visual_tokens=answer.usage.visual_tokens,
            kv_bytes=round(answer.usage.visual_tokens * self._kv_bytes_per_token),
            duration_group=item.duration_group,
            facts_found=facts.found,
            facts_missed=facts.missed,
            facts_invented=facts.invented,
        )

    def _time_cold(self, todo: Todo, source: str, setting: EvalSetting) -> TTFTSample:
        """Times a user's first request: decode, encode, prefill, first token. No cache has the video."""
        unseen = {"max_tokens": 1, "cache_salt": secrets.token_hex(8)}
        answer = self._conversation(todo.case, source, setting, **unseen).ask(todo.case.video.items[0].prompt)
        return TTFTSample(
            method=setting.method,
            retention=setting.retention,
            num_frames=todo.case.num_frames,
            video=todo.case.video.name,
            ttft_s=answer.ttft_s,
            prefill_s=answer.timings.prefill_s,
        )

    def _conversation(
        self, case: EvalCase, source: str, setting: EvalSetting, **options: Any
    ) -> OwnConversation:
        policy = ReductionPolicy() if setting == FULL else ReductionPolicy(setting.method, setting.retention)
        kept: dict[str, Any] = {"retention": policy.retention, "reduction": policy.method}
        return OwnConversation(self._service, [source], frames=case.num_frames, **kept, **options)
