"""Asks about the rows of a dataset of Ray Data, between a pipeline's own steps.

    ray.data.read_parquet(...) -> ask_videos(...) -> write_parquet(...)

A row is a medium with one question, or with a list of them. Actors send the questions to servers and wait.
Each keeps some media in flight, and takes the next one when one has ended, so a long video holds up nobody.
URIs of media go from step to step, never their bytes. Nothing here imports Ray.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from epd.batch.folder import columns_for, records_of_row
from epd.batch.http_backend import Asker, HttpBackend
from epd.batch.in_flight import MAX_TASKS
from epd.batch.line_index import RefusedLine
from epd.batch.lines import JSON, BatchLine, LineDefaults, LineError, parse_line
from epd.batch.records import error_record, result_record
from epd.batch.tables import part_row, part_table
from epd.batch.tasks import Answered, Failed, Outcome
from epd.client.endpoint import Endpoint, parse_endpoints
from epd.errors import RequestError, UnavailableError

# Rows of a call, and calls of an actor that Ray Data makes at once: enough of them wait for a free place.
_ROWS, _CALLS = 16, 4
_ANYWHERE = Path("/")


def ask_videos(
    dataset: Any,
    question: str | Sequence[str] | None = None,
    *,
    url: str | Sequence[str],
    api_key: str | None = None,
    media_in_flight: int = MAX_TASKS,
    fields: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Returns a dataset with a row for each question, in the columns of `epd batch`'s parts of Parquet.

    dataset: of Ray Data. Its rows have `video`, a URL or path, or `images`; `id`; and `question`, or a list
        in `questions`. Other fields of a line are columns too. The rest is left behind.
    question: one or more about every row; a {column} is filled in.
    url: of the servers. Each medium has one that is asked first.
    media_in_flight: of each actor.
    fields: for lines that leave them out, such as {"fps": 1, "max_tokens": 64}.
    options: of `Dataset.map_batches`, such as compute=ray.data.ActorPoolStrategy(size=4).
    A row that cannot be answered has an `error`. Raises RequestError for a URL or field that is none.
    """
    asked = [question] if isinstance(question, str) else list(question or ())
    urls = [url] if isinstance(url, str) else list(url)
    endpoints = parse_endpoints(urls, api_key=api_key)
    try:
        defaults = LineDefaults(_ANYWHERE, **fields or {})
    except TypeError as error:
        raise RequestError(f"received fields {dict(fields or {})}: {error}; give fields of a line") from None
    known = dataset.columns(fetch_if_missing=False)
    wanted = columns_for(asked)
    if known is not None and set(known) - wanted:
        dataset = dataset.select_columns([name for name in known if name in wanted])
    return dataset.map_batches(
        AskVideos,
        fn_constructor_args=(endpoints, asked, defaults, media_in_flight),
        batch_size=_ROWS,
        batch_format="pyarrow",
        **{"num_cpus": 0, "max_concurrency": _CALLS, **options},
    )


class _Explaining(Asker):
    """Answers with an error where no server can: the other steps of a pipeline go on."""

    async def ask(self, line: BatchLine, first: Endpoint | None = None) -> Outcome:
        try:
            return await super().ask(line, first)
        except UnavailableError as error:
            return Failed.of(line, error)


class AskVideos:
    """Answers the rows of a batch: an async actor of Ray Data."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        asked: Sequence[str],
        defaults: LineDefaults,
        media_in_flight: int,
    ) -> None:
        """See `ask_videos`."""
        self._asked = asked
        self._defaults = defaults
        self._asker = _Explaining(HttpBackend(*endpoints, has_seeds=True, signs=True))
        self._media = asyncio.Semaphore(media_in_flight)

    async def close(self) -> None:
        """Closes the connections. Ray Data ends the process instead."""
        await self._asker.close()

    async def __call__(self, batch: Any) -> AsyncIterator[Any]:
        """Yields the results of each row of a table of pyarrow, in the order of completion."""
        for rows in asyncio.as_completed([self._about(row) for row in batch.to_pylist()]):
            yield part_table(await rows)

    async def _about(self, row: Mapping[str, Any]) -> list[JSON]:
        found: list[JSON] = []
        try:
            records = records_of_row(row, self._asked)
        except RequestError as error:
            return [part_row(error_record(RefusedLine(0, _name(row), "short", str(error))))]
        lines = list[BatchLine]()
        for record in records:
            try:
                lines.append(parse_line(json.dumps(record, default=str).encode(), 0, self._defaults))
            except LineError as error:
                found.append(part_row(error_record(RefusedLine(0, error.line_id, "short", str(error)))))

        async def put(outcome: Outcome) -> None:
            record = result_record(outcome) if isinstance(outcome, Answered) else error_record(outcome)
            found.append(part_row(record))

        if lines:
            async with self._media:
                await self._asker.answer_all(iter(lines), put)
        return found


def _name(row: Mapping[str, Any]) -> str | int | None:
    line_id = row.get("id")
    return line_id if isinstance(line_id, str | int) else None
