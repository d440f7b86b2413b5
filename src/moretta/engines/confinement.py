"""Confinement of a process that runs another party's code or graph.

An audit's attack, a model from a graph and an edge client's ONNX file run in such processes. Each starts in an empty
folder (`empty_folder`), so that a relative path names nothing, and calls `confine` before it reads its code or graph.
That bounds its memory and prevents a core dump with rows. With Linux's Landlock (from 5.13) the kernel refuses files,
except reading in some folders, and TCP, signals to others and access to other processes. It does not refuse UDP, Unix
sockets or forks. A process can always find out whether a guessed path exists.

`watch` is for Python code, such as an attack. A hook on Python's audit events refuses its files, sockets and processes.
It stops mistakes and curiosity, not intent: `gc` reaches the hook's objects, and native code bypasses it.
"""

import contextlib
import ctypes
import os
import resource
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
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
    "os.chdir",  # and os.fchdir, so that a relative path has one meaning
    "sqlite3.",  # it opens files without an event
)
_READS = ("open", "os.listdir", "os.scandir", "os.getxattr", "os.listxattr")
_WRITES = (
    "os.remove", "os.rename", "os.link", "os.symlink", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod", "os.chown",
    "os.utime", "os.setxattr", "os.removexattr", "os.chflags", "os.lockf",
)  # fmt: skip
_CREATE, _ADD, _RESTRICT = 444, 445, 446  # Landlock's system calls, the same on all architectures
_HARMLESS = (os.devnull, "/dev/urandom")
# Files that the system's libraries read when they are loaded, beside the installed packages.
_SYSTEM = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/usr/share/zoneinfo",
    "/etc/localtime", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/sys/devices/system",
    f"{sys.base_prefix}/lib", *_HARMLESS,
)  # fmt: skip
SHARE = 0.5  # of the machine's memory that a confined process may take
_SAYS = "a confined process is given its input and nothing else, and tried"


@contextlib.contextmanager
def empty_folder() -> Iterator[str]:
    """Yield an empty folder for a process to start in; only root could write there."""
    with tempfile.TemporaryDirectory(prefix="moretta-empty-") as folder:
        os.chmod(folder, 0o500)
        yield folder


def confine(folders: Sequence[Path], written: Sequence[Path] = ()) -> None:
    """Refuse this process, for ever, all files but some.

    Args:
        folders: folders and single files that it may read.
        written: existing files, and folders of such, that it may also write. It can create none.

    Raises:
        RunFailed: the kernel has Landlock and refused to confine the process.
    """
    tempfile.tempdir = os.devnull  # not writable; libraries accept it without a test
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = int(SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    bounds = [bound for bound in (most, *resource.getrlimit(resource.RLIMIT_DATA)) if bound != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(bounds), min(bounds)))
    if landlock() and not kernel(folders, written):
        raise RunFailed("expected the kernel to confine this process, as it has Landlock; it refused")


def readable() -> Sequence[Path]:
    """Return the folders that a confined process may read: this package, Python's library and its neighbours.

    They exclude `sys.prefix`, because a run folder may be below it.
    """
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    installed = [
        paths[name]
        for paths in (sysconfig.get_paths(), sysconfig.get_paths(vars=base))
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
    ]
    site = [entry for entry in sys.path if "-packages" in entry]
    folders = [Path(__file__).parents[1], *map(Path, (*installed, *site))]
    return list(filter(Path.is_dir, dict.fromkeys(folders)))


def watch(folders: Sequence[Path]) -> None:
    """Refuse this process's Python code all files, sockets and processes, except reading in some folders.

    Args:
        folders: As for `confine`, which must be called first.
    """
    allowed = tuple(f"{folder.resolve()}{os.sep}" for folder in folders)
    # `refuse` uses these local names, because an attack can rebind the names of modules, `builtins` and os.path.
    refused, changing, reading, harmless = _REFUSED, _WRITES, _READS, _HARMLESS
    kind, text, data, number = type, str, bytes, int
    readlink, fspath, says = os.readlink, os.fspath, _SAYS
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

    def real(path: str) -> str:
        """Do as `os.path.realpath` on POSIX of an absolute path."""
        resolved, links = "", 0
        parts = path.split("/")[::-1]
        while parts:
            part = parts.pop()
            if part == "..":
                resolved = resolved.rpartition("/")[0]
            elif part not in ("", "."):
                try:
                    target = readlink(f"{resolved}/{part}")
                except OSError:  # not a link, or absent
                    resolved = f"{resolved}/{part}"
                    continue
                links += 1
                if links > 40:  # as Linux does
                    raise PermissionError(f"{says} a loop of links")
                resolved = "" if target.startswith("/") else resolved
                parts += target.split("/")[::-1]
        return resolved or "/"

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "ctypes.dlopen" and kind(arguments[0]) is text and real(arguments[0]).startswith(allowed):
            return  # torch does so when it is imported; no function in it can be looked up
        if event.startswith(refused) or event in changing:
            raise PermissionError(f"{says} {event}")
        if event not in reading or not arguments or kind(arguments[0]) is number:
            return
        path: Any = "." if arguments[0] is None else arguments[0]
        path = path if event == "open" else fspath(path)  # libraries list folders by a pathlib path
        path = path.decode("utf-8", "surrogateescape") if kind(path) is data else path
        if kind(path) is not text:  # a path-like object may give the system another path than it gives here
            raise PermissionError(f"{says} {event} of no plain path")
        writes = event == "open" and (arguments[2] or 0) & writing
        # The working directory is empty, and os.open does not report the folder of a relative path.
        elsewhere = not path.startswith("/")
        path = real(path)
        inside = f"{path}/".startswith(allowed)
        if elsewhere or (path not in harmless and (writes or not inside)):
            raise PermissionError(f"{says} {event} of a file")

    # No audit event reports this function, by which multiprocessing starts Python.
    for module in filter(None, (sys.modules.get("_posixsubprocess"), subprocess)):
        for name in {"fork_exec", "_fork_exec"} & vars(module).keys():
            setattr(module, name, _refused)
    sys.addaudithook(refuse)


def landlock() -> int:
    """Return the version of the kernel's Landlock, 0 without it."""
    if not sys.platform.startswith("linux"):
        return 0
    return max(0, int(ctypes.CDLL(None, use_errno=True).syscall(_CREATE, None, ctypes.c_size_t(0), 1)))


def kernel(folders: Sequence[Path], written: Sequence[Path] = ()) -> bool:
    """Have the kernel refuse the same, permanently, if it can; return whether it does.

    With Landlock, docs.kernel.org/userspace-api/landlock.html, it refuses all other files, programs, TCP, other
    processes' /proc, and signals to them. It confines only this thread and its descendants.

    Args:
        folders: Folders and files that may be read.
        written: Files that may be read and written.
    """
    version = landlock()
    if not version:
        return False
    call = ctypes.CDLL(None, use_errno=True).syscall
    write_file, read_file, read_folder, every = 1 << 1, 1 << 2, 1 << 3, (1 << {1: 13, 2: 14}.get(version, 15)) - 1
    tcp, scopes = 3, 3  # both of each
    parts = (every, tcp, scopes)[: 3 if version >= 6 else 2 if version >= 4 else 1]
    ruleset = struct.pack(f"={len(parts)}Q", *parts)
    rules = call(_CREATE, ruleset, ctypes.c_size_t(len(ruleset)), 0)
    write_file |= 1 << 14 if version >= 3 else 0  # truncating, which earlier versions could not refuse
    writable = set(map(str, written))
    for path in (*map(str, folders), *writable, *filter(os.path.exists, _SYSTEM)):
        file = os.open(path, os.O_PATH)
        rights = read_file | (read_folder if os.path.isdir(path) else 0) | (write_file if path in writable else 0)
        call(_ADD, rules, 1, struct.pack("=Qi", rights, file), 0)
        os.close(file)
    no_new_privileges = ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)
    held = bool(rules >= 0 and no_new_privileges == 0 and call(_RESTRICT, rules, 0) == 0)
    if rules >= 0:
        os.close(rules)
    return held


def _refused(*arguments: object) -> None:
    raise PermissionError(f"{_SAYS} to start a process")
