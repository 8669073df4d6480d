"""What each client library is asked to do. Runs in the environment of the clients, without our packages.

    python asks.py openai CASES.json --requests 1000        prints a line of JSON

Each client is a function that returns what it can ask for, by name. A name begins with what is asked about:
text, image or video of a case, or prompt for a text without a conversation. The answer must equal the one
that plain HTTP gave; where a name begins with json or tool, it is True if the answer is valid by the schema.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MODEL = "shapes-vl"
IN_FLIGHT = 8
_TIMEOUT_S = 120
_LINES_PER_BATCH = 125
JSON = dict[str, Any]
# Of answers held to a schema: room for the longest, as the checkpoint's own limit is 64 tokens, and little
# white space, which a small model likes.
_HELD: JSON = {"max_tokens": 400, "frequency_penalty": 1.0}


class Scene(BaseModel):
    """What an answer held to a schema says. Closed, or a small model adds fields without end."""

    model_config = ConfigDict(extra="forbid")
    colour: Literal["red", "blue", "green"]
    count: int = Field(ge=0, le=9)


@dataclass(frozen=True)
class Case:
    """A question, a drawn image and video as data URLs, and the answers of plain HTTP.

    expected: by what was asked about: text, prompt, image or video
    """

    question: str
    image: str
    video: str
    expected: dict[str, str]

    def messages(self, kind: str) -> list[JSON]:
        """Returns the request's messages; kind: text, image or video."""
        if kind == "text":
            return [{"role": "user", "content": self.question}]
        name = f"{kind}_url"
        medium = {"type": name, name: {"url": getattr(self, kind)}}
        return [{"role": "user", "content": [medium, {"type": "text", "text": self.question}]}]

    @property
    def image_bytes(self) -> bytes:
        return base64.b64decode(self.image.partition(",")[2])


Ask = Callable[[Case], str | bool]


@dataclass
class Outcome:
    """What came of a client's requests. examples: the first error of each sort."""

    asked: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def note(self, whose: str, text: str) -> None:
        """whose: ours or theirs."""
        self.errors[whose] += 1
        self.examples.setdefault(whose, text[:400])


def openai_client(url: str) -> dict[str, Ask]:
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key="none", max_retries=0, timeout=_TIMEOUT_S)

    def chat(case: Case, kind: str, **more: Any) -> Any:
        create: Any = client.chat.completions.create
        return create(model=MODEL, messages=case.messages(kind), temperature=0, **more)

    def parsed(case: Case) -> bool:
        done = client.chat.completions.parse(
            model=MODEL,
            messages=case.messages("image"),  # type: ignore[arg-type]
            response_format=Scene,
            temperature=0,
            **_HELD,
        )
        return isinstance(done.choices[0].message.parsed, Scene)

    def called(case: Case) -> bool:
        function = {"name": "report", "parameters": Scene.model_json_schema()}
        tools = [{"type": "function", "function": function}]
        message = _message(chat(case, "image", tools=tools, tool_choice="required", **_HELD))
        return all(Scene.model_validate_json(call.function.arguments) for call in message.tool_calls)

    def completed(case: Case) -> str:
        return client.completions.create(model=MODEL, prompt=case.question, temperature=0).choices[0].text

    def responded(case: Case) -> str:
        image = {"type": "input_image", "image_url": case.image, "detail": "auto"}
        parts = [image, {"type": "input_text", "text": case.question}]
        given: Any = [{"role": "user", "content": parts}]
        return client.responses.create(model=MODEL, input=given, temperature=0).output_text

    return {
        "text": lambda case: str(_message(chat(case, "text")).content),
        "prompt": completed,
        "image by responses": responded,
        "image": lambda case: str(_message(chat(case, "image")).content),
        "video": lambda case: str(_message(chat(case, "video")).content),
        "image streamed": lambda case: _joined(chat(case, "image", stream=True)),
        "video streamed": lambda case: _joined(chat(case, "video", stream=True)),
        "json schema": parsed,
        "tool required": called,
    }


def litellm_client(url: str) -> dict[str, Ask]:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it looks for prices in the network
    import litellm

    def chat(case: Case, kind: str, provider: str = "openai", **more: Any) -> Any:
        asked: JSON = {"api_base": url, "api_key": "none", "timeout": _TIMEOUT_S}
        asked |= {"max_retries": 0, "temperature": 0}
        return litellm.completion(model=f"{provider}/{MODEL}", messages=case.messages(kind), **asked, **more)

    def parsed(case: Case) -> bool:
        done = chat(case, "image", response_format=Scene, **_HELD)
        return bool(Scene.model_validate_json(_message(done).content))

    return {
        "text": lambda case: str(_message(chat(case, "text")).content),
        "image": lambda case: str(_message(chat(case, "image")).content),
        "video as hosted_vllm": lambda case: str(_message(chat(case, "video", "hosted_vllm")).content),
        "image streamed": lambda case: _joined(chat(case, "image", stream=True)),
        "json schema": parsed,
    }


def langchain_client(url: str) -> dict[str, Ask]:
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI

    options: JSON = {"model": MODEL, "base_url": url, "api_key": "none", "temperature": 0, "max_retries": 0}
    chat = ChatOpenAI(**options, timeout=_TIMEOUT_S)
    held = ChatOpenAI(**options, timeout=_TIMEOUT_S, **_HELD)
    by_schema = held.with_structured_output(Scene)
    by_call = held.with_structured_output(Scene, method="function_calling")

    def message(case: Case, kind: str) -> list[HumanMessage]:
        return [HumanMessage(case.messages(kind)[0]["content"])]

    def standard(case: Case) -> list[HumanMessage]:
        data = case.image.partition(",")[2]
        image = {"type": "image", "base64": data, "mime_type": "image/png"}
        return [HumanMessage([image, {"type": "text", "text": case.question}])]

    return {
        "text": lambda case: str(chat.invoke(message(case, "text")).content),
        "image": lambda case: str(chat.invoke(standard(case)).content),
        "video": lambda case: str(chat.invoke(message(case, "video")).content),
        "image streamed": lambda case: "".join(str(part.content) for part in chat.stream(standard(case))),
        "json schema": lambda case: isinstance(by_schema.invoke(standard(case)), Scene),
        "tool by its name": lambda case: isinstance(by_call.invoke(standard(case)), Scene),
    }


def llama_index_client(url: str) -> dict[str, Ask]:
    from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
    from llama_index.llms.openai_like import OpenAILike

    options: JSON = {"model": MODEL, "api_base": url, "api_key": "none", "temperature": 0, "max_retries": 0}
    options |= {"is_chat_model": True, "context_window": 32768, "timeout": _TIMEOUT_S}
    chat = OpenAILike(**options)
    held = OpenAILike(**options, additional_kwargs=_HELD, should_use_structured_outputs=True)
    by_schema = held.as_structured_llm(Scene)

    def text(case: Case) -> list[ChatMessage]:
        return [ChatMessage(role="user", content=case.question)]

    def image(case: Case) -> list[ChatMessage]:
        medium = ImageBlock(image=case.image_bytes, image_mimetype="image/png")
        return [ChatMessage(role="user", blocks=[medium, TextBlock(text=case.question)])]

    return {
        "text": lambda case: str(chat.chat(text(case)).message.content),
        "text completed": lambda case: chat.complete(case.question).text,
        "image": lambda case: str(chat.chat(image(case)).message.content),
        "image streamed": lambda case: "".join(part.delta or "" for part in chat.stream_chat(image(case))),
        "json schema": lambda case: isinstance(by_schema.chat(image(case)).raw, Scene),
    }


def instructor_client(url: str) -> dict[str, Ask]:
    import instructor
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key="none", max_retries=0, timeout=_TIMEOUT_S)

    def ask(mode: Any, kind: str) -> Ask:
        create: Any = instructor.from_openai(client, mode=mode).chat.completions.create

        def parsed(case: Case) -> bool:
            more = {**_HELD, "temperature": 0, "max_retries": 0}
            found = create(model=MODEL, messages=case.messages(kind), response_model=Scene, **more)
            return isinstance(found, Scene)

        return parsed

    return {
        "json schema of an image": ask(instructor.Mode.JSON_SCHEMA, "image"),
        "json schema of a video": ask(instructor.Mode.JSON_SCHEMA, "video"),
        "tool by its name": ask(instructor.Mode.TOOLS, "image"),
    }


def openai_batches(url: str, cases: list[Case], count: int) -> Outcome:
    """Asks by files and batches, of at most _LINES_PER_BATCH lines each, all at once."""
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key="none", max_retries=0, timeout=_TIMEOUT_S)
    kinds = ("text", "image", "video")
    outcome = Outcome()
    lines: dict[str, tuple[str, Case]] = {}
    for number in range(count):
        lines[str(number)] = kinds[number % 3], cases[number // 3 % len(cases)]
        outcome.asked[kinds[number % 3]] += 1

    def line(name: str) -> str:
        kind, case = lines[name]
        body = {"model": MODEL, "messages": case.messages(kind), "temperature": 0}
        return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body})

    def answers(names: tuple[str, ...]) -> Iterable[tuple[str, JSON]]:
        data = "\n".join(map(line, names)).encode()
        file = client.files.create(file=("lines.jsonl", data), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        while batch.status not in ("completed", "failed", "cancelled", "expired"):
            time.sleep(0.5)
            batch = client.batches.retrieve(batch.id)
        for result in filter(None, (batch.output_file_id, batch.error_file_id)):
            for answered in client.files.content(result).text.splitlines():
                each = json.loads(answered)
                yield each["custom_id"], each

    def one(names: tuple[str, ...]) -> None:
        missing = set(names)
        for name, each in answers(names):
            kind, case = lines[name]
            missing.discard(name)
            if each["error"] or each["response"]["status_code"] != 200:
                outcome.note("ours", f"{kind}: {each}")
                continue
            wrong = difference(kind, case, each["response"]["body"]["choices"][0]["message"]["content"])
            if wrong:
                outcome.note("ours", wrong)
        for name in missing:
            outcome.note("ours", f"line {name} has no result")

    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        list(threads.map(one, batched(lines, _LINES_PER_BATCH)))
    return outcome


def batched(names: Iterable[str], size: int) -> list[tuple[str, ...]]:
    """Returns the names in tuples of at most `size`."""
    whole = list(names)
    return [tuple(whole[first : first + size]) for first in range(0, len(whole), size)]


Run = Callable[[str, list[Case], int], Outcome]


def one_by_one(asks: Callable[[str], dict[str, Ask]]) -> Run:
    """Returns what asks single requests."""

    def asked(url: str, cases: list[Case], count: int) -> Outcome:
        return run(asks(url), cases, count)

    return asked


@dataclass(frozen=True)
class Client:
    """package: whose version is reported. run: asks, given the URL of the API, cases and a number."""

    package: str
    run: Run


CLIENTS = {
    "openai": Client("openai", one_by_one(openai_client)),
    "openai batches": Client("openai", openai_batches),
    "LiteLLM": Client("litellm", one_by_one(litellm_client)),
    "LangChain": Client("langchain-openai", one_by_one(langchain_client)),
    "LlamaIndex": Client("llama-index-llms-openai-like", one_by_one(llama_index_client)),
    "Instructor": Client("instructor", one_by_one(instructor_client)),
}


def run(asks: dict[str, Ask], cases: list[Case], count: int) -> Outcome:
    """Asks `count` times, each thing in turn, IN_FLIGHT at once."""
    outcome = Outcome()
    names = list(asks)

    def one(number: int) -> None:
        name, case = names[number % len(names)], cases[number // len(names) % len(cases)]
        outcome.asked[name] += 1
        try:
            wrong = difference(name, case, asks[name](case))
        except Exception as error:  # noqa: BLE001 - whatever a client raises is counted
            outcome.note(whose(error), f"{name}: {type(error).__name__}: {error}")
        else:
            if wrong:
                outcome.note("ours", wrong)

    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        list(threads.map(one, range(count)))
    return outcome


def difference(name: str, case: Case, answer: str | bool) -> str:
    """Returns how an answer differs from the one that plain HTTP gave, or an empty text."""
    expected = case.expected.get(name.split()[0], True)
    return "" if answer == expected else f"{name}: received {answer!r}, plain HTTP gave {expected!r}"


def whose(error: BaseException) -> str:
    """Returns `ours` where the server refused, failed or was not reached, `theirs` for the rest."""
    seen: BaseException | None = error
    while seen is not None:
        name = type(seen).__name__
        if getattr(seen, "status_code", None) or "Connection" in name or "Timeout" in name:
            return "ours"
        seen = seen.__cause__ or seen.__context__
    return "theirs"


def _message(completion: Any) -> Any:
    return completion.choices[0].message


def _joined(chunks: Iterable[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("client", choices=CLIENTS)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--requests", type=int, default=1000)
    args = parser.parse_args()
    given = json.loads(args.cases.read_text(encoding="utf-8"))
    client = CLIENTS[args.client]
    cases = [Case(**each) for each in given["cases"]]
    client.run(given["url"], cases, 1)  # imports and connections
    start_s = time.monotonic()
    outcome = client.run(given["url"], cases, args.requests)
    seconds = time.monotonic() - start_s
    print(
        json.dumps(
            {
                "version": version(client.package),
                "asked": outcome.asked,
                "errors": outcome.errors,
                "examples": outcome.examples,
                "seconds": seconds,
            }
        )
    )


if __name__ == "__main__":
    main()
