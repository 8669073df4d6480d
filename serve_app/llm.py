"""Answers questions from Python, with a model that is loaded once, into this process.

    from epd import LLM

    with LLM() as llm:
        print(llm.ask("clip.mp4", "Which shape appears first?").text)

The model runs behind the application that `epd serve` starts. So options, limits and errors are those of the
server, and a second question about the same media finds it in the caches.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from pydantic import SecretStr, ValidationError

from epd.client.conversation import Conversation, completion
from epd.client.endpoint import Endpoint, served_model
from epd.errors import RequestError
from epd.serve_app.app_args import AppArgs
from epd.serve_app.http.address import HttpAddress
from epd.serve_app.local.server import served_locally
from epd.serve_app.request_options import medium_of, request_fields
from epd.types import Answer

Media = str | Path | Sequence[str | Path]

_IN_FLIGHT = 16  # questions of `ask_all` that are asked at once


class LLM:
    """Holds a loaded model. Close it, or use it in a `with` block. Safe to use from several threads."""

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        """Loads a model; see `epd serve --help` for the options, under the names of its flags.

        model: a folder in Hugging Face layout, a name at its hub, or that of an embedded model, by default
            shapes-vl-2
        options: `device`, `dtype`, `topology` and all others of `epd serve`; the topology is 1epd by default
        Raises EPDError: RequestError for a wrong option, UnsupportedModelError, InfeasibleError and others.
        """
        self._open = ExitStack()
        self._endpoint = self._open.enter_context(_served(model, options))

    @property
    def url(self) -> str:
        """Returns the address of the API in this process, for clients of OpenAI's API; needs `api_key`."""
        return f"{self._endpoint.url}/v1"

    @property
    def api_key(self) -> str:
        return self._endpoint.api_key or ""

    def ask(
        self,
        media: Media,
        question: str,
        *,
        on_text: Callable[[str], None] | None = None,
        **options: Any,
    ) -> Answer:
        """Answers a question about media, or about none if `media` is empty.

        media: one or several paths or URLs of images, videos and sound
        on_text: gets pieces of the answer as they come
        options: those of `epd ask` (`fps`, `frames`, `start`, `end`, `retention`, `max_tokens`, ...) and the
            fields of OpenAI's API (`temperature`, `seed`, `stop`, `response_format`, ...)
        Raises EPDError.
        """
        return self.conversation(media, **options).ask(question, on_text)

    def conversation(self, media: Media = (), *, audio: bool = False, **options: Any) -> Conversation:
        """Begins a dialogue about media, whose `ask` asks the next question. Arguments as of `ask`.

        audio: whether the sound of the media alone is heard
        """
        named = [
            medium_of(each, is_audio=audio) for each in ([media] if isinstance(media, str | Path) else media)
        ]
        return Conversation(self._endpoint, self._endpoint.model, named, request_fields(**options))

    async def ask_async(self, media: Media, question: str, **options: Any) -> Answer:
        """Answers as `ask` does, from an event loop."""
        return await asyncio.to_thread(self.ask, media, question, **options)

    def ask_all(self, asked: Iterable[tuple[Media, str]], **options: Any) -> Iterator[Answer]:
        """Answers questions in their order, several at a time.

        Media that questions share are read and encoded once.
        Raises the error of the first question that fails, when its turn comes.
        """
        with ThreadPoolExecutor(_IN_FLIGHT) as threads:
            yield from threads.map(lambda one: self.ask(*one, **options), asked)

    def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
        """Returns the completion of a conversation, as `/v1/chat/completions` does.

        messages, fields: as in OpenAI's API; for pieces as they come, give a client `url` and `api_key`
        Raises RequestError, UnavailableError.
        """
        return completion(
            self._endpoint, {"model": self._endpoint.model, "messages": list(messages), **fields}
        )

    def close(self) -> None:
        """Ends the workers and frees the model. Questions in flight are answered first."""
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _served(model: str | Path | None, options: Mapping[str, Any]) -> Iterator[Endpoint]:
    """Serves a model to who has the key, which is new, on this machine alone. Any file may be named."""
    key = secrets.token_hex(16)
    own = {"model": model, "api_key": SecretStr(key)}
    try:
        args = AppArgs(**{"topology": "1epd", "allowed_media_path": Path("/"), **options, **own})
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise RequestError(f"{place}: {first['msg']}; epd serve --help has all options") from None
    address = HttpAddress.free()
    with served_locally(args, address):
        endpoint = Endpoint("here", address.url, api_key=key)
        yield replace(endpoint, model=served_model(endpoint).name)
