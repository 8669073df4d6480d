"""Starting and ending Ray: a cluster of this process's own, or a connection to one that runs already.

A cluster of one's own is for one machine: its addresses are loopback as far as Ray allows, there is no
dashboard, and what still listens elsewhere asks for a token. See docs/deployment.md.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray

from epd.errors import UnavailableError
from epd.machine import usable_cpus
from serve_app.held_folder import CLUSTER_PREFIX, HeldFolder

# Threads of torch that wait by spinning would take the cores from other workers, and more than one for each
# worker would have them compete; a worker never downloads anything.
WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
LOOPBACK = "127.0.0.1"
# Serve's proxy calls it when it starts: it bounds what one connection may take.
_PROXY_CALLBACK = ("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", "serve_app.http.socket_guard.install")
# Of Ray's accounting alone. Workers of this app ask for none, but what else runs in the cluster may.
_LEAST_CPUS = 8


@dataclass(frozen=True, slots=True)
class RaySettings:
    """address: of a running cluster; None starts one, with num_cpus and object_store_bytes.

    object_store_bytes: memory for frames on their way and, between machines, embeddings, keys and values.
    shows_logs: whether what its processes log comes to stderr.
    """

    address: str | None = None
    num_cpus: int | None = None
    object_store_bytes: int = 256 << 20
    namespace: str = "epd"
    shows_logs: bool = False


@contextmanager
def ray_cluster(settings: RaySettings | None = None) -> Iterator[None]:
    """While this is open the process is connected to Ray. A cluster that was started for it ends with it.

    Raises UnavailableError when the cluster does not start or is not there.
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
    """The folder to start Ray in: it stands first on the import path of all workers.

    The current one where this process imports from it too, and an empty one otherwise: packages that lie
    where `epd serve` happens to be started would be imported instead of ours.
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


def _start(settings: RaySettings) -> None:
    """A new cluster, even where another runs on this machine. Its processes inherit the environment."""
    os.environ |= {name: value for name, value in WORKER_ENVIRONMENT.items() if name not in os.environ}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's own default is 15: whatever else the machine runs would come before all that answers requests.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault(*_PROXY_CALLBACK)
    # By default the only proxy is looked at every 10 s, and started again when it was dead three times.
    os.environ.setdefault("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "0.2")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # who has it may run code as this user
    try:
        ray.init(
            address="local",
            namespace=settings.namespace,
            num_cpus=settings.num_cpus or max(_LEAST_CPUS, 2 * usable_cpus()),
            object_store_memory=settings.object_store_bytes,
            include_dashboard=False,
            log_to_driver=settings.shows_logs,
            logging_level=logging.ERROR,
            _node_ip_address=LOOPBACK,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise UnavailableError(f"Ray does not start: {error}; see the logs in /tmp/ray") from error


def _connect(settings: RaySettings) -> None:
    """Workers are given their environment, since the cluster's processes run in another."""
    try:
        ray.init(
            address=settings.address,
            namespace=settings.namespace,
            runtime_env={"env_vars": WORKER_ENVIRONMENT},
            log_to_driver=settings.shows_logs,
            logging_level=logging.ERROR,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise UnavailableError(
            f"no Ray cluster answers at '{settings.address}': {error}; start one or leave out the address"
        ) from error
