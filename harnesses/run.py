"""Runs stock harnesses against turnlog's server, each over the same scripted task, and checks the log of it.

    python harnesses/run.py            every harness that is installed
    python harnesses/run.py codex      those whose names begin so

Knows how to start the server, run a driver's command in a folder of its own, and read the log; does not know any
harness. Law: a harness passes only when its own run ended well, every answer of its script was given, every
continuation's prompt, as the engine got it, begins with its parent's tokens, no rollout was refused as rows, and the
roots are those its driver expects.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from task import FINAL, Harness, Place, notes  # noqa: E402

from replay.rowset import build  # noqa: E402
from store import log, migrate  # noqa: E402
from store.database import open_database, read  # noqa: E402
from store.lineage import chain_tokens  # noqa: E402
from turnlog.demo.model import build_model  # noqa: E402
from turnlog.demo.server import RunningServer, post, start_server  # noqa: E402

WORK = HERE / ".work"
DRIVERS = (
    *("mini_swe_agent", "opencode", "codex", "openai_agents", "deep_agents", "openhands_sdk", "claude_code"),
    *("qwen_code", "pi", "cline", "mistral_vibe", "continue_cli"),
)
WINDOW = 131_072
SCRIPTED = "(scripted)"
"""Stands in the message of an error that a driver asked for."""
FLAGS = (
    *("--reasoning", "restore"),
    *("--max-model-len", str(WINDOW)),
    *("--hf-overrides", json.dumps({"max_position_embeddings": WINDOW})),
    *("--max-num-batched-tokens", "8192"),
    *("--kv-cache-memory-bytes", str(512 * 2**20)),
    *("--middleware", "record.Recorder"),
)


@dataclass(kw_only=True)
class Result:
    """What one run came to."""

    harness: Harness
    seconds: float = 0.0
    calls: int = 0
    rows: int = 0
    roots: Counter[str] = field(default_factory=Counter[str])
    continuations: int = 0
    extending: int = 0
    """Continuations whose prompt, as the engine got it, begins with all tokens of the parent."""
    ends: Counter[str] = field(default_factory=Counter[str])
    roles: Counter[str] = field(default_factory=Counter[str])
    problems: list[str] = field(default_factory=list[str])

    @property
    def line(self) -> str:
        """The result as a line of the table in README.md."""
        roots = ", ".join(f"{reason} {number}" for reason, number in sorted(self.roots.items()))
        ends = ", ".join(f"{state} {number}" for state, number in sorted(self.ends.items())) or "none"
        roles = ", ".join(f"{role} {number}" for role, number in sorted(self.roles.items())) or "none"
        verdict = "; ".join(self.problems) or "passes"
        cells = (
            self.harness.name, self.harness.version, self.harness.dialect, self.calls, self.rows, roots,
            f"{self.extending} of {self.continuations}", roles, ends, verdict,
        )  # fmt: skip
        return "| " + " | ".join(map(str, cells)) + " |"


HEAD = (
    "| run | version | dialect | calls | rows | roots by reason | continuations that extend | side calls "
    "| no answer | result |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def main(chosen: list[str]) -> int:
    """Run the harnesses whose names begin with one of `chosen`, all without it; 1 when one of them fails."""
    known = [harness for driver in DRIVERS for harness in importlib.import_module(driver).HARNESSES]
    wanted = [harness for harness in known if not chosen or harness.name.startswith(tuple(chosen))]
    runs = WORK / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    runs.mkdir(parents=True)
    url = f"sqlite:///{runs}/turnlog.db"
    database = open_database(url)
    migrate.upgrade(database)
    path = os.pathsep.join([str(HERE), str(HERE.parent / "tests/scripted")])
    environment = {"PYTHONPATH": path, "VLLM_PLUGINS": "scripted", "HARNESS_RECORD": str(runs)}
    server = start_server(
        build_model(WORK / "model"), url=url, log=runs / "server.log", flags=FLAGS, environment=environment
    )
    results = []
    try:
        print(HEAD, flush=True)
        for harness in wanted:
            if not any(WORK.glob(harness.needs)):
                print(f"| {harness.name} | {harness.version} | {harness.dialect} | not installed |", flush=True)
                continue
            results.append(_run(harness, server, runs, database))
            print(results[-1].line, flush=True)
    finally:
        server.stop()
        database.dispose()
    return int(any(result.problems for result in results))


def _run(harness: Harness, server: RunningServer, runs: Path, database: Any) -> Result:
    result = Result(harness=harness)
    rollout = harness.name
    place = Place(
        base=f"{server.address}/rollouts/{rollout}",
        folder=runs / rollout / "work",
        home=runs / rollout / "home",
        installed=WORK,
    )
    place.folder.mkdir(parents=True)
    place.home.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=place.folder, check=True)  # else they find this repository above
    notes(place.folder)
    harness.prepare(place)
    post(f"{server.address}/scripted/{rollout}", {"answers": list(harness.answers)})
    began = time.monotonic()
    with (runs / rollout / "output.log").open("wb") as output:
        process = subprocess.Popen(
            list(harness.command(place)),
            cwd=place.folder,
            env=_environment(place) | dict(harness.environment(place)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=harness.seconds)
            if code != 0:
                result.problems.append(f"ended with code {code}")
        except subprocess.TimeoutExpired:
            result.problems.append(f"did not end within {harness.seconds} s")
        _end_all(process, place.home)
    result.seconds = time.monotonic() - began
    _read_log(result, rollout, server, database)
    _compare_errors(result, runs / f"{rollout}.jsonl", server)
    if FINAL not in (runs / rollout / "output.log").read_text(errors="replace"):
        result.problems.append("the last answer did not reach its user")
    report = place.folder / "report.md"
    if not report.is_file() or report.read_text() != "111 «ä»\n222\n333\n444\n555\n666\n":
        result.problems.append("report.md is not what the tool calls write")
    return result


def _compare_errors(result: Result, recorded: Path, server: RunningServer) -> None:
    """Name each request that got an error, and whether it gets one outside of a rollout, where turnlog does nothing."""
    for line in map(json.loads, recorded.read_text().splitlines() if recorded.exists() else ()):
        if line["status"] < 400 or SCRIPTED in line["answer"]:
            continue
        try:
            post(f"{server.address}{line['path']}", line["request"])
            stock = 200
        except HTTPError as error:
            stock = error.code
        result.problems.append(f"a request got {line['status']}, outside of a rollout {stock}: {line['answer'][:300]}")


def _environment(place: Place) -> dict[str, str]:
    """Nothing of this machine's user, no way out but loopback, and the Node that the npm harnesses ask for."""
    node = place.installed / "npm/node_modules/.bin"
    nowhere = "http://127.0.0.1:9"
    return {
        "PATH": f"{node}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(place.home),
        "XDG_CONFIG_HOME": str(place.home / ".config"),
        "XDG_DATA_HOME": str(place.home / ".local/share"),
        "XDG_CACHE_HOME": str(place.home / ".cache"),
        "XDG_STATE_HOME": str(place.home / ".local/state"),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "DO_NOT_TRACK": "1",
        "HTTP_PROXY": nowhere,
        "HTTPS_PROXY": nowhere,
        "http_proxy": nowhere,
        "https_proxy": nowhere,
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }


def _end_all(process: subprocess.Popen[bytes], home: Path) -> None:
    """End what the harness has left running: its group, and daemons (Cline's), known by their home folder."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended meanwhile, or is another user's
            if f"HOME={home}".encode() in environment.read_bytes().split(b"\0"):
                os.kill(int(environment.parent.name), signal.SIGKILL)


def _read_log(result: Result, rollout: str, server: RunningServer, database: Any) -> None:
    with urlopen(f"{server.address}/scripted/{rollout}", timeout=60) as answer:
        script = json.load(answer)
    if script["left"]:
        result.problems.append(f"{script['left']} answers of the script were not asked for")
    prompts = {call["call_ids"][0]: call["prompt_token_ids"] for call in script["calls"] if call["call_ids"]}
    with read(database) as connection:
        calls = log.calls(connection, rollout)
        ends = log.ends(connection, rollout)
        done = {call.call_id for call in calls} | {end.call_id for end in ends}
        pending = [intent for intent in log.intents(connection, rollout) if intent.call_id not in done]
        for call in calls:
            chain = chain_tokens(connection, call.call_id).tolist()
            prompt = prompts.get(str(call.call_id))
            if prompt is None or chain[: call.prompt_len] != prompt or len(chain) != call.prompt_len + call.sampled_len:
                result.problems.append(f"the log's prompt of call {call.call_id} is not the engine's")
                continue
            if call.parent_id is not None:
                before = chain_tokens(connection, call.parent_id).tolist()
                result.extending += prompt[: len(before)] == before
    result.calls = len(calls)
    result.continuations = sum(call.decision == "continuation" for call in calls)
    result.roots.update(call.reason for call in calls if call.decision == "root")
    result.roles.update(str(call.hints["role"]) for call in calls if "role" in call.hints)
    result.ends.update(end.state for end in ends)
    if result.extending != result.continuations:
        result.problems.append("a continuation does not begin with its parent's tokens")
    if pending:
        result.problems.append(f"{len(pending)} calls have no end in the log")
    if not calls:
        result.problems.append("no call was completed")
        return
    found = build(database, rollouts=[rollout])
    result.rows = len(found.rows)
    if found.refusals.by_reason():
        result.problems.append(f"rows refused: {dict(found.refusals.by_reason())}")
    if _alike(result.roots) != _alike(result.harness.roots):
        result.problems.append(f"roots are {dict(result.roots)}, not {dict(result.harness.roots)}")


def _alike(roots: Mapping[str, int]) -> Counter[str]:
    """Roots by reason; calls that overlap a rollout's first are first calls too, so these reasons count as one."""
    found = Counter[str]()
    for reason, number in roots.items():
        found["fresh_context" if reason == "first_call" else reason] += number
    return found


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped then too
    sys.exit(main(sys.argv[1:]))
