"""The bound on memory: what is read may take no more than what is free, and an error names the file that would."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moretta.errors import ParameterError

CHECKED_BYTES = 1 << 26  # less than this is not checked, as the question would cost more
CONTAINER = Path("/sys/fs/cgroup")  # as a process in one sees its own
ADVICE = "use a smaller file, or a machine with more memory"


def free_memory() -> int:
    """Return the bytes of memory that are free: of the machine, a container and the limits on this process."""
    import psutil  # slow to import, and few callers ask

    free = [int(psutil.virtual_memory().available)]
    with suppress(OSError, ValueError):  # "max" is no number
        most, used = (int(Path(CONTAINER, name).read_text()) for name in ("memory.max", "memory.current"))
        words = Path(CONTAINER, "memory.stat").read_text().split()
        cached = sum(int(words[words.index(kind) + 1]) for kind in ("active_file", "inactive_file"))
        free.append(max(most - used + cached, 0))  # what is kept of files goes where memory is needed
    with suppress(ImportError, OSError, ValueError, IndexError):  # another system than Linux
        import resource

        lines = Path("/proc/self/status").read_text().splitlines()
        for limit, field in ((resource.RLIMIT_AS, "VmSize:"), (resource.RLIMIT_DATA, "VmData:")):
            used = next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
            most, _ = resource.getrlimit(limit)
            free += [max(most - used, 0)] if most >= 0 else []
    return min(free)


def check_memory(size: float, what: str, advice: str = ADVICE) -> None:
    """Raise ParameterError where something would take more memory than is free.

    Args:
        size: The memory that it takes, in bytes.
        what: Its name and the verb, "FILE takes" or "ROWS take", which begin the sentence.
        advice: What to do, which ends the sentence.
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
    # Outside of the handler, so that the frames and what they hold are gone.
    raise ParameterError(f"{what} takes more memory than the {_gib(free)} that are free; {ADVICE}")


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
