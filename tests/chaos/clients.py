"""The agents of the chaos run: they talk, are cut off, try again, and write down what they were told.

Knows three dialects, plain and streamed, and a file per run; does not know the log. Law: a line is written when an
answer has arrived to its last byte, or an opening or an outcome was acknowledged, and never before; so each line is a
promise that the log must keep.

Run as a program it takes one JSON object on its command line, `{"address": ..., "token": ..., "notes": "FILE",
"in_flight": "FILE", "agents": 8, "seed": 1, "model": "demo"}`, and goes on until it gets SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import random
import signal
import sys
import uuid
from dataclasses import dataclass
from typing import Any, ClassVar, TextIO

import httpx

CALLS = 6
"""Calls of a rollout, at most: each continues one that was answered before, mostly the last."""
REFUSED = (429, 500, 502, 503)
"""What a server says that is starting, stopping or without its database or engine: ask again."""


class CutOff(Exception):
    """No whole answer came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer."""

    response_id: str
    text: str
    finish: str
    tokens: list[int] | None = None
    """What was sampled, where the API shows it."""


@dataclass(slots=True, kw_only=True)
class Told:
    """What the agents noted and counted."""

    notes: TextIO
    in_flight: bytearray | mmap.mmap
    """One byte, which who kills can look at: the calls whose answer is waited for."""
    answered: int = 0
    cut_off: int = 0
    refused: int = 0
    left: int = 0

    def note(self, kind: str, **facts: Any) -> None:
        self.notes.write(json.dumps({"kind": kind, **facts}) + "\n")
        self.notes.flush()


class Agent:
    """One agent after another, on one connection pool."""

    def __init__(self, number: int, setup: dict[str, Any], told: Told) -> None:
        self._random = random.Random(f"{setup['seed']}-{number}")
        self._address = setup["address"]
        self._key = {"authorization": f"Bearer {setup['token']}"}
        self._model = setup["model"]
        self._name = f"{setup['seed']}-{number}"
        self._told = told

    async def live(self, client: httpx.AsyncClient) -> None:
        """Rollouts, for ever."""
        for count in range(10**6):
            await self.rollout(client, f"{self._name}-{count}")

    async def rollout(self, client: httpx.AsyncClient, rollout: str) -> None:
        """One rollout: opened, talked through and scored."""
        secret = f"{self._random.getrandbits(256):064x}"
        opening = {"rollout_id": rollout, "secret": secret, "task": "say words"}
        base = (await self._insist(client, "/rollouts", opening))["base_url"]
        self._told.note("opened", rollout=rollout)
        dialect = self._random.choice((Chat, Responses, Messages))(self._model)
        answers: list[tuple[list[Any], Answer]] = []
        for turn in range(self._random.randint(2, CALLS)):
            # Mostly on from the last answer, now and then from an earlier one, as a tree search does.
            from_last = not answers or self._random.random() < 0.85
            before, parent = (answers[-1] if from_last else self._random.choice(answers)) if answers else ([], None)
            said = f"I am {rollout}, turn {turn}: {self._random.getrandbits(64):x}. Go on."
            history = [*before, *(dialect.echo(parent) if parent else []), dialect.said(said)]
            streamed = self._random.random() < 0.6
            answer = await self._ask(client, base + dialect.path, dialect, history, streamed=streamed)
            self._told.answered += 1
            self._told.note(
                "answered", rollout=rollout, dialect=dialect.path, streamed=streamed, response_id=answer.response_id,
                text=answer.text, tokens=answer.tokens, finish=answer.finish,
                parent=None if parent is None else parent.response_id,
            )  # fmt: skip
            answers.append((history, answer))
        outcome = {"reward": self._random.random(), "outcome_id": str(uuid.UUID(int=self._random.getrandbits(128)))}
        await self._insist(client, f"/rollouts/{rollout}/outcome", outcome)
        self._told.note("scored", rollout=rollout, **outcome)

    async def _insist(self, client: httpx.AsyncClient, path: str, body: Any) -> Any:
        """Post until it is acknowledged; posting it twice changes nothing."""
        while True:
            try:
                found = await client.post(self._address + path, json=body, headers=self._key)
                if found.status_code == 201:
                    return found.json()
                if found.status_code not in REFUSED:
                    raise SystemExit(f"{path}: {found.status_code} {found.text}")
                self._told.refused += 1
            except httpx.HTTPError:
                self._told.cut_off += 1
            await asyncio.sleep(self._random.uniform(0.05, 0.3))

    async def _ask(
        self, client: httpx.AsyncClient, url: str, dialect: Dialect, history: list[Any], *, streamed: bool
    ) -> Answer:
        """The same request until it has a whole answer; now and then the agent leaves in mid-stream by itself."""
        body = dialect.body(history, self._random.randint(8, 48), streamed=streamed)
        while True:
            leaves = streamed and self._random.random() < 0.03
            self._told.in_flight[0] += 1
            try:
                return await self._once(client, url, dialect, body, streamed=streamed, leaves=leaves)
            except (httpx.HTTPError, CutOff):
                self._told.cut_off += 1
            finally:
                self._told.in_flight[0] -= 1
            await asyncio.sleep(self._random.uniform(0.02, 0.3))

    async def _once(
        self, client: httpx.AsyncClient, url: str, dialect: Dialect, body: Any, *, streamed: bool, leaves: bool
    ) -> Answer:
        if not streamed:
            found = await client.post(url, json=body)
            self._check(found.status_code, found.text)
            return dialect.plain(found.json())
        events: list[Any] = []
        async with client.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                self._check(response.status_code, (await response.aread()).decode())
            done = False
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if data == line:
                    continue
                done = done or data == "[DONE]"
                if data != "[DONE]":
                    events.append(json.loads(data))
                if leaves and len(events) > 3:
                    self._told.left += 1
                    raise CutOff
        return dialect.streamed(events, done=done)

    def _check(self, status: int, text: str) -> None:
        if status in REFUSED:
            self._told.refused += 1
            raise CutOff
        if status != 200:
            raise SystemExit(f"a call was answered {status}: {text}")


class Dialect:
    """One API: how a turn is said, asked for, read and echoed."""

    path = ""
    extra: ClassVar[dict[str, Any]] = {}

    def __init__(self, model: str) -> None:
        self._model = model

    def said(self, text: str) -> dict[str, Any]:
        return {"role": "user", "content": text}

    def echo(self, answer: Answer) -> list[Any]:
        return [{"role": "assistant", "content": answer.text}]

    def body(self, history: list[Any], most: int, *, streamed: bool) -> dict[str, Any]:
        return {"model": self._model, "messages": history, "max_tokens": most, "stream": streamed, **self.extra}

    def plain(self, found: Any) -> Answer:
        raise NotImplementedError

    def streamed(self, events: list[Any], *, done: bool) -> Answer:
        raise NotImplementedError


class Chat(Dialect):
    """OpenAI's Chat Completions."""

    path = "/chat/completions"
    extra: ClassVar[dict[str, Any]] = {"chat_template_kwargs": {"enable_thinking": False}, "return_token_ids": True}

    def plain(self, found: Any) -> Answer:
        (choice,) = found["choices"]
        return Answer(
            response_id=found["id"],
            text=choice["message"]["content"] or "",
            finish=choice["finish_reason"],
            tokens=choice["token_ids"],
        )

    def streamed(self, events: list[Any], *, done: bool) -> Answer:
        choices = [choice for event in events for choice in event.get("choices", [])]
        finish = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
        if not done or not finish or any("error" in event for event in events):
            raise CutOff
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        tokens = [token for choice in choices for token in choice.get("token_ids") or []]
        return Answer(response_id=events[0]["id"], text=text, finish=finish[0], tokens=tokens)


class Responses(Dialect):
    """OpenAI's Responses."""

    path = "/responses"

    def body(self, history: list[Any], most: int, *, streamed: bool) -> dict[str, Any]:
        return {"model": self._model, "input": history, "max_output_tokens": most, "stream": streamed, "store": False}

    def plain(self, found: Any) -> Answer:
        texts = [
            part["text"]
            for item in found["output"] if item["type"] == "message"
            for part in item["content"]
        ]  # fmt: skip
        return Answer(response_id=found["id"], text="".join(texts), finish=found["status"])

    def streamed(self, events: list[Any], *, done: bool) -> Answer:
        last = events[-1] if events else {}
        if last.get("type") not in ("response.completed", "response.incomplete"):
            raise CutOff
        return self.plain(last["response"])


class Messages(Dialect):
    """Anthropic's Messages."""

    path = "/messages"

    def plain(self, found: Any) -> Answer:
        text = "".join(block["text"] for block in found["content"] if block["type"] == "text")
        return Answer(response_id=found["id"], text=text, finish=found["stop_reason"])

    def streamed(self, events: list[Any], *, done: bool) -> Answer:
        if not events or events[-1]["type"] != "message_stop":
            raise CutOff
        deltas = [event["delta"] for event in events if event["type"] in ("content_block_delta", "message_delta")]
        finish = next(delta["stop_reason"] for delta in reversed(deltas) if "stop_reason" in delta)
        text = "".join(delta["text"] for delta in deltas if delta.get("type") == "text_delta")
        return Answer(response_id=events[0]["message"]["id"], text=text, finish=finish)


async def run(setup: dict[str, Any]) -> None:
    """All agents side by side, until SIGTERM."""
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    limits = httpx.Limits(max_connections=None)
    with open(setup["notes"], "a") as notes, open(setup["in_flight"], "r+b") as number:
        told = Told(notes=notes, in_flight=mmap.mmap(number.fileno(), 1))
        async with httpx.AsyncClient(timeout=60, limits=limits) as client:
            agents = [asyncio.create_task(Agent(at, setup, told).live(client)) for at in range(setup["agents"])]
            waiting = asyncio.create_task(stopping.wait())
            done, _ = await asyncio.wait([waiting, *agents], return_when=asyncio.FIRST_COMPLETED)
            for each in (waiting, *agents):
                each.cancel()
            await asyncio.gather(waiting, *agents, return_exceptions=True)
            told.note("counted", answered=told.answered, cut_off=told.cut_off, refused=told.refused, left=told.left)
            for each in done:
                each.result()  # an agent that ended has met what must not happen


if __name__ == "__main__":
    asyncio.run(run(json.loads(sys.argv[1])))
