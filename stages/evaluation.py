"""Runs an evaluation: each video is decoded and encoded once, then prefilled and asked with every setting.

    video | decode, encode | keep all: prefill, ask all | keep a quarter: prefill, ask all | ... | next video
          |                | cold request | cold request | ...                            first few videos

Questions about one video are answered side by side. Everything found out goes to the log at once, and what
the log already contains is not repeated.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from epd.chat import dialogue
from epd.eval.items import FULL, EvalCase, EvalSetting, EvalVideo
from epd.eval.plan import EvalPlan, Todo, todos
from epd.eval.verdicts import TTFTSample, Verdict, VerdictLog
from epd.reduction import ReductionPolicy
from epd.shapes.stories import FactCounts
from epd.stages.colocated import ColocatedPipeline, EncodedMedia, MediaContext
from epd.types import Answer
from epd.video.demo_video import PLAIN, Filming, write_demo_video

DEMO_HEIGHT, DEMO_WIDTH, DEMO_FPS = 360, 640, 2


def policy_of(setting: EvalSetting) -> ReductionPolicy:
    """Returns the policy. Raises RequestError for an unknown method or an invalid retention."""
    return ReductionPolicy() if setting == FULL else ReductionPolicy(setting.method, setting.retention)


def evaluate(
    pipeline: ColocatedPipeline,
    plan: EvalPlan,
    log: VerdictLog,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
    filming: Filming = PLAIN,
) -> None:
    """Adds the missing results to the log.

    progress: called with settings done, of all.
    filming: how videos of the shapes world are filmed.
    Raises MediaError for a video that cannot be read; what was found out before is in the log.
    """
    left = list(todos(plan, log))
    num_done, num_all = 0, sum(map(len, left))
    is_warm = False
    for todo in left:
        with _video_file(todo.case.video, filming) as source:
            for _ in _judge(pipeline, plan, todo, source, log):
                progress(num_done := num_done + 1, num_all)
            if todo.untimed and not is_warm:
                _time_cold(pipeline, todo.case, source, FULL)
                is_warm = True
            for setting in todo.untimed:
                log.append([_time_cold(pipeline, todo.case, source, setting)])
                progress(num_done := num_done + 1, num_all)


@contextmanager
def _video_file(video: EvalVideo, filming: Filming) -> Iterator[str]:
    """Locates the video; one of the shapes world is drawn, encoded, and removed afterwards."""
    if isinstance(video.source, str):
        yield video.source
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "video.mp4"
        write_demo_video(
            path, video.source, fps=DEMO_FPS, height=DEMO_HEIGHT, width=DEMO_WIDTH, filming=filming
        )
        yield str(path)


def _judge(
    pipeline: ColocatedPipeline, plan: EvalPlan, todo: Todo, source: str, log: VerdictLog
) -> Iterator[None]:
    """Asks all questions with one setting after the other; yields after each."""
    if not todo.unjudged:
        return
    encoded = pipeline.encode_media([source], num_frames=todo.case.num_frames)
    for setting in todo.unjudged:
        log.append(_ask(pipeline, plan, todo.case, encoded, setting))
        yield


def _ask(
    pipeline: ColocatedPipeline, plan: EvalPlan, case: EvalCase, encoded: EncodedMedia, setting: EvalSetting
) -> list[Verdict]:
    """Asks all questions about one video with one setting; its blocks are released afterwards."""
    context = pipeline.prefill_encoded(encoded, reduction=policy_of(setting))
    asked = [dialogue(context.kinds, item.prompt, item.earlier) for item in case.video.items]
    answers = pipeline.answer_all(context, asked, max_tokens=plan.max_tokens)
    return _verdicts(case, setting, answers, _kv_bytes(pipeline, context))


def _verdicts(
    case: EvalCase, setting: EvalSetting, answers: Sequence[Answer], kv_bytes: int
) -> list[Verdict]:
    verdicts = []
    for item, answer in zip(case.video.items, answers, strict=True):
        facts = item.count_facts(answer.text) if item.count_facts else FactCounts()
        verdicts.append(
            Verdict(
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
                kv_bytes=kv_bytes,
                duration_group=item.duration_group,
                facts_found=facts.found,
                facts_missed=facts.missed,
                facts_invented=facts.invented,
            )
        )
    return verdicts


def _kv_bytes(pipeline: ColocatedPipeline, context: MediaContext) -> int:
    """Counts the bytes of the context's keys and values, in whole blocks."""
    if context.request_id is None:
        return 0
    engine = pipeline.engine
    return sum(
        len(engine.kv.block_table(context.request_id, group)) * pool.block_size * pool.layout.bytes_per_token
        for group, pool in enumerate(engine.pools.groups)
    )


def _time_cold(pipeline: ColocatedPipeline, case: EvalCase, source: str, setting: EvalSetting) -> TTFTSample:
    """Times a user's first request: decode, encode, prefill, first token."""
    context = pipeline.prefill_media([source], num_frames=case.num_frames, reduction=policy_of(setting))
    answer = pipeline.answer(context, case.video.items[0].prompt, max_tokens=1)
    return TTFTSample(
        method=setting.method,
        retention=setting.retention,
        num_frames=case.num_frames,
        video=case.video.name,
        ttft_s=context.timings.total_s + answer.ttft_s,
        prefill_s=context.timings.prefill_s + answer.timings.prefill_s,
    )
