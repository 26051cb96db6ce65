"""Processes that work side by side, and hand over what they make without copying it through a pipe.

Knows processes, sockets and files without a name; does not know what is made. Law: what one process makes comes in its
order and at most a few results ahead of who takes it; a process that fails or ends makes its taker fail; and no process
outlives its pool.

    with Pool(4) as pool:
        for results in pool.run(function, [(part,) for part in four_parts]):
            for each in results: ...

Processes are started afresh, not forked, so that threads and connections of the caller do no harm, and they do not run
the caller's main module again. A result is a file in memory that both sides map: its arrays are written once and read
in place.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import count
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from replay.errors import WorkerLost

AHEAD = 2
"""Results that a process may have made and that nobody has taken yet."""
_ALIGNED = 64
"""Parts of a result begin at multiples of so many bytes, as Arrow and numpy like them."""
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from replay.pool import serve
serve(int(sys.argv[1]))
"""
_JOB, _RESULT, _END, _ERROR, _TAKEN = b"j", b"r", b"e", b"x", b"t"


class Pool:
    """Some processes, started at once and used for one run after the other until the pool is closed."""

    def __init__(self, processes: int) -> None:
        if processes < 1:
            raise ValueError(f"a pool of {processes} processes makes nothing: give 1 or more")
        self.processes = processes
        self._workers = [_Worker() for _ in range(processes)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ready(self) -> None:
        """Wait until each process has imported what it needs; `run` does not need it."""
        for results in self.run(_nothing, [()] * self.processes):
            for _ in results:
                pass

    def close(self) -> None:
        """End the processes, whatever they are at."""
        for worker in self._workers:
            worker.end()

    def run(self, function: Callable[..., Iterator[Any]], jobs: Sequence[tuple[Any, ...]]) -> list[Generator[Any]]:
        """Begin `function(*job)` for each job, each in a process of its own.

        Args:
            function: of a module; yields what can be pickled, best a few large arrays.
            jobs: arguments of each call; at most one for each process.

        Returns, for each job, what the function yields. Take all of it, or close it: a process whose results are left
        is replaced by the next run. Taking raises what the function raised, and WorkerLost when its process ended.
        """
        if len(jobs) > self.processes:
            raise ValueError(f"{len(jobs)} jobs for {self.processes} processes: give each process at most one")
        for place, worker in enumerate(self._workers):
            if not worker.idle:
                worker.end()
                self._workers[place] = _Worker()
        return [worker.run(function, job) for worker, job in zip(self._workers, jobs, strict=False)]


def _nothing() -> Iterator[None]:
    yield from ()


class _Worker:
    """A process, as seen by the one that started it."""

    def __init__(self) -> None:
        self._link, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), json.dumps(sys.path)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self.idle = True

    def run(self, function: Callable[..., Iterator[Any]], job: tuple[Any, ...]) -> Generator[Any]:
        self.idle = False
        with suppress(ConnectionError):  # it has ended, which its taker is told
            _send(self._link, _JOB, (function, job))
        return self._results()

    def _results(self) -> Generator[Any]:
        try:
            kind, value = _receive(self._link)
            while kind == _RESULT:
                self._link.sendall(_TAKEN)
                yield value
                del value  # before the next one comes
                kind, value = _receive(self._link)
            self.idle = True
        except (EOFError, ConnectionError) as error:
            raise WorkerLost(self._process.wait()) from error
        finally:
            if not self.idle:
                self.end()
        if kind == _ERROR:
            raise _error(*value)

    def end(self) -> None:
        self._link.close()
        self._process.kill()
        self._process.wait()


def serve(descriptor: int) -> None:
    """Do one job after the other, as a process of a pool, until the pool is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool ends it
    import_module("replay.making")  # what it will be asked for, while the caller is still looking for work
    gc.freeze()  # what stays is not looked through again, and what comes, between two results
    gc.disable()

    with socket.socket(fileno=descriptor) as link, suppress(EOFError, ConnectionError):
        while True:
            kind, value = _receive(link)
            if kind == _JOB:  # not a late word that a result of the job before was taken
                _work(link, *value)


def _work(link: socket.socket, function: Callable[..., Iterator[Any]], job: tuple[Any, ...]) -> None:
    results = function(*job)
    for number in count():
        try:
            result = next(results)
        except StopIteration:
            _send(link, _END, None)
            return
        except Exception as error:
            _send(link, _ERROR, _told(error))
            return
        if number >= AHEAD:
            _receive(link)  # one was taken
        _send(link, _RESULT, result)
        del result
        gc.collect()


def _told(error: Exception) -> tuple[type[Exception], tuple[Any, ...], dict[str, Any], str]:
    """An error as it can be handed over: pickled as it is, an error with arguments of its own could not be read."""
    trace = "".join(traceback.format_exception(error))
    told = (type(error), error.args, vars(error), trace)
    try:
        pickle.dumps(told)
    except Exception:
        return RuntimeError, (str(error),), {}, trace
    return told


def _error(kind: type[Exception], arguments: tuple[Any, ...], state: dict[str, Any], trace: str) -> Exception:
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(state)
    error.add_note(f"In a process of the pool:\n{trace}")
    return error


def _send(link: socket.socket, kind: bytes, value: Any) -> None:
    """Hand over a value: its sizes, its pickle and its arrays, one after the other in a file without a name."""
    arrays: list[memoryview] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=lambda array: arrays.append(array.raw()))
    parts = [memoryview(head), *arrays]
    sizes = struct.pack(f"<{1 + len(parts)}Q", len(parts), *map(len, parts))
    descriptor = _nameless()
    try:
        at = 0
        for part in (memoryview(sizes), *parts):
            at += -at % _ALIGNED
            os.lseek(descriptor, at, os.SEEK_SET)
            at += len(part)
            while part:
                part = part[os.write(descriptor, part) :]
        socket.send_fds(link, [kind], [descriptor])
    finally:
        os.close(descriptor)


def _receive(link: socket.socket) -> tuple[bytes, Any]:
    """What the other side sent; its arrays are read-only views. Raises EOFError when it is gone."""
    kind, descriptors, _, _ = socket.recv_fds(link, 1, 1)
    if not kind:
        raise EOFError("the other side is gone")
    if not descriptors:
        return kind, None
    try:
        with pa.memory_map(f"/dev/fd/{descriptors[0]}") as file:  # unlike Python's mmap, its views hold no descriptor
            whole = memoryview(file.read_buffer())
    finally:
        os.close(descriptors[0])
    (number,) = struct.unpack_from("<Q", whole)
    parts: list[memoryview] = []
    at = 8 * (1 + number)
    for size in struct.unpack_from(f"<{number}Q", whole, 8):
        at += -at % _ALIGNED
        parts.append(whole[at : at + size])
        at += size
    return kind, pickle.loads(parts[0], buffers=parts[1:])  # from a process of this pool


def _nameless() -> int:
    """A new file in memory where the system has such, else on disk; it is gone with its last user."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("turnlog")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
