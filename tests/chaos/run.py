"""`make chaos`: servers, engines and databases are killed under working agents, and then the log must show everything.

Knows what is killed and when; what must hold then is `proof`'s. Law: a run is told by its seed, ends within its time,
kills only what agents have calls in flight at, and fails unless it has killed enough of each kind and every answer that
an agent received whole is in the log exactly once, whole and right.

Most kills go to light servers (`light_server`), which start again in a fifth of a second; some to real ones with a real
engine. A phase is one kind of database and one way of meeting its absence. `--short` is what the test suite runs.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from transformers import PreTrainedTokenizerFast

from store import migrate
from store.database import open_database
from tests.chaos.agents import Agents
from tests.chaos.databases import Postgres, Sqlite
from tests.chaos.proof import Found, prove
from tests.chaos.servers import Light, LightServers, Real
from turnlog.demo.model import build_model

TOKEN = "the-operator-of-the-chaos-run"
KINDS = ("server", "engine", "database")
LEAST = 1 / 30
"""Of all kills, at servers, at engines and at databases each, on each kind of database."""
REAL_KILLS = 4
"""Of a phase with a real engine, which takes half a minute to stand again."""


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
    in_flight: list[int] = field(default_factory=list[int])
    """Calls that the agents of the server waited for at each kill, or of one of them where a database was killed."""
    told: Counter[str] = field(default_factory=Counter[str])
    found: Found
    seconds: float

    def killed(self, kind: str) -> int:
        """How many of this kind."""
        return sum(many for name, many in self.kills.items() if name.partition(":")[0] == kind)


def run_phase(phase: Phase, setup: Setup, deadline: float) -> Result:
    """Kill, start again, and prove."""
    began = time.monotonic()
    folder = setup.folder / phase.name.replace(", ", "-").replace(" ", "-")
    spool = folder / "spool"
    spool.mkdir(parents=True)
    chance = random.Random(f"{setup.seed} {phase.name}")
    database: Sqlite | Postgres = (Sqlite if phase.log == "sqlite" else Postgres)(folder)
    kills: Counter[str] = Counter()
    in_flight: list[int] = []
    seed = f"{phase.log[0]}{phase.on_log_failure[0]}{'r' if phase.real else ''}"
    agents = Agents(folder, seed=seed, token=TOKEN, many=setup.agents)
    servers: list[Light] | list[Real] = []
    try:
        log_engine = open_database(database.url)
        migrate.upgrade(log_engine)
        environment = {
            "TURNLOG_URL": database.url, "TURNLOG_TOKEN": TOKEN, "TURNLOG_REQUIRE_OPEN": "1",
            "TURNLOG_ON_LOG_FAILURE": phase.on_log_failure, "TURNLOG_SPOOL": str(spool),
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
        while kills.total() < phase.kills and time.monotonic() < deadline:
            server = chance.choice(servers)
            kind = pick(chance, phase, kills)
            time.sleep(chance.uniform(0.1, 0.8) + 2 * phase.real)
            now = agents.in_flight(server.address)
            killed = f"database: {database.kill(chance)}" if kind == "database" else kill(server, kind, chance)
            kills[killed] += 1
            in_flight.append(now)
            if kind == "database" or kills.total() == phase.kills:
                continue
            if phase.real:
                agents.recall()
            server.start()
            if phase.real:
                agents.send(server.address)
        time.sleep(1)
        agents.recall()
        for server in servers:
            server.end(signal.SIGKILL)
        if phase.real:
            give_up_on(database.url, spool)
        else:
            end_in_order(servers)
        found = prove(log_engine, agents.notes, setup.tokenizer, exact=not phase.real)
        log_engine.dispose()
    finally:
        with suppress(BaseException):
            agents.recall()
        for server in servers:
            with suppress(BaseException):
                server.end(signal.SIGKILL)
        database.stop()
    return Result(
        phase=phase, kills=kills, in_flight=in_flight, told=agents.told(), found=found, seconds=time.monotonic() - began
    )


def pick(chance: random.Random, phase: Phase, kills: Counter[str]) -> str:
    """What is killed next; with a real engine, where each start takes long, every kind in its turn."""
    if phase.real:
        return ("database", "engine", "database", "server")[kills.total() % REAL_KILLS]
    return chance.choices(KINDS, (5, 2, 3))[0]


def kill(server: Light | Real, kind: str, chance: random.Random) -> str:
    """Kill a server or its engine; the server is gone after either."""
    if kind == "engine":
        os.kill(server.engine(), signal.SIGKILL)
        if server.end(signal.SIGCONT, seconds=chance.uniform(0, 3)):  # a server whose engine is gone ends
            return kind
    server.end(signal.SIGKILL)
    return kind


def end_in_order(servers: Sequence[Light | Real]) -> None:
    """Start each server once more, which ends what it left open when it was killed."""
    for server in servers:
        server.start()
        if not server.end(signal.SIGTERM):
            raise SystemExit("a server did not stop in order")


def give_up_on(url: str, spool: Path) -> None:
    """End what servers left open that do not start again."""
    turnlog = (sys.executable, "-m", "turnlog", "db")
    for command in (("drain", str(spool)), ("check", "--mark-lost", "--older-than", "0s")):
        ended = subprocess.run([*turnlog, *command, "--db", url], capture_output=True, text=True)
        if ended.returncode != 0:
            raise SystemExit(f"turnlog db {' '.join(command)} failed: {ended.stderr}")


@dataclass(slots=True, kw_only=True)
class Setup:
    """What all phases share."""

    folder: Path
    seed: int
    agents: int
    model: Path
    tokenizer: PreTrainedTokenizerFast
    servers: LightServers | None = None

    def light(self) -> LightServers:
        """The program that forks light servers, begun when the first one is asked for."""
        if self.servers is None:
            self.servers = LightServers(self.model, self.folder)
        return self.servers


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
        "phase", *(f"kills: {kind}" for kind in KINDS), "in flight at a kill: least", "median", "answers received",
        "calls in the log", "of them continued", "lost", "doubled", "marked lost", "ended otherwise",
        "holes in writers' counts", "wrong", "s",
    )  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    total: Counter[str] = Counter()
    for result in results:
        found = result.found
        counted = {
            "answered": found.answered, "calls": found.calls, "continued": found.continued, "lost": found.lost,
            "doubled": found.doubled, "marked": found.marked_lost, "ended": found.ended, "holes": found.holes,
            "wrong": len(found.wrong), "s": round(result.seconds),
        }  # fmt: skip
        total.update(counted)
        lines.append(_line(result.phase.name, [result], counted))
    return "\n".join([*lines, _line("all", results, total)])


def _line(name: str, results: list[Result], counted: Mapping[str, int]) -> str:
    in_flight = [number for result in results for number in result.in_flight]
    killed = [sum(result.killed(kind) for result in results) for kind in KINDS]
    cells = (name, *killed, min(in_flight, default=0), f"{median(in_flight or [0]):g}", *counted.values())
    return "| " + " | ".join(map(str, cells)) + " |"


def too_few(results: list[Result], kills: int) -> list[str]:
    """What was not killed often enough, in words."""
    killed = sum(result.kills.total() for result in results)
    found = [f"{killed} of {kills} kills"] if killed < kills else []
    for name in dict.fromkeys(result.phase.log for result in results):
        for kind in KINDS:
            often = sum(result.killed(kind) for result in results if result.phase.log == name)
            if often < kills * LEAST:
                found.append(f"{often} kills of {kind} on {name}, fewer than {kills * LEAST:g}")
    return found


def run(*, seed: int, kills: int, seconds: float, short: bool, tell: Callable[[str], None] = print) -> list[Result]:
    """Every phase in its turn, within the time."""
    deadline = time.monotonic() + seconds
    results: list[Result] = []
    folder = Path(tempfile.mkdtemp(prefix="turnlog-chaos-"))
    model = build_model(folder / "model")
    setup = Setup(
        folder=folder, seed=seed, agents=8, model=model, tokenizer=PreTrainedTokenizerFast.from_pretrained(model)
    )
    tell(f"seed {seed}")
    whole = False
    try:
        for phase in phases(kills=kills, short=short):
            result = run_phase(phase, setup, deadline)
            results.append(result)
            tell(
                f"{phase.name}, {result.seconds:.0f} s: {dict(result.kills)}; {dict(result.told)}; "
                f"roots {dict(result.found.reasons)}"
            )
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
    arguments.add_argument("--kills", type=int, default=300, help="the run ends when it has so many")
    arguments.add_argument("--seconds", type=float, default=840, help="no kill after so long")
    arguments.add_argument("--short", action="store_true", help="only one phase, with light servers")
    chosen = arguments.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # also into a file each line is there when it is said
    seed = random.SystemRandom().randrange(10**6) if chosen.seed is None else chosen.seed
    began = time.monotonic()
    results = run(seed=seed, kills=chosen.kills, seconds=chosen.seconds, short=chosen.short)
    took = time.monotonic() - began
    wrong = sum(len(result.found.wrong) for result in results)
    if lacking := [*([f"{wrong} things are wrong"] if wrong else []), *too_few(results, chosen.kills)]:
        raise SystemExit(f"{'; '.join(lacking)}: see above (seed {seed}, {took:.0f} s)")
    killed = sum(result.kills.total() for result in results)
    print(f"{killed} kills, nothing lost, nothing doubled (seed {seed}, {took:.0f} s)")


if __name__ == "__main__":
    main()
