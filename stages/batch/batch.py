"""Answers many questions about many media in one process, with a thread for each stage.

    plan, decode, encode (`stages/batch/ahead.py`) -> language (`stages/batch/language.py`) -> sink

While the questions about one video are answered, the next ones are decoded, encoded and prefilled. Memory is
that of the queues between the threads, of the KV cache and of the answers under way.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, Self

from epd.engine_config import DEFAULT_ENGINE, EngineConfig
from epd.machine import usable_cpus
from epd.stages.batch.ahead import JOIN_S, MediaThreads
from epd.stages.batch.jobs import BatchJob, BatchSink
from epd.stages.batch.language import LanguageStage
from epd.stages.group_driver import GroupDriver
from epd.stages.pipeline import Pipeline
from epd.transfer.bounded_queue import QueueClosed
from epd.video.decoding.pool import shared_pool


class BatchPipeline(Pipeline):
    """Answers batches, one after the other, with one loaded checkpoint."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Takes the same arguments as `Pipeline`."""
        super().__init__(*args, **options)
        self._driver: GroupDriver[BatchJob] | None = None
        self._language: LanguageStage | None = None
        # A fast tokenizer serves one thread at a time: media are planned while questions are.
        self._layout_adapter = deepcopy(self.adapter)
        self._pool_busy_s = 0.0
        self._num_skipped_before = 0

    @classmethod
    def load(cls, model_path: str | Path, config: EngineConfig = DEFAULT_ENGINE, **more: Any) -> Self:
        """Loads as `Pipeline.load`.

        Threads are those of each of the two stages that compute; by default OMP_NUM_THREADS or half of the
        cores.
        """
        usual = int(os.environ.get("OMP_NUM_THREADS") or max(1, usable_cpus() // 2))
        num_threads = config.num_threads or usual
        return super().load(model_path, config.model_copy(update={"num_threads": num_threads}), **more)

    @contextmanager
    def running(self, jobs: Iterator[BatchJob], sink: BatchSink) -> Iterator[None]:
        """Works on the jobs while this is open; one thread takes them, and another reports to the sink.

        Leaving it early drops what is under way. Not twice at once.
        """
        self._pool_busy_s = shared_pool().busy_s
        self._num_skipped_before = self.encoder.num_skipped
        driver = self._driver = GroupDriver(
            self.adapter,
            self.encoder,
            self.group_tokens,
            context_tokens=self.settings.context_tokens,
            layout_adapter=self._layout_adapter,
        )
        media = MediaThreads(driver, jobs)
        language = self._language = LanguageStage(
            self.engine, self.adapter, self.settings, media.embeddings, sink
        )
        thread = threading.Thread(target=_run, args=(language, sink), name="batch-language", daemon=True)
        thread.start()
        try:
            yield
        finally:
            language.stop()
            media.close()
            thread.join(JOIN_S)

    def busy_s(self) -> dict[str, float]:
        """Returns seconds that each stage has worked in the last batch; of decoding threads, the mean."""
        if self._driver is None or self._language is None:
            return {"decode": 0.0, "encode": 0.0, "language": 0.0}
        pool = shared_pool()
        return {
            "decode": (pool.busy_s - self._pool_busy_s) / pool.num_threads,
            "encode": self._driver.encode_clock.total_s,
            "language": self._language.clock.total_s,
        }

    @property
    def num_decoded(self) -> int:
        """Counts the media whose decoding was begun in the last batch."""
        return self._driver.num_decoded if self._driver else 0

    @property
    def num_encoded(self) -> int:
        """Counts the media whose encoding was begun in the last batch."""
        return self._driver.num_encoded if self._driver else 0

    @property
    def num_units_skipped(self) -> int:
        """Counts the units of frames not encoded in the last batch, since they did not change."""
        return self.encoder.num_skipped - self._num_skipped_before

    @property
    def num_prefilled(self) -> int:
        """Counts the media that were prefilled in the last batch."""
        return self._language.num_prefilled if self._language else 0


def _run(language: LanguageStage, sink: BatchSink) -> None:
    """Answers everything, and reports the end; what a stage has raised ends the batch."""
    try:
        language.run()
        sink.ended(None)
    except QueueClosed:
        return
    except BaseException as error:  # noqa: BLE001 - reported to the caller
        sink.ended(error)
