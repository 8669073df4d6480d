"""Answers what a prompt would use, what its media look like, and texts as tokens, without a stage's work."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from epd.errors import RequestBudgetError, RequestError
from epd.serve_app.http.requests.chat_request import ChatRequest
from epd.serve_app.http.requests.prompt_request import (
    DetokenizeReply,
    DetokenizeRequest,
    EstimateReply,
    MediumReply,
    TokenizeReply,
    TokenizeRequest,
)
from epd.serve_app.http.requests.request_parsing import model_named
from epd.serve_app.http.server_state import ParsedRequest, ServerState, server_of
from epd.serve_app.observability.record import RequestRecord, record_of
from epd.serve_app.service import Estimate, ModelCard

prompt_routes = APIRouter()
_PICTURE_SIDE = 320  # pixels
# What a route says of its streams: their events have no schema.
EVENT_STREAM: dict[int | str, dict[str, object]] = {200: {"content": {"text/event-stream": {}}}}


def body_of(model: str) -> dict[str, object]:
    schema = {"$ref": f"#/components/schemas/{model}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


@prompt_routes.post("/v1/epd/estimate", openapi_extra=body_of("ChatRequest"))
async def estimate(request: Request) -> EstimateReply:
    """Returns what the answer to a chat request would use. Media are fetched, nothing is encoded."""
    server = server_of(request)
    chat, num_bytes = await server.read_json(request, ChatRequest)
    card = model_named(chat.model, server.service.models)
    try:
        found = await _estimate(server, await server.checked(request, chat, num_bytes), record_of(request))
    except RequestBudgetError as error:
        reason = str(error)
        return EstimateReply(model=card.name, fits=False, reason=reason, max_model_len=card.max_model_len)
    return _reply(card, found)


@prompt_routes.post(
    "/v1/epd/picture",
    openapi_extra=body_of("ChatRequest"),
    response_class=Response,
    responses={200: {"content": {"image/jpeg": {}}}},
)
async def picture(request: Request) -> Response:
    """Returns a small JPEG of a chat request's first image, or of the first frame of its first video."""
    server = server_of(request)
    parsed = await server.read(request)
    if not parsed.references:
        raise RequestError("received no medium in messages; allowed: an image or a video; add it")
    first, record = parsed.references[:1], record_of(request)
    with server.admitted(parsed.client):
        async with server.media.sources(record.request_id, first) as (source,):
            server.named_media.keep(parsed.namespace, first, parsed.client.share, (source,))
            server.bodies.release(record)
            jpeg = await server.media.picture(source, _PICTURE_SIDE)
    return Response(jpeg, media_type="image/jpeg")


async def _estimate(server: ServerState, parsed: ParsedRequest, record: RequestRecord) -> Estimate:
    """Returns what the answer would use. Its media are held until then. Raises EPDError."""
    request = server.request_of(parsed, record)
    with server.admitted(parsed.client):
        async with server.media.sources(record.request_id, parsed.references) as media:
            server.named_media.keep(parsed.namespace, parsed.references, parsed.client.share, media)
            server.bodies.release(record)
            return await server.service.prompts.estimate(request(media=media))


def _reply(card: ModelCard, found: Estimate) -> EstimateReply:
    return EstimateReply(
        model=card.name,
        fits=True,
        max_model_len=card.max_model_len,
        prompt_tokens=found.usage.prompt_tokens,
        frames=found.usage.num_frames,
        video_s=found.usage.video_s,
        visual_tokens=found.usage.visual_tokens,
        visual_tokens_before_reduction=found.usage.visual_tokens_before,
        retention=found.retention,
        max_completion_tokens=found.max_tokens,
        media=[
            MediumReply(
                kind=each.kind,
                frames=each.num_frames,
                height=each.height,
                width=each.width,
                visual_tokens=each.num_tokens,
            )
            for each in found.media
        ],
    )


@prompt_routes.post("/tokenize", openapi_extra=body_of("TokenizeRequest"))
async def tokenize(request: Request) -> TokenizeReply:
    """Returns the tokens of a text, or of a conversation as its answer would read it."""
    server = server_of(request)
    wanted, num_bytes = await server.read_json(request, TokenizeRequest)
    card = model_named(wanted.model, server.service.models)
    if (wanted.prompt is None) == (wanted.messages is None):
        raise RequestError("received prompt and messages, or neither; allowed: one of the two; send one")
    if wanted.prompt is not None:
        _check_text(len(wanted.prompt.encode(errors="surrogatepass")), server)
        special = wanted.add_special_tokens is not False
        tokens = await server.service.prompts.tokens(wanted.prompt, with_special=special)
    else:
        tokens = await _tokens_of_chat(server, request, wanted, num_bytes)
    strings = await server.service.prompts.names(tokens) if wanted.return_token_strs else None
    return TokenizeReply(
        count=len(tokens), max_model_len=card.max_model_len, tokens=tokens, token_strs=strings
    )


async def _tokens_of_chat(
    server: ServerState, request: Request, wanted: TokenizeRequest, num_bytes: int
) -> tuple[int, ...]:
    if wanted.add_special_tokens:
        raise RequestError(
            "received add_special_tokens with messages; allowed: false, as the chat template has them; "
            "leave it out"
        )
    chat = ChatRequest(
        model=wanted.model,
        messages=wanted.messages or [],
        tools=wanted.tools,
        mm_processor_kwargs=wanted.mm_processor_kwargs,
        media_io_kwargs=wanted.media_io_kwargs,
        epd=wanted.epd,
    )
    parsed = await server.checked(request, chat, num_bytes)
    return (await _estimate(server, parsed, record_of(request))).token_ids


@prompt_routes.post("/detokenize", openapi_extra=body_of("DetokenizeRequest"))
async def detokenize(request: Request) -> DetokenizeReply:
    """Returns the text of tokens."""
    server = server_of(request)
    wanted, _ = await server.read_json(request, DetokenizeRequest)
    model_named(wanted.model, server.service.models)
    return DetokenizeReply(prompt=await server.service.prompts.text(wanted.tokens))


def _check_text(num_bytes: int, server: ServerState) -> None:
    most = server.settings.limits.max_text_bytes
    if num_bytes > most:
        raise RequestBudgetError(
            f"received {num_bytes:,} bytes of text; allowed {most:,} (max_text_bytes); shorten the prompt"
        )
