"""The command `epd keys`."""

from __future__ import annotations

import secrets
import sys
from datetime import datetime
from typing import Annotated

import typer
from pydantic import ValidationError

from epd.errors import RequestError
from epd.serve_app.cli.usage import GroupedCommand
from epd.serve_app.clients import ApiKey, hash_of

keys = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

_PREFIX, _NUM_BYTES = "sk-epd-", 32
_Name = Annotated[str, typer.Argument(help="Name of the client; keys of one name are one client.")]
_Rights = Annotated[
    list[str] | None,
    typer.Option(
        "--right", metavar="RIGHT", help="ask, files, batches or admin; repeated. By default all but admin."
    ),
]
_Requests = Annotated[int | None, typer.Option(metavar="N", help="Requests that it may make in a minute.")]
_Tokens = Annotated[int | None, typer.Option(metavar="N", help="Tokens that it may use in a minute.")]
_Priority = Annotated[int, typer.Option(metavar="N", help="Priority of its requests; below 0 they go first.")]
_Weight = Annotated[
    int,
    typer.Option(metavar="N", help="Requests that it has in a turn, 1 to 100; others have one."),
]
_Expires = Annotated[datetime | None, typer.Option(help="When the key ends, in UTC.")]


@keys.callback()
def _keys() -> None:
    """Make keys for the clients of a server."""


@keys.command(cls=GroupedCommand)
def new(
    name: _Name,
    right: _Rights = None,
    requests_per_minute: _Requests = None,
    tokens_per_minute: _Tokens = None,
    priority: _Priority = 0,
    weight: _Weight = 1,
    expires: _Expires = None,
) -> None:
    """Make a key: its line for --api-keys-file on stdout, and the key itself, only now, on stderr.

    epd keys new ann >> keys.jsonl
    """
    key = _PREFIX + secrets.token_urlsafe(_NUM_BYTES)
    rights = {"rights": right} if right else {}
    limits = {"requests_per_minute": requests_per_minute, "tokens_per_minute": tokens_per_minute}
    options = {**rights, **limits, "priority": priority, "weight": weight, "expires": expires}
    try:
        made = ApiKey.model_validate({"name": name, "sha256": hash_of(key.encode()), **options})
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        raise RequestError(f"{first['loc'][0]}: {first['msg']}; change it") from None
    print(made.line(), flush=True)
    print(f"the key of {name}, which is not shown again: {key}", file=sys.stderr)
