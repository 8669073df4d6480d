"""Shuts a media child in, as far as the kernel can: code that takes over a decoder finds nothing to reach.

landlock      no file by a path but the code itself, no TCP port, no signal    from Linux 5.13 on
seccomp       no system call that a reader of media does not need              on x86_64 and aarch64
network       a network without any address                                    where it may be left
privileges    none of root's

The filter of system calls, which the kernel runs:

socket, exec, fork, unlink, ptrace, ...  -->  EPERM
open that writes, clone that makes no thread, kill of others  -->  EPERM
another architecture's calls  -->  the process is killed          all else  -->  allowed
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import epd

# Numbers on x86_64 and on aarch64, `-` where there is no such call.
_DENIED = """
socket 41 198, socketpair 53 199, connect 42 203, bind 49 200, listen 50 201, accept 43 202, accept4 288 242,
ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, process_madvise 440 440,
process_mrelease 448 448, kcmp 312 272, pidfd_open 434 434, pidfd_getfd 438 438, pidfd_send_signal 424 424,
tkill 200 130, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, execve 59 221, execveat 322 281,
fork 57 -, vfork 58 -, creat 85 -, openat2 437 437, open_by_handle_at 304 265, unlink 87 -, unlinkat 263 35,
rmdir 84 -, rename 82 -, renameat 264 38, renameat2 316 276, link 86 -, linkat 265 37, symlink 88 -,
symlinkat 266 36, mkdir 83 -, mkdirat 258 34, mknod 133 -, mknodat 259 33, chmod 90 -, fchmod 91 52,
fchmodat 268 53, fchmodat2 452 452, chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54, truncate 76 45,
utime 132 -, utimes 235 -, utimensat 280 88, futimesat 261 -, setxattr 188 5, lsetxattr 189 6,
fsetxattr 190 7, removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16, chroot 161 51,
pivot_root 155 41, mount 165 40, umount2 166 39, open_tree 428 428, move_mount 429 429, fsopen 430 430,
fsconfig 431 431, fsmount 432 432, fspick 433 433, mount_setattr 442 442, unshare 272 97, setns 308 268,
swapon 167 224, swapoff 168 225, reboot 169 142, init_module 175 105, finit_module 313 273,
delete_module 176 106, kexec_load 246 104, kexec_file_load 320 294, bpf 321 280, perf_event_open 298 241,
userfaultfd 323 282, io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427,
add_key 248 217, request_key 249 218, keyctl 250 219, fanotify_init 300 262, quotactl 179 60,
quotactl_fd 443 443, acct 163 89, personality 135 92, setuid 105 146, setgid 106 144, setreuid 113 145,
setregid 114 143, setresuid 117 147, setresgid 119 149, setgroups 116 159, capset 126 91, shmget 29 194,
shmat 30 196, shmctl 31 195, msgget 68 186, msgsnd 69 189, msgrcv 70 188, msgctl 71 187, semget 64 190,
semop 65 193, semctl 66 191, semtimedop 220 192, mq_open 240 180, mq_unlink 241 181, migrate_pages 256 238,
move_pages 279 239, ioprio_set 251 30, setpriority 141 140, sched_setscheduler 144 119,
sched_setparam 142 118, sched_setattr 314 274
"""
# Denied in a way that makes the C library take `clone`, whose flags can be looked at.
_CLONE3 = 435
# Calls that are allowed for some arguments, as above.
_OPEN, _OPENAT, _CLONE = (2, None), (257, 56), (56, 220)
_OF_ITSELF = ((62, 129), (234, 131))  # kill, tgkill
_OF_ITSELF_OR_0 = ((302, 261), (203, 122))  # prlimit64, sched_setaffinity
# Calls of later kernels, and those of the x32 ABI, are unknown.
_FIRST_UNKNOWN = 463

_PLACES = {"x86_64": 0, "aarch64": 1}
_AUDIT_ARCH = (0xC000003E, 0xC00000B7)
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL, _ALLOW = 0x80000000, 0x7FFF0000
_DENY, _UNKNOWN = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16  # in what the kernel shows the filter
_CLONE_THREAD = 0x10000
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if not, operand


def filter_program(machine: str, pid: int) -> list[Instruction]:
    """Returns the filter for a process. machine: of `platform.machine()`. Raises KeyError for another."""
    place = _PLACES[machine]
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH_AT),
        *_unless(_EQUAL, _AUDIT_ARCH[place], _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        *_if(_AT_LEAST, _FIRST_UNKNOWN, _UNKNOWN),
        *_if(_EQUAL, _CLONE3, _UNKNOWN),
    ]
    for number in _denied(place):
        program += _if(_EQUAL, number, _DENY)
    for call, argument in ((_OPEN, 1), (_OPENAT, 2)):
        program += _for_call(call[place], argument, _if(_ANY_BIT, _WRITES, _DENY))
    program += _for_call(_CLONE[place], 0, _unless(_ANY_BIT, _CLONE_THREAD, _DENY))
    for own in _OF_ITSELF:
        program += _for_call(own[place], 0, _unless(_EQUAL, pid, _DENY))
    for own in _OF_ITSELF_OR_0:
        program += _for_call(own[place], 0, [*_if(_EQUAL, 0, _ALLOW), *_unless(_EQUAL, pid, _DENY)])
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def _denied(place: int) -> Iterator[int]:
    for row in _DENIED.replace("\n", " ").split(","):
        number = row.split()[1 + place]
        if number != "-":
            yield int(number)


def _if(test: int, operand: int, result: int) -> list[Instruction]:
    return [(test, 0, 1, operand), (_RETURN, 0, 0, result)]


def _unless(test: int, operand: int, result: int) -> list[Instruction]:
    return [(test, 1, 0, operand), (_RETURN, 0, 0, result)]


def _for_call(number: int | None, argument: int, checks: Sequence[Instruction]) -> list[Instruction]:
    """Returns what allows a call unless one of the checks of its argument returns something else."""
    if number is None:
        return []
    load = (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument)
    return [(_EQUAL, 0, len(checks) + 2, number), load, *checks, (_RETURN, 0, 0, _ALLOW)]


def deny_system_calls(system: ctypes.CDLL) -> bool:
    """Installs the filter for this process for good; returns False where that is impossible.

    The process has one thread, and has given up getting more privileges.
    """
    try:
        program = filter_program(platform.machine(), os.getpid())
    except KeyError:
        return False
    code = b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    described = struct.pack("@HP", len(program), ctypes.addressof(buffer))
    return bool(system.prctl(_PR_SET_SECCOMP, _MODE_FILTER, described, 0, 0) == 0)


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

    def __init__(self, *, opens_gpu: bool = False) -> None:
        """opens_gpu: whether a child needs a driver's files and calls, which landlock and seccomp deny."""
        self._libc, self.opens_gpu = libc(), opens_gpu
        self._ruleset = -1 if opens_gpu else _landlock_ruleset(self._libc)

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
            SECCOMP: not self.opens_gpu and deny_system_calls(system),
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
