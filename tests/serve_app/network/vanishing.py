"""Prints how long links last whose packets are dropped from one moment on: idle, and with bytes under way.

Run in a network namespace of its own, of which it takes the loopback device down: `unshare -rn`.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time

from epd.serve_app.network import link
from epd.serve_app.network.calls import Channel
from epd.serve_app.network.link import Link, LinkClosedError, connect, listen

KEY = bytes(32)
WAIT_S = 60.0


def set_loopback(state: str) -> None:
    subprocess.run(["ip", "link", "set", "lo", state], check=True)


def keep_silent(link: Link) -> None:
    """Takes calls, and answers none."""
    Channel(link).on_call = lambda _value, _answer: None


async def seconds() -> dict[str, float]:
    """Returns after how many seconds each of three links has ended at its client; -1 if it has not."""
    listener = await listen("127.0.0.1", KEY, keep_silent)
    channels = {name: Channel(await connect(listener.address, KEY)) for name in ("idle", "pushes", "calls")}
    call = channels["calls"].call("a question")
    await asyncio.sleep(0.2)
    start_s, ended = time.monotonic(), dict.fromkeys(channels, -1.0)
    set_loopback("down")
    for name, channel in channels.items():
        channel.on_close = lambda _reason, name=name: ended.update({name: time.monotonic() - start_s})  # type: ignore[misc]
    channels["pushes"].push("what nobody acknowledges")
    while min(ended.values()) < 0 and time.monotonic() - start_s < WAIT_S:
        await asyncio.sleep(0.05)
    if ended["calls"] >= 0 and not isinstance(call.exception(), LinkClosedError):
        ended["calls"] = -1.0  # its caller would still wait
    return ended


def main() -> None:
    link.SILENT_S, link._PROBE_AFTER_S, link._PROBE_EVERY_S = map(int, sys.argv[1:])
    set_loopback("up")
    print(json.dumps(asyncio.run(seconds())))


if __name__ == "__main__":
    main()
