"""Answers held to schemas: whether all are valid, and what it costs.

    python -m benchmarks.serving.structured    # 1,000 drawn schemas, and the cost of a step
    python -m benchmarks.serving.structured --only step --no-save

schemas   drawn ones, at temperature 1.5, through HTTP in 1e1p1d with a small cache, so answers are preempted
step      CPU time of the engine's thread for a step with 8 answers in flight, held and not, in turn
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import Counter
from typing import Any

import httpx
from jsonschema import Draft202012Validator

from benchmarks.reporting import Row, Section, median_ratio, run_sections, setting
from benchmarks.score.live_app import counted_in
from benchmarks.serving.drawn_schemas import Schema, drawn_schema
from epd.encoders.groups import prompt_identity
from epd.engine_config import EngineConfig
from epd.models import embedded_model_path
from epd.sampling_params import SamplingParams
from epd.serve_app.app_args import AppArgs
from epd.serve_app.http.address import HttpAddress
from epd.serve_app.local.server import served_locally
from epd.stages.engine.generation import GenerateRequest
from epd.stages.grammar.formats import format_of, grammar_text
from tests.colocated import ColocatedPipeline

_TEMPERATURE = 1.5
_MAX_TOKENS = 3900
_REPORT_S = 10.0
_IN_FLIGHT = 24
_KV_TOKENS = 4096
_STEPS, _WARM_STEPS, _REPEATS = 100, 30, 15
# Documents long enough for every step, of the kinds that schemas have most.
LONG_DOCUMENTS: dict[str, Schema] = {
    "records": {
        "type": "array",
        "minItems": 60,
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 20},
                "count": {"type": "integer", "minimum": 0, "maximum": 999},
                "colour": {"enum": ["red", "green", "blue"]},
            },
            "required": ["name", "count", "colour"],
            "additionalProperties": False,
        },
    },
    "text": {"type": "string", "minLength": 2000},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=["schemas", "step"], default=["schemas", "step"])
    parser.add_argument("--count", type=int, default=1000, help="schemas")
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()
    sections = {
        "schemas": Section("Drawn schemas", lambda: [schema_row(args.count)]),
        "step": Section("CPU time of a step with 8 answers in flight", step_rows),
    }
    run_sections(
        "structured",
        "Answers held to schemas",
        sections,
        args.only,
        lambda: setting(["torch", "llguidance", "jsonschema"]),
        save=not args.no_save,
    )


# Drawn schemas


def schema_row(count: int, seed: int = 0, num_kv_tokens: int = _KV_TOKENS) -> Row:
    """Asks for a document of each drawn schema. Raises AssertionError unless all are valid."""
    address = HttpAddress.free()
    args = AppArgs(topology="1e1p1d", num_kv_tokens=num_kv_tokens, max_num_seqs=_IN_FLIGHT, num_threads=1)
    start_s = time.monotonic()
    with served_locally(args, address):
        found = asyncio.run(_documents(address.url, count, seed))
        metrics = _metrics_with(address.url, found["tokens"])
    return {
        "schemas": count,
        "valid documents": found["valid"],
        "tokens": found["tokens"],
        "preemptions": counted_in(metrics, "epd_preemptions_total"),
        "temperature": _TEMPERATURE,
        "in flight": _IN_FLIGHT,
        "seconds": round(time.monotonic() - start_s, 1),
    }


def _metrics_with(url: str, num_tokens: int) -> str:
    """Returns the metrics once workers have reported so many tokens, which they do a little later."""
    end_s = time.monotonic() + _REPORT_S
    while True:
        metrics = httpx.get(f"{url}/metrics", trust_env=False).text
        if counted_in(metrics, "epd_generated_tokens_total") >= num_tokens or time.monotonic() > end_s:
            return metrics
        time.sleep(0.1)


async def _documents(url: str, count: int, seed: int) -> Counter[str]:
    rng = random.Random(seed)
    schemas = [drawn_schema(rng) for _ in range(count)]
    found: Counter[str] = Counter()
    turns = asyncio.Semaphore(_IN_FLIGHT)
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=1200) as client:

        async def ask(number: int, schema: Schema) -> None:
            async with turns:
                reply = await client.post("/v1/chat/completions", json=_body(number, schema))
            assert reply.status_code == 200, (schema, reply.text)
            body = reply.json()
            text, reason = body["choices"][0]["message"]["content"], body["choices"][0]["finish_reason"]
            assert reason == "stop", (schema, text)
            Draft202012Validator(schema).validate(json.loads(text))
            found["valid"] += 1
            found["tokens"] += body["usage"]["completion_tokens"]

        await asyncio.gather(*(ask(number, schema) for number, schema in enumerate(schemas)))
    return found


def _body(number: int, schema: Schema) -> dict[str, Any]:
    """Returns a request in OpenAI's field or in vLLM's, some with penalties."""
    wanted = {"type": "json_schema", "json_schema": {"name": "drawn", "schema": schema, "strict": True}}
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"Give an example, number {number}."}],
        "temperature": _TEMPERATURE,
        "seed": number,
        "max_tokens": _MAX_TOKENS,
    }
    if number % 3 == 0:
        body["presence_penalty"] = 1.0
    if number % 2:
        return body | {"response_format": wanted}
    return body | {"structured_outputs": {"json": schema, "disable_any_whitespace": True}}


# A step


def step_rows() -> list[Row]:
    """Milliseconds of the engine's thread for a step, held to each schema and not."""
    pipeline = ColocatedPipeline.load(embedded_model_path(), EngineConfig(num_kv_tokens=2**14))
    rows = []
    for name, schema in LONG_DOCUMENTS.items():
        grammar = grammar_text(format_of("json_schema", schema, None))
        _step_s(pipeline, grammar)
        free, held = [], []
        for repeat in range(_REPEATS):
            for is_held in (False, True) if repeat % 2 else (True, False):
                (held if is_held else free).append(_step_s(pipeline, grammar if is_held else ""))
        rows.append(
            {
                "document": name,
                "free_ms": round(1e3 * statistics.median(free), 3),
                "held_ms": round(1e3 * statistics.median(held), 3),
                "held_over_free": round(median_ratio(held, free), 3),
                "steps": _STEPS,
                "repeats": _REPEATS,
            }
        )
    return rows


def _step_s(pipeline: ColocatedPipeline, grammar: str) -> float:
    """Returns the median seconds of CPU time that a step with 8 answers in flight takes."""
    engine = pipeline.engine
    plan = pipeline.adapter.plan_prompt([], "Give an example.")
    sampling = SamplingParams(max_tokens=1000, temperature=1.0, grammar=grammar, ignore_eos=not grammar)
    for seed in range(8):
        engine.add(GenerateRequest(f"r{seed}", plan, prompt_identity(plan, ()), sampling, seed=seed))
    for _ in range(_WARM_STEPS):
        engine.step()
    spent = []
    for _ in range(_STEPS):
        start_s = time.thread_time()
        outputs = engine.step().outputs
        spent.append(time.thread_time() - start_s)
        assert len(outputs) == 8, "an answer has ended"
    for seed in range(8):
        engine.abort(f"r{seed}")
    return statistics.median(spent)


if __name__ == "__main__":
    main()
