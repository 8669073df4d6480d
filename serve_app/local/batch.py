"""Answers `epd batch` in this process, without Ray. Bodies of lines pass the checks of the HTTP app."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from pydantic import ValidationError

from epd import video
from epd.batch.lines import BatchLine
from epd.batch.media_names import local_path
from epd.batch.tasks import Answered, BackendCounts, Failed, MediaTask, Outcome
from epd.chat import ChatMessage
from epd.control.request_budget import RequestLimits
from epd.engine_config import DEFAULT_ENGINE, EngineConfig
from epd.errors import EPDError, InternalError, RequestError
from epd.reduction import KEEP_ALL
from epd.serve_app.http.answers.responses import CompletionBuilder
from epd.serve_app.http.requests.answer_format import answer_format, no_turns, offers_tools
from epd.serve_app.http.requests.chat_request import ChatRequest
from epd.serve_app.http.requests.request_cost import budget_of
from epd.serve_app.http.requests.request_parsing import (
    check_supported,
    conversation,
    describe,
    heard_part,
    model_named,
    pixel_limits,
    reduction_policy,
    sampling_params,
    video_sampling,
    visual_budget,
)
from epd.serve_app.observability.record import RequestRecord
from epd.serve_app.service import AnswerEnd, MediaReference, ModelCard, TokenDelta
from epd.serve_app.token_text import TokenTexts
from epd.stages.batch.batch import BatchPipeline
from epd.stages.batch.jobs import BatchAnswer, BatchJob, TextRequest
from epd.stages.grammar.checker import GrammarChecker
from epd.stages.loading.weights import OnBytes
from epd.transfer.bounded_queue import BoundedQueue
from epd.types import StageTimings

_MAX_OUTCOMES = 1024
_TICK_S = 0.1
_LIMITS = RequestLimits(max_media=1024)
_SEED_BYTES = 4


@dataclass(frozen=True, slots=True)
class _Asked:
    """A line in flight, and its checked body. grammar: that its answer follows, empty for any answer."""

    line: BatchLine
    chat: ChatRequest
    messages: tuple[ChatMessage, ...]
    references: tuple[MediaReference, ...]
    record: RequestRecord
    grammar: str = ""


@dataclass(frozen=True, slots=True)
class _End:
    """Marks the end of the work. error: the error that ended it early."""

    error: BaseException | None


class LocalBackend:
    """Implements `Backend` with a pipeline of this process."""

    def __init__(self, pipeline: BatchPipeline, card: ModelCard) -> None:
        self._pipeline = pipeline
        self._card = card

    @classmethod
    def load(
        cls, model: Path, config: EngineConfig = DEFAULT_ENGINE, *, on_progress: OnBytes | None = None
    ) -> LocalBackend:
        """Loads a model. Options as in `BatchPipeline.load`. Raises EPDError."""
        pipeline = BatchPipeline.load(model, config, on_progress=on_progress)
        return cls(pipeline, ModelCard(model.name, int(time.time())))

    @contextmanager
    def run(self, tasks: Iterator[MediaTask]) -> Iterator[Iterator[Outcome | None]]:
        with tempfile.TemporaryDirectory(prefix="epd-batch-") as folder:
            work = _Work(self._pipeline, self._card, Path(folder), tasks)
            with self._pipeline.running(work.jobs(), work):
                try:
                    yield work.outcomes()
                finally:
                    work.stop()

    def busy_s(self) -> Mapping[str, float]:
        return self._pipeline.busy_s()

    def counts(self) -> BackendCounts:
        pipeline = self._pipeline
        return BackendCounts(
            pipeline.num_decoded, pipeline.num_encoded, pipeline.num_prefilled, pipeline.num_units_skipped
        )


class _Work:
    """Runs one batch: makes jobs for the pipeline, and is a sink for their outcomes."""

    def __init__(
        self, pipeline: BatchPipeline, card: ModelCard, folder: Path, tasks: Iterator[MediaTask]
    ) -> None:
        self._adapter = pipeline.adapter
        self._settings = pipeline.settings
        self._texts = TokenTexts(pipeline.adapter.tokenizer)
        self._card = card
        self._folder = folder
        self._tasks = tasks
        self._grammars = GrammarChecker()
        self._asked: dict[str, _Asked] = {}
        self._outcomes: BoundedQueue[Outcome | _End] = BoundedQueue(_MAX_OUTCOMES)

    def outcomes(self) -> Iterator[Outcome | None]:
        while True:
            outcome = self._outcomes.get(_TICK_S)
            if not isinstance(outcome, _End):
                yield outcome
            elif outcome.error is not None:
                raise outcome.error
            else:
                return

    def stop(self) -> None:
        self._outcomes.close()
        self._grammars.close()

    # Jobs, for the pipeline's first thread

    def jobs(self) -> Iterator[BatchJob]:
        for task in self._tasks:
            job = self._job(task)
            if job is not None:
                yield job

    def _job(self, task: MediaTask) -> BatchJob | None:
        """Makes the job of a task; None if no line is valid, or the media cannot be found."""
        asked = next((asked for line in task.lines if (asked := self._read(line)) is not None), None)
        if asked is None:
            return None
        try:
            sources = [self._file(task, number, each) for number, each in enumerate(asked.references)]
        except EPDError as error:
            for line in chain([asked.line], task.lines):
                self._put(Failed.of(line, error))
            return None
        kinds = [reference.kind for reference in asked.references]
        return BatchJob(
            name=_name(task),
            sources=sources,
            kinds=kinds,
            pixels=[reference.pixels for reference in asked.references],
            frame_sampling=video_sampling(asked.chat, asked.references),
            messages=asked.messages,
            requests=self._requests(asked, task.lines),
            reduction=reduction_policy(asked.chat, KEEP_ALL),
            budget=visual_budget(asked.chat, None),
        )

    def _read(self, line: BatchLine) -> _Asked | None:
        """Checks a line's body; None for one that is refused, which is reported."""
        try:
            chat = ChatRequest.model_validate_json(json.dumps(line.body))
            check_supported(chat)
            model = model_named(chat.model, [self._card]).name
            messages, references = conversation(
                chat.messages, no_turns(chat), pixel_limits(chat), heard_part(chat)
            )
            _check_sent(references)
            budget_of(chat, messages, references).check(_LIMITS)
            video_sampling(chat, references)
            self._adapter.check_pixels(
                [(each.kind, each.pixels) for each in references], _LIMITS.max_resize_pixels
            )
            reduction_policy(chat, KEEP_ALL)
            visual_budget(chat, None)
            sampling_params(chat, self._settings.defaults)
            wanted = answer_format(chat)
            grammar = "" if wanted is None else self._grammars.grammar_of(wanted)
        except ValidationError as error:
            self._put(Failed.of(line, describe(error)))
        except EPDError as error:
            self._put(Failed.of(line, error))
        except Exception as error:  # noqa: BLE001 - what one line meets is that line's
            self._put(Failed.of(line, InternalError.of(error)))
        else:
            return _Asked(line, chat, messages, references, RequestRecord(model=model), grammar)
        return None

    def _file(self, task: MediaTask, number: int, reference: MediaReference) -> Path:
        """Returns the medium as a file; one that is not a file is written to one until its job is done."""
        path = local_path(reference.url)
        if path is not None:
            return path
        path = self._folder / _name(task) / str(number)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(video.fetch(reference.url))
        return path

    def _requests(self, first: _Asked, lines: Iterator[BatchLine]) -> Iterator[TextRequest]:
        """Yields requests, to the thread of the language model."""
        for asked in chain([first], filter(None, map(self._read, lines))):
            key = asked.line.key
            self._asked[key] = asked
            sampling = replace(sampling_params(asked.chat, self._settings.defaults), grammar=asked.grammar)
            seed = _seed(key) if sampling.seed is None else sampling.seed
            yield TextRequest(key, asked.messages, sampling, seed)

    # The sink, for the thread of the language model

    def answered(self, answer: BatchAnswer) -> None:
        asked = self._asked.pop(answer.request_id)
        has_logprobs = bool(asked.chat.logprobs)
        asked.record.first = answer.first_s
        builder = CompletionBuilder(
            asked.record,
            asked.chat.n or 1,
            has_logprobs=has_logprobs,
            reads_tools=offers_tools(asked.chat),
        )
        for output in answer.outputs:
            logprobs = (self._texts.logprob(output.token),) if has_logprobs else ()
            token_ids = (output.token.token_id,)
            builder.add(TokenDelta(output.choice, output.text, token_ids, logprobs, output.finish_reason))
        builder.add(AnswerEnd(answer.usage, StageTimings(), answer.num_cached))
        self._put(Answered(asked.line, builder.build().model_dump(mode="json")))

    def failed(self, request_id: str, error: EPDError) -> None:
        self._put(Failed.of(self._asked.pop(request_id).line, error))

    def job_done(self, job: BatchJob) -> None:
        folder = self._folder / job.name
        if folder.exists():
            shutil.rmtree(folder)

    def ended(self, error: BaseException | None) -> None:
        self._put(_End(error))

    def _put(self, outcome: Outcome | _End) -> None:
        """Passes an outcome on, waiting while the queue is full. Raises QueueClosed if nothing reads it."""
        self._outcomes.put(outcome, 1)


def _check_sent(references: tuple[MediaReference, ...]) -> None:
    """Raises RequestError for a medium without its URL: nothing is kept from one line to another."""
    for each in references:
        if each.uuid and not each.url:
            raise RequestError(
                f"{each.label}: received a uuid without a URL; allowed in a batch: with it; send the URL"
            )


def _name(task: MediaTask) -> str:
    return f"media-{task.number}"


def _seed(key: str) -> int:
    """Returns a seed that is the same whenever the line is repeated."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=_SEED_BYTES).digest()) >> 1
