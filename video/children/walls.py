"""Shuts a media child in, as far as the kernel can: code that takes over a decoder finds nothing to reach.

landlock      no file by a path but the code itself, no TCP port, no signal    from Linux 5.13 on
seccomp       no system call that a reader of media does not need              on x86_64 and aarch64
network       a network without any address                                    where it may be left
privileges    none of root's
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import epd
from epd.video.children.syscall_filter import deny_system_calls

LANDLOCK, SECCOMP, NETWORK, PRIVILEGES = "landlock", "seccomp", "network", "privileges"
WALLS = (LANDLOCK, SECCOMP, NETWORK, PRIVILEGES)
# Those that each keep a child from all that is not its own.
REQUIRED_WALLS = (LANDLOCK, SECCOMP)

_PR_SET_NO_NEW_PRIVS, _PR_SET_DUMPABLE = 38, 4
_NEW_NETWORK = (0x40000000, 0x50000000)  # by its own right, or within a new user namespace
_CAPABILITY_VERSION_3 = 0x20080522
# Numbers of the calls on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_GET_VERSION, _RULE_PATH_BENEATH = 1, 1
_READ_FILE, _READ_FOLDER = 1 << 2, 1 << 3
_PYTHON_CODE = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_PACKAGE_FOLDERS = frozenset(("site-packages", "dist-packages"))
_SYSTEM_CODE = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")


def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


class Walls:
    """Prepares the walls in the process that forks children, and puts them up in a child."""

    def __init__(self) -> None:
        self._libc = libc()
        self._ruleset = _landlock_ruleset(self._libc)

    def enter(self) -> tuple[str, ...]:
        """Puts up all walls that the kernel has around this process, for good. Returns their names.

        For a process with one thread. Its open files and sockets stay as they are.
        """
        system = self._libc
        has_network = any(system.unshare(flags) == 0 for flags in _NEW_NETWORK)
        has_privileges = _drop_privileges(system)
        system.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        has_landlock = self._ruleset >= 0 and system.syscall(_RESTRICT_SELF, self._ruleset, 0) == 0
        if self._ruleset >= 0:
            os.close(self._ruleset)
        stands = {
            NETWORK: has_network,
            PRIVILEGES: has_privileges,
            LANDLOCK: has_landlock,
            SECCOMP: deny_system_calls(system),
        }
        return tuple(wall for wall in WALLS if stands[wall])


def hide_process() -> None:
    """Keeps other processes of this user from reading this one's memory and environment, and from tracing it.

    Its children are such processes, and so are debuggers. It leaves no core dumps any more.
    """
    libc().prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def _drop_privileges(system: ctypes.CDLL) -> bool:
    header = struct.pack("<Ii", _CAPABILITY_VERSION_3, 0)
    return bool(system.capset(header, bytes(24)) == 0)


def _landlock_ruleset(system: ctypes.CDLL) -> int:
    """Returns a descriptor of rules that allow code to be read and nothing else, -1 without Landlock."""
    version = system.syscall(_CREATE_RULESET, None, 0, _GET_VERSION)
    if version < 1:
        return -1
    files = (1 << 13 + (version >= 2) + (version >= 3) + (version >= 5)) - 1
    handled = struct.pack("<QQQ", files, 3, 3)[: 8 + 8 * (version >= 4) + 8 * (version >= 6)]
    ruleset: int = system.syscall(_CREATE_RULESET, handled, len(handled), 0)
    for folder in _code_folders() if ruleset >= 0 else ():
        _allow_reading(system, ruleset, folder)
    return ruleset


def _allow_reading(system: ctypes.CDLL, ruleset: int, folder: str) -> None:
    with suppress(OSError):  # a folder that is not there, or not for this user
        descriptor = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("<Qi", _READ_FILE | _READ_FOLDER, descriptor)
        system.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0)
        os.close(descriptor)


def _code_folders() -> Iterable[str]:
    """Returns where Python and its packages are, of which a reader may import some more, and the system's.

    Packages may lie in several folders: of a base environment, of the distribution, of a .pth file. Other
    folders of `sys.path`, such as the one that a program was started in, have no place here.
    """
    packages = {folder for folder in sys.path if Path(folder).name in _PACKAGE_FOLDERS}
    ours = {str(Path(folder) / room) for folder in epd.__path__ for room in (".", "video")}
    return sorted(_PYTHON_CODE | packages | ours | set(_SYSTEM_CODE))
