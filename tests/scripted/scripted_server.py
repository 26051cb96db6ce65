"""A model that says what a test wants: scripts for rollouts on a real vLLM server, over HTTP.

Knows answers as a test states them and writes them in the model's own format; sampling, log-probabilities, parsers and
streaming stay the engine's. Law: the request that a harness sends is not touched, and a rollout without a script is
served as if this were not loaded.

An endpoint plug-in of vLLM, found through PYTHONPATH without being installed:

    PYTHONPATH=tests/scripted VLLM_PLUGINS=scripted turnlog serve MODEL --reasoning-parser qwen3
        --enable-auto-tool-choice --tool-call-parser hermes

Where Triton is installed also `VLLM_USE_V2_MODEL_RUNNER=0`: that runner takes logits processors of another kind.

- `POST /scripted/ROLLOUT` with `{"answers": [...], "otherwise": ANSWER or null}` adds answers (see `Answer`) and
  returns their numbers, `{"queued": [0, 1]}`. Numbers count from 0 over the rollout's whole script.
- `GET /scripted/ROLLOUT` returns `{"left": 1, "calls": [{"answer": 0, "call_ids": [...], "prompt_token_ids": [...],
  "token_ids": [...]}]}`: what was handed to the engine for each call so far, in order; `answer` is null for `otherwise`
  and for a call that sampled freely. It is a second witness beside turnlog's log.
- `DELETE /scripted/ROLLOUT` forgets both.

A call takes the first answer that is left and whose conditions hold: those with conditions before those without, those
that are taken once before those that stay. When none is left it gets `otherwise`, and without that the model samples
freely. Answers are taken when a call reaches the engine, so calls that overlap take theirs in that order; conditions
tell them apart (`body` names one request exactly).

Two things follow from forcing tokens. A grammar that the request asks for (`tool_choice` required, `response_format`)
is dropped, since the script already is the whole output; what it would have forbidden can be scripted. And
`max_tokens`, stop strings and `ignore_eos` hold as they would for any output.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
from argparse import Namespace
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any, Literal

from fastapi import APIRouter, FastAPI, HTTPException
from pydantic import BaseModel, ConfigDict, JsonValue
from scripted_sampling import SCRIPT
from vllm.exceptions import VLLMServerError, VLLMValidationError

from engine.call import CURRENT, Call

Body = Mapping[str, JsonValue]


class ToolCall(BaseModel):
    """A tool call; arguments that are text are written as they stand, broken JSON too."""

    model_config = ConfigDict(extra="forbid")
    name: str
    arguments: str | dict[str, JsonValue] = "{}"


class When(BaseModel):
    """What a request must be for an answer to be taken; conditions that are not given hold."""

    model_config = ConfigDict(extra="forbid")
    body: str | None = None
    """`digest` of the whole request body."""
    messages: int | None = None
    """How many entries `messages` or `input` has."""
    last_user_contains: str | None = None
    """A piece of the last user message: titles and summaries are told apart from an agent's calls by it."""
    tools: bool | None = None
    """Whether the request offers tools."""

    def holds(self, body: Body) -> bool:
        """Whether a request of this body may take the answer."""
        entries = body.get("messages", body.get("input"))
        return (
            (self.body is None or self.body == digest(body))
            and (self.messages is None or self.messages == (len(entries) if isinstance(entries, list) else 1))
            and (self.last_user_contains is None or self.last_user_contains in _last_user_text(entries))
            and (self.tools is None or self.tools == bool(body.get("tools")))
        )


class Failure(BaseModel):
    """The server fails instead of answering, before any token: 400 as for a bad request, 500 for its own fault."""

    model_config = ConfigDict(extra="forbid")
    status: Literal[400, 500] = 500
    message: str = "scripted failure"


class Answer(BaseModel):
    """What the model says: reasoning, then text, then tool calls; or `raw`, its whole output as it stands.

    `finish` is `length` for an output that its token limit cut off: it gets no end of turn.
    """

    model_config = ConfigDict(extra="forbid")
    reasoning: str = ""
    text: str = ""
    tool_calls: list[ToolCall] = []
    raw: str | None = None
    finish: Literal["stop", "length"] = "stop"
    fail: Failure | None = None
    hold: bool = False
    """The answer never ends: its first piece goes out, then nothing, until the client leaves."""
    when: When | None = None
    repeat: bool = False
    """The answer stays for all calls that it fits."""

    def output(self, *, thinking: bool) -> str:
        """The output that the server's parsers read as this answer.

        With thinking on, what stands before `</think>` is reasoning, so an answer without reasoning closes it at once.
        """
        if self.raw is not None:
            return self.raw
        thoughts = f"<think>{self.reasoning}</think>" if thinking else ""
        return thoughts + self.text + "".join(_written(call) for call in self.tool_calls)


class Script(BaseModel):
    """Answers to add to a rollout's script, and what to say when none is left."""

    model_config = ConfigDict(extra="forbid")
    answers: list[Answer] = []
    otherwise: Answer | None = None


@dataclasses.dataclass(slots=True)
class _Rollout:
    """One rollout's script and what became of it."""

    answers: list[Answer] = dataclasses.field(default_factory=list)
    taken: set[int] = dataclasses.field(default_factory=set)
    otherwise: Answer | None = None
    calls: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def next(self, body: Body) -> tuple[int | None, Answer | None]:
        """The answer for a request of this body, and its number."""
        fitting = [
            (answer.when is None, answer.repeat, number)
            for number, answer in enumerate(self.answers)
            if number not in self.taken and (answer.when is None or answer.when.holds(body))
        ]
        if not fitting:
            return None, self.otherwise
        *_, number = min(fitting)
        return number, self.answers[number]

    def take(self, number: int | None) -> None:
        """Mark an answer as given."""
        if number is not None and not self.answers[number].repeat:
            self.taken.add(number)


class Plugin:
    """vLLM's endpoint plug-in `scripted`."""

    name = "scripted"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._engine: Any = None
        self._wrapped = False
        self._rollouts: dict[str, _Rollout] = {}
        self._body: ContextVar[Body] = ContextVar("scripted_body")
        """The current request's, where its rollout has a script."""

    def attach_router(self, app: FastAPI) -> None:
        """Add the control routes, and read the bodies of scripted rollouts on their way in."""
        app.add_middleware(_Reader, plugin=self)
        router = APIRouter()
        router.add_api_route("/scripted/{rollout_id}", self.add, methods=["POST"])
        router.add_api_route("/scripted/{rollout_id}", self.show, methods=["GET"])
        router.add_api_route("/scripted/{rollout_id}", self.forget, methods=["DELETE"])
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Remember the engine; it is wrapped with the first script."""
        self._engine = engine_client

    async def add(self, rollout_id: str, script: Script) -> dict[str, list[int]]:
        """Add answers to a rollout's script."""
        for answer in [*script.answers, *([script.otherwise] if script.otherwise else [])]:
            self._check(answer)
        self._wrap()
        rollout = self._rollouts.setdefault(rollout_id, _Rollout())
        first = len(rollout.answers)
        rollout.answers += script.answers
        rollout.otherwise = script.otherwise or rollout.otherwise
        return {"queued": list(range(first, len(rollout.answers)))}

    async def show(self, rollout_id: str) -> dict[str, Any]:
        """What is left of a script, and what was handed to the engine."""
        rollout = self._rollouts.get(rollout_id, _Rollout())
        once = sum(not answer.repeat for answer in rollout.answers)
        return {"left": once - len(rollout.taken), "calls": rollout.calls}

    async def forget(self, rollout_id: str) -> None:
        """Forget a rollout's script and its calls."""
        self._rollouts.pop(rollout_id, None)

    async def read(self, app: Any, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request; the body of a scripted rollout's is read ahead and handed on."""
        if scope["type"] != "http" or self._scripted() is None:
            await app(scope, receive, send)
            return
        ahead = [await receive()]  # the gateway hands the whole body on in one message

        async def received() -> Any:
            return ahead.pop() if ahead else await receive()

        token = self._body.set(json.loads(ahead[0]["body"]))
        try:
            await app(scope, received, send)
        finally:
            self._body.reset(token)

    def _scripted(self) -> tuple[Call, _Rollout] | None:
        """The current call and its rollout, if that has a script."""
        call = CURRENT.get()
        if call is None or call.rollout_id not in self._rollouts:
            return None
        return call, self._rollouts[call.rollout_id]

    def _check(self, answer: Answer) -> None:
        """Refuse what the model could not say letter for letter. Raises HTTPException."""
        output, tokenizer = answer.output(thinking=True), self._engine.renderer.tokenizer
        said = tokenizer.decode(self._encode(output), skip_special_tokens=False)
        if said != output:
            raise HTTPException(422, f"the tokenizer turns {output!r} into {said!r}: script what it can say")

    def _encode(self, output: str) -> list[int]:
        return list(self._engine.renderer.tokenizer.encode(output, add_special_tokens=False))

    def _wrap(self) -> None:
        """Stand before the engine's two methods, outside of turnlog's wrappers: they are there before any request."""
        if self._wrapped:
            return
        self._wrapped = True
        engine, render, generate = self._engine, self._engine.renderer.render_chat_async, self._engine.generate

        async def rendered(conversations: Any, chat_params: Any, tok_params: Any = None, **options: Any) -> Any:
            found = await render(conversations, chat_params, tok_params, **options)
            # Here and not in `generate`: there a stream has no status left to fail with.
            self._fail_if_scripted(found)
            return found

        def generated(prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> Any:
            answer = self._script(prompt, sampling_params)
            outputs = generate(prompt, sampling_params, request_id, **options)
            return _held(outputs) if answer is not None and answer.hold else outputs

        engine.renderer.render_chat_async, engine.generate = rendered, generated

    def _fail_if_scripted(self, rendered: Any) -> None:
        if (scripted := self._scripted()) is None:
            return
        call, rollout = scripted
        number, answer = rollout.next(self._body.get())
        if answer is None or answer.fail is None:
            return
        rollout.take(number)
        _, (prompt,) = rendered
        rollout.calls.append(_seen(call, number, prompt=prompt, tokens=[]))
        if answer.fail.status == 400:
            raise VLLMValidationError(answer.fail.message)
        raise VLLMServerError(answer.fail.message)

    def _script(self, prompt: Any, sampling_params: Any) -> Answer | None:
        """Force the current call's answer, if it has one, and note what is handed to the engine."""
        if (scripted := self._scripted()) is None:
            return None
        call, rollout = scripted
        body = self._body.get()
        number, answer = rollout.next(body)
        tokens: list[int] = []
        if answer is not None:
            rollout.take(number)
            tokens = self._encode(answer.output(thinking=_thinks(body)))
            if answer.finish == "length":
                sampling_params.max_tokens = min(sampling_params.max_tokens or len(tokens), len(tokens))
            else:
                tokens.append(self._engine.renderer.tokenizer.eos_token_id)
            sampling_params.extra_args = {**(sampling_params.extra_args or {}), SCRIPT: tokens}
            sampling_params.structured_outputs = None
        rollout.calls.append(_seen(call, number, prompt=prompt, tokens=tokens))
        return answer


class _Reader:
    """ASGI middleware that gives the plug-in a look at each request."""

    def __init__(self, app: Any, plugin: Plugin) -> None:
        self._app = app
        self._plugin = plugin

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._plugin.read(self._app, scope, receive, send)


def digest(body: Body) -> str:
    """SHA-256 of a request body as canonical JSON, for `When.body`."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


async def _held(outputs: Any) -> AsyncGenerator[Any, None]:
    async with aclosing(outputs):
        async for output in outputs:
            yield output
            await asyncio.Event().wait()


def _seen(call: Call, number: int | None, *, prompt: Any, tokens: list[int]) -> dict[str, Any]:
    call_ids = call.admission.call_ids if call.admission is not None else ()
    return {
        "answer": number,
        "call_ids": [str(call_id) for call_id in call_ids],
        "prompt_token_ids": list(prompt["prompt_token_ids"]),
        "token_ids": tokens,
    }


def _written(call: ToolCall) -> str:
    """A tool call in the format of Qwen and Hermes.

    Arguments that are broken JSON leave out the brace that would close the call: a model that loses count of its braces
    writes one too few, and the streaming parser would otherwise serve that brace as part of the arguments.
    """
    arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments, ensure_ascii=False)
    try:
        json.loads(arguments)
        end = "}"
    except ValueError:
        end = ""
    return f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {arguments}{end}\n</tool_call>'


def _thinks(body: Body) -> bool:
    """Whether the prompt leaves thinking to the model; `enable_thinking: false` closes it in the prompt."""
    options = body.get("chat_template_kwargs")
    return not isinstance(options, dict) or options.get("enable_thinking") is not False


def _last_user_text(entries: JsonValue) -> str:
    """The text of the last user message of any dialect; without one the empty text."""
    if isinstance(entries, str):
        return entries
    for entry in reversed(entries if isinstance(entries, list) else []):
        if isinstance(entry, dict) and entry.get("role") == "user":
            content = entry.get("content")
            parts = content if isinstance(content, list) else [{"text": content}]
            return "".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))
    return ""
