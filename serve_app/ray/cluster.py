"""Starts and ends Ray: a cluster owned by this process, or a connection to a running one.

An owned cluster is for one machine: its addresses are loopback as far as Ray allows, it has no dashboard, and
anything that still listens elsewhere requires a token. See docs/deployment.md.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import ray

from epd.errors import EPDError, UnavailableError
from epd.machine import usable_cpus
from epd.serve_app.app_args import KEY_VARIABLES
from epd.serve_app.held_folder import CLUSTER_PREFIX, HeldFolder
from epd.serve_app.ray.gcs_address import checked_gcs
from epd.serve_app.ray.process_tree import end_with_error

# Torch threads that wait by spinning would take cores from other workers, and more than one per worker would
# make them compete; a worker never downloads anything.
WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
LOOPBACK = "127.0.0.1"
# Environment variable for the address of a machine that links are made to; by default that of its Ray node.
LINK_HOST = "EPD_LINK_HOST"
# Serve's proxy calls it when it starts: it limits what one connection may use.
_PROXY_CALLBACK = (
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH",
    "epd.serve_app.http.guard.socket_guard.install",
)
# Ray's name for a cluster of one's own, and its variable for the address of another.
LOCAL, ADDRESS_VARIABLE = "local", "RAY_ADDRESS"
# From the first word to a cluster until the process belongs to it.
_CONNECT_S = 25.0
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_MAX_REASON = 400
# For Ray's accounting only. Workers of this app request none, but others in the cluster may.
_LEAST_CPUS = 8
# Of a cluster that starts here. What goes between workers does not pass through it.
_OBJECT_STORE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class RaySettings:
    """Configures Ray.

    address: of a running cluster; None starts one, with num_cpus
    shows_logs: whether the logs of its processes are written to stderr
    """

    address: str | None = None
    num_cpus: int | None = None
    namespace: str = "epd"
    shows_logs: bool = False


@contextmanager
def ray_cluster(settings: RaySettings | None = None) -> Iterator[None]:
    """Connects the process to Ray while open. A cluster that was started for this ends with it.

    Raises UnavailableError if the cluster does not start or cannot be reached.
    """
    settings = settings or RaySettings()
    with _folder_for_imports() as folder:
        try:
            with chdir(folder):
                if settings.address is None:
                    _start(settings)
                else:
                    _connect(settings)
            yield
        finally:
            ray.shutdown()


@contextmanager
def _folder_for_imports() -> Iterator[Path]:
    """Yields the folder to start Ray in, which is first on the import path of all workers.

    This is the current folder if this process imports from it too, and an empty one otherwise: packages in
    the folder where `epd serve` happens to be started would shadow ours.
    """
    here = Path.cwd()
    if any(Path(entry).resolve() == here for entry in sys.path):
        yield here
        return
    folder = HeldFolder(Path(tempfile.gettempdir()) / f"{CLUSTER_PREFIX}{secrets.token_hex(8)}")
    try:
        yield folder.path
    finally:
        folder.remove()


def ray_folder() -> Path:
    """Returns where Ray keeps its sessions: in Ray's own place, since paths of sockets must be short."""
    names = ("RAY_TMPDIR", "TMPDIR") if sys.platform == "linux" else ("RAY_TMPDIR",)
    above = next(filter(None, map(os.environ.get, names)), "/tmp")
    return Path(above) / f"ray-{os.getuid()}" / "ray"


def own_ray_folder() -> Path:
    """Returns where Ray keeps its sessions, with logs and sockets, which it opens to every user.

    The folder above is of this user alone. Raises UnavailableError where it is another's.
    """
    folder = ray_folder().parent
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise UnavailableError(f"'{folder}' is no folder of this user's; remove it, or set RAY_TMPDIR")
    folder.chmod(0o700)
    return ray_folder()


def _start(settings: RaySettings) -> None:
    """Starts a new cluster, even if another runs on this machine. Its processes inherit the environment."""
    os.environ |= {name: value for name, value in WORKER_ENVIRONMENT.items() if name not in os.environ}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's default is 15, which would give other processes of the machine precedence over all workers.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault(LINK_HOST, LOOPBACK)
    os.environ.setdefault(*_PROXY_CALLBACK)
    # By default the only proxy is checked every 10 s, and restarted after being found dead three times.
    os.environ.setdefault("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "0.2")
    # Every replica pushes Serve's own metrics ten times a second by default, idle or not.
    os.environ.setdefault("RAY_SERVE_METRICS_EXPORT_INTERVAL_MS", "10000")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # its owner may run code as this user
    folder = own_ray_folder()
    try:
        with _without_keys():
            ray.init(
                address="local",
                namespace=settings.namespace,
                num_cpus=settings.num_cpus or max(_LEAST_CPUS, 2 * usable_cpus()),
                object_store_memory=_OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=settings.shows_logs,
                logging_level=logging.ERROR,
                _node_ip_address=LOOPBACK,
                _temp_dir=str(folder),
            )
    except Exception as error:  # Ray's own are of any class
        raise UnavailableError(f"Ray does not start: {reason_of(error)}; see the logs in {folder}") from error


@contextmanager
def _without_keys() -> Iterator[None]:
    """Leaves the keys out of the environment that Ray's processes inherit; fronts have them as arguments."""
    keys = {name: os.environ.pop(name) for name in KEY_VARIABLES.values() if name in os.environ}
    try:
        yield
    finally:
        os.environ |= keys


def _connect(settings: RaySettings) -> None:
    """Connects to a cluster, and passes workers the environment, since its processes have another one.

    Raises UnavailableError, or ends the process with it where Ray does not come back.
    """
    assert settings.address is not None
    late = UnavailableError(
        f"the Ray cluster at '{settings.address}' lets nobody in for {_CONNECT_S:.0f} s; see its logs"
    )
    limit = threading.Timer(_CONNECT_S, end_with_error, [late])
    limit.daemon = True
    limit.start()
    try:
        ray.init(
            address=checked_gcs(settings.address),
            namespace=settings.namespace,
            runtime_env={"env_vars": WORKER_ENVIRONMENT},
            log_to_driver=settings.shows_logs,
            logging_level=logging.ERROR,
        )
    except EPDError:
        raise
    except Exception as error:  # Ray's own are of any class
        raise UnavailableError(
            f"the Ray cluster at '{settings.address}' cannot be joined: {reason_of(error)}; run this on one "
            "of its machines, with its version of Ray and of Python and its token"
        ) from error
    finally:
        limit.cancel()


def reason_of(error: BaseException) -> str:
    """Returns what an error of Ray's says, on one line and without colours, with that behind it."""
    said = [error, *([error.__cause__] if error.__cause__ is not None else [])]
    texts = [" ".join(_COLOUR.sub("", str(each)).split()) or type(each).__name__ for each in said]
    reason = ": ".join(dict.fromkeys(texts))
    return reason if len(reason) <= _MAX_REASON else f"{reason[:_MAX_REASON]}..."
