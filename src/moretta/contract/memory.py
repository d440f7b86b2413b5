"""The bound on memory: reading may take no more than is free, and an error names the file that would."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moretta.errors import ParameterError

CHECKED_BYTES = 1 << 26  # less is not checked, because the check would cost more
CONTAINER = Path("/sys/fs/cgroup")  # as a process in the container sees it
ADVICE = "use a smaller file, or a machine with more memory"


def free_memory() -> int:
    """Return the bytes of free memory, within the limits of the machine, a container and this process."""
    import psutil  # slow to import, and few callers need it

    free = [int(psutil.virtual_memory().available)]
    with suppress(OSError, ValueError):  # "max" is not a number
        most, used = (int(Path(CONTAINER, name).read_text()) for name in ("memory.max", "memory.current"))
        words = Path(CONTAINER, "memory.stat").read_text().split()
        cached = sum(int(words[words.index(kind) + 1]) for kind in ("active_file", "inactive_file"))
        free.append(max(most - used + cached, 0))  # the system drops cached files when memory is needed
    with suppress(ImportError, OSError, ValueError, IndexError):  # only Linux has these files
        import resource

        lines = Path("/proc/self/status").read_text().splitlines()
        for limit, field in ((resource.RLIMIT_AS, "VmSize:"), (resource.RLIMIT_DATA, "VmData:")):
            used = next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
            most, _ = resource.getrlimit(limit)
            free += [max(most - used, 0)] if most >= 0 else []
    return min(free)


def check_memory(size: float, what: str, advice: str = ADVICE) -> None:
    """Raise ParameterError if something would take more memory than is free.

    Args:
        size: Its memory, in bytes.
        what: The beginning of the sentence, its name and a verb: "FILE takes" or "ROWS take".
        advice: The end of the sentence, what to do.
    """
    if size >= CHECKED_BYTES and size > (free := free_memory()):
        raise ParameterError(f"{what} {_gib(size)} of memory, and {_gib(free)} are free; {advice}")


@contextmanager
def within_memory(what: str) -> Iterator[None]:
    """Turn a MemoryError of reading a file into a ParameterError. what: the file, which begins the sentence."""
    free = 0
    try:
        yield
    except MemoryError:
        free = free_memory()
    else:
        return
    # Raised outside the handler, so that the failed frames and their memory are released first.
    raise ParameterError(f"{what} takes more memory than the {_gib(free)} that are free; {ADVICE}")


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
