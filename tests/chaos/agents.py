"""Programs of agents (`clients`), sent to servers and recalled.

Knows processes, the notes that they write and how many of their calls are in flight; does not know the log or who is
killed. Law: an agent that met what must not happen ends the run.
"""

from __future__ import annotations

import json
import mmap
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

PROGRAM = Path(__file__).with_name("clients.py")
WORKING_SECONDS = 60
"""Within which agents have calls in flight again."""


class Agents:
    """Programs of agents, one a server; `token` opens rollouts, and each program is so `many` agents."""

    def __init__(self, folder: Path, *, seed: str, token: str, many: int) -> None:
        self._folder, self._seed, self._token, self._many = folder, seed, token, many
        self._programs: list[subprocess.Popen[bytes]] = []
        self._in_flight: dict[str, mmap.mmap] = {}
        self.notes: list[Path] = []

    def send(self, address: str) -> None:
        """Agents to one server."""
        at = len(self.notes)
        self.notes.append(self._folder / f"notes-{at}.jsonl")
        in_flight = self._folder / f"in-flight-{at}"
        in_flight.write_bytes(b"\0")
        with in_flight.open("r+b") as file:
            self._in_flight[address] = mmap.mmap(file.fileno(), 1)
        setup = {
            "address": address, "token": self._token, "notes": str(self.notes[-1]), "in_flight": str(in_flight),
            "agents": self._many, "seed": f"{self._seed}-{at}", "model": "demo",
        }  # fmt: skip
        self._programs.append(subprocess.Popen([sys.executable, str(PROGRAM), json.dumps(setup)]))

    def in_flight(self, address: str) -> int:
        """How many calls to this server its agents wait for, once there are any."""
        give_up = time.monotonic() + WORKING_SECONDS
        while (now := self._in_flight[address][0]) == 0:
            self.look()
            if time.monotonic() > give_up:
                raise SystemExit(f"no agent at {address} has had a call in flight for {WORKING_SECONDS} seconds")
            time.sleep(random.uniform(0, 0.1))  # so that no kill is bound to a call's beginning
        return now

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
