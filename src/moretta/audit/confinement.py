"""Keep a process to what it has: no files but those of some folders, for reading, no sockets, no other processes.

A hook on Python's audit events refuses what Python code tries. That stops mistakes and curiosity, not an attack that
means harm: `gc` reaches what the hook holds, and native code passes it by. Where Linux has Landlock (5.13 on), the
kernel also refuses native code files, TCP, signals to others and looks at other processes, but not UDP, Unix sockets or
forks. An attack can always find out whether a path that it guesses exists.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moretta.errors import RunFailed

_REFUSED = (
    "socket.",
    "subprocess.",
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "os.kill",
    "ctypes.",
    "pty.",
    "resource.",  # limits, of other processes too
    "os.chdir",  # and os.fchdir, so that a relative path means one place
    "sqlite3.",  # which opens files by itself
)
_READS = ("open", "os.listdir", "os.scandir", "os.getxattr", "os.listxattr")
_WRITES = (
    "os.remove", "os.rename", "os.link", "os.symlink", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod", "os.chown",
    "os.utime", "os.setxattr", "os.removexattr", "os.chflags", "os.lockf",
)  # fmt: skip
_CREATE, _ADD, _RESTRICT = 444, 445, 446  # Landlock's system calls, the same on all architectures
_HARMLESS = (os.devnull, "/dev/urandom")
# What the system's libraries read as they are loaded, beside the installed packages.
_SYSTEM = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/usr/share/zoneinfo",
    "/etc/localtime", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/sys/devices/system",
    f"{sys.base_prefix}/lib", *_HARMLESS,
)  # fmt: skip


def confine(folders: Sequence[Path]) -> None:
    """Refuse this process from now on all files, sockets and processes, except files of some folders for reading.

    folders: single files may be among them.
    """
    allowed = tuple(f"{folder.resolve()}{os.sep}" for folder in folders)
    # What `watch` uses it has from here: an attack can bind anew what modules and `builtins` hold, of os.path all.
    refused, changing, reading, harmless = _REFUSED, _WRITES, _READS, _HARMLESS
    kind, text, data, number = type, str, bytes, int
    readlink, fspath, here = os.readlink, os.fspath, os.getcwd()
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

    def real(path: str) -> str:
        """Do as `os.path.realpath` on POSIX."""
        found, links = "", 0
        parts = (path if path.startswith("/") else f"{here}/{path}").split("/")[::-1]
        while parts:
            part = parts.pop()
            if part == "..":
                found = found.rpartition("/")[0]
            elif part not in ("", "."):
                try:
                    target = readlink(f"{found}/{part}")
                except OSError:  # no link, or nothing there
                    found = f"{found}/{part}"
                    continue
                links += 1
                if links > 40:  # as Linux does
                    raise PermissionError("an attack is given its case and nothing else, and tried a loop of links")
                found = "" if target.startswith("/") else found
                parts += target.split("/")[::-1]
        return found or "/"

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "ctypes.dlopen" and kind(arguments[0]) is text and real(arguments[0]).startswith(allowed):
            return  # as torch does when it is imported; no function in it can be looked up
        if event.startswith(refused) or event in changing:
            raise PermissionError(f"an attack is given its case and nothing else, and tried {event}")
        if event not in reading or not arguments or kind(arguments[0]) is number:
            return
        path: Any = "." if arguments[0] is None else arguments[0]
        path = path if event == "open" else fspath(path)  # libraries list folders by pathlib
        path = path.decode("utf-8", "surrogateescape") if kind(path) is data else path
        if kind(path) is not text:  # an object that Python makes a path of may give the system another path than here
            raise PermissionError(f"an attack is given its case and nothing else, and tried {event} of no plain path")
        # os.open alone reports no mode. It may have been given a dir_fd, which it does not report either.
        elsewhere = event == "open" and arguments[1] is None and not path.startswith("/")
        writes = event == "open" and (arguments[2] or 0) & writing
        path = real(path)
        inside = f"{path}/".startswith(allowed)
        if elsewhere or (path not in harmless and (writes or not inside)):
            raise PermissionError(f"an attack is given its case and nothing else, and tried {event} of a file")

    tempfile.tempdir = os.devnull  # nobody can write there; libraries that ask for its name find it without trying
    if landlock() and not kernel(folders):
        raise RunFailed("expected the kernel to confine this process, as it has Landlock; it refused")
    # No audit event tells of this one, by which multiprocessing starts Python anew.
    for module in filter(None, (sys.modules.get("_posixsubprocess"), subprocess)):
        for name in {"fork_exec", "_fork_exec"} & vars(module).keys():
            setattr(module, name, _refused)
    sys.addaudithook(watch)


def landlock() -> int:
    """Return the version of the kernel's Landlock, 0 where it has none."""
    if not sys.platform.startswith("linux"):
        return 0
    return max(0, int(ctypes.CDLL(None, use_errno=True).syscall(_CREATE, None, ctypes.c_size_t(0), 1)))


def kernel(folders: Sequence[Path]) -> bool:
    """Have the kernel refuse this process the same, for ever, where it can; return whether it does.

    Landlock, docs.kernel.org/userspace-api/landlock.html: files but for reading in those folders, programs, TCP, other
    processes' /proc, and signals to them.
    """
    version = landlock()
    if not version:
        return False
    call = ctypes.CDLL(None, use_errno=True).syscall
    read_file, read_folder, every = 1 << 2, 1 << 3, (1 << {1: 13, 2: 14}.get(version, 15)) - 1
    tcp, scopes = 3, 3  # both of each
    parts = (every, tcp, scopes)[: 3 if version >= 6 else 2 if version >= 4 else 1]
    wanted = struct.pack(f"={len(parts)}Q", *parts)
    rules = call(_CREATE, wanted, ctypes.c_size_t(len(wanted)), 0)
    for path in (*map(str, folders), *filter(os.path.exists, _SYSTEM)):
        file = os.open(path, os.O_PATH)
        rights = read_file | (read_folder if os.path.isdir(path) else 0)
        call(_ADD, rules, 1, struct.pack("=Qi", rights, file), 0)
        os.close(file)
    no_new_privileges = ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)
    held = bool(rules >= 0 and no_new_privileges == 0 and call(_RESTRICT, rules, 0) == 0)
    if rules >= 0:
        os.close(rules)
    return held


def _refused(*arguments: object) -> None:
    raise PermissionError("an attack is given its case and nothing else, and tried to start a process")
