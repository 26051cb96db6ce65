"""The shell around the model server's engine: decides and splices where it renders, captures where it generates.

Knows two methods of one engine instance, `renderer.render_chat_async` and `generate`, and wraps those; patches no vLLM
class and knows no HTTP. Law: a request that is not a captured call passes through untouched, and a captured one gets
exactly the answer that stock vLLM would give for the same prompt.

What upstream lacks and this adds: one place to see messages, rendered ids, sampled ids and log-probabilities of every
API. The prompt that the renderer returns is the object that `generate` receives, so the call travels in it under a
private key, taken out before the engine sees it.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, cast
from uuid import UUID

from pydantic import JsonValue
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import FlatLogprobs
from vllm.renderers.params import ChatParams

from engine import decide, tracing
from engine.call import CURRENT, Call
from engine.capture import Admission, CaptureFailed, Tokens, spliced
from engine.decide import Continuation, Root
from engine.dialects.wire import followed
from engine.errors import EngineError, EngineMismatch, LogDown, PromptTooLong, RetainedMediaChanged
from engine.items import Item
from engine.journal import Journal, LookedUp
from engine.media import media_parts, require_retained
from engine.processed import Alone, Processed, hashes_of, starts_of
from engine.rendering import Rendering, plain, plain_json
from engine.splice import CannotRender, CannotSplice, Message, Render, Splicer, Suffix
from engine.tracing import traced
from store import hashing
from store.events import MediaShown, ReasoningPolicy
from store.media import MediaStore

logger = logging.getLogger("turnlog")

_CALL = "_turnlog_call"
_RENDER_PARAMETERS = ("conversations", "chat_params", "tok_params", "prompt_extras", "skip_mm_cache")
_GENERATE_PARAMETERS = ("prompt", "sampling_params", "request_id")
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos", "n",
)  # fmt: skip
_TOLD = 1024
"""Rollouts remembered as warned of; one that goes on after so many others is warned of again."""
_PROBE_TOOLS: list[JsonValue] = [
    {"type": "function", "function": {"name": "look_up", "description": "probe", "parameters": {"type": "object"}}}
]


class Worker:
    """One engine instance with its two methods wrapped."""

    def __init__(self, engine: Any, journal: Journal, media: MediaStore, *, reasoning: ReasoningPolicy) -> None:
        """Check that the engine is one that can be captured. Raises EngineMismatch naming what is not."""
        check(engine)
        self.policy_version = 0
        """What tokens count as while the engine's own weight version is not a number."""
        self._engine = engine
        self._journal = journal
        self._reasoning: ReasoningPolicy = reasoning
        self._told_strict = OrderedDict[str, None]()
        self._render_chat = engine.renderer.render_chat_async
        self._generate = engine.generate
        vision = getattr(getattr(engine.model_config, "hf_config", None), "vision_config", None)
        patch = getattr(vision, "patch_size", None)
        self._processed = Processed(
            media,
            getattr(engine.renderer, "mm_processor_cache", None),
            patch=patch if isinstance(patch, int) else None,
        )
        tokenizer = engine.renderer.tokenizer
        # A tokenizer of mistral-common has no added tokens, only special ones.
        self._splicer = Splicer({*tokenizer.get_added_vocab().values(), *tokenizer.all_special_ids})
        # Part of every render hash: a server restarted with another template continues nothing of before.
        self._template = hashing.tagged_digest(
            "template", str(getattr(tokenizer, "chat_template", None)).encode()
        ).hex()

    async def install(self) -> dict[str, str]:
        """Wrap the two methods; returns how each usual shape of messages will be spliced, by name."""
        # As the server asks its template itself; mistral-common gives no text that could be tokenised afterwards.
        tokenize = getattr(self._engine.renderer.tokenizer, "IS_MISTRAL_TOKENIZER", False)
        params = ChatParams(
            chat_template_kwargs={"add_generation_prompt": True, "tools": _PROBE_TOOLS, "tokenize": tokenize}
        )
        rendering = self._rendering(params, None, {}, items=(), model=None)
        with _refusals_expected():
            paths = await self._splicer.probe(self._render_of(rendering), options=rendering.suffix_hash)
        self._engine.renderer.render_chat_async = self._rendered
        self._engine.generate = self._generated
        return paths

    async def set_policy_version(self, version: int) -> None:
        """Number the weights that sample from now on; the engine labels each token with it where it can."""
        update = getattr(self._engine, "update_weight_version", None)
        if update is not None:
            await update(str(version))
        self.policy_version = version

    async def _rendered(
        self, conversations: Sequence[list[Any]], chat_params: Any, tok_params: Any = None, **options: Any
    ) -> tuple[Any, Any]:
        """Stand in for `render_chat_async`."""
        call = CURRENT.get()
        if call is None or call.admission is not None or len(conversations) != 1:
            return cast("tuple[Any, Any]", await self._render_chat(conversations, chat_params, tok_params, **options))
        try:
            with followed():
                rendering = self._rendering(chat_params, tok_params, options, items=call.items, model=call.model)
                if call.media_count:
                    conversations = [[plain(message) for message in conversations[0]]]  # read more than once
            decision = await self._decide(call, rendering)
            chain = await self._chain_of(decision)
            if isinstance(decision, Continuation) and chain is None:
                decision = _without_log(call)
            if isinstance(decision, Continuation) and chain is not None:
                suffix = await self._suffix(rendering, conversations[0], chain, call.items[decision.suffix :])
                if not isinstance(suffix, CannotSplice):
                    made = await self._spliced(call, rendering, conversations[0], decision, chain, suffix)
                    if not isinstance(made, CannotSplice):
                        return [conversations[0]], [made]
                    suffix = made
                decision = decision.unspliced(suffix.why)
            try:
                rendered, (prompt,) = await self._render_chat(conversations, chat_params, tok_params, **options)
            except VLLMValidationError as error:
                if error.parameter in ("input_tokens", "input_text"):
                    limit = self._engine.model_config.max_model_len
                    # The server stops counting one token past its limit.
                    too_long = PromptTooLong(limit=limit, prompt_tokens=limit + 1, at_least=True)
                    call.refuse(self._admission(call, rendering, decision, None, []), too_long)
                raise
            parts = media_parts(conversations[0]) if call.media_count else []
            await self._admit(call, rendering, decision, None, prompt, parts)
        except EngineError as error:
            # The gateway answers with it; the server gets an error of its own kind, which it handles without alarm.
            call.error = error
            raise VLLMValidationError(str(error)) from error
        return rendered, [prompt]

    @traced("turnlog.decide", tracing.decided)
    async def _decide(self, call: Call, rendering: Rendering) -> Root | Continuation:
        starts = rendering.keys.starts
        asked = await self._journal.look_up(call.rollout_id, list(starts)) if starts else LookedUp(calls=(), whole=True)
        found = decide.choose(call.items, rendering.keys, asked.calls, self._reasoning)
        if found is None and not asked.whole:
            return _without_log(call)
        if found is None:
            try:
                recent = await self._journal.recent(call.rollout_id)
            except LogDown:
                if not self._journal.spools:
                    raise
                return _without_log(call)
            return await self._named(
                decide.explain(call.items, rendering.render_hash, rendering.tools_digest, recent), call
            )
        if found.reason == "reasoning_dropped" and call.rollout_id not in self._told_strict:
            self._told_strict[call.rollout_id] = None
            if len(self._told_strict) > _TOLD:
                self._told_strict.popitem(last=False)
            logger.warning(
                "rollout %s: its harness does not send reasoning back, so each of its calls begins a new row; "
                "serve with --reasoning restore to continue with the reasoning kept",
                call.rollout_id,
            )
        return found

    async def _named(self, root: Root, call: Call) -> Root:
        """The same, with the kind of what differs where it is an image alone."""
        nearest = root.evidence.get("nearest_call")
        if not isinstance(nearest, str) or not call.media_count:
            return root
        try:
            return decide.with_kind(root, call.items, await self._journal.media(UUID(nearest)))
        except LogDown:
            return root

    async def _chain_of(self, decision: Root | Continuation) -> Tokens | None:
        """The parent's chain; None for a root, and where the log would have to be asked for it and is away."""
        if isinstance(decision, Root):
            return None
        try:
            return await self._journal.chain(decision.parent.call_id)
        except LogDown:
            if not self._journal.spools:
                raise
            return None

    @traced("turnlog.splice", tracing.spliced)
    async def _suffix(
        self, rendering: Rendering, conversation: list[Any], chain: Tokens, new: Sequence[Item]
    ) -> Suffix | CannotSplice:
        if getattr(rendering.tok_params, "truncate_prompt_tokens", None) is not None:
            return CannotSplice(why="truncate_prompt_tokens")
        roles = [str(message["role"]) for message in conversation]
        if "assistant" not in roles:
            return CannotSplice(why="no_assistant_turn")
        answer = len(roles) - 1 - roles[::-1].index("assistant")
        if _instructions(roles[answer + 1 :]) != _instructions([item.role for item in new]):
            return CannotSplice(why="instructions_moved")  # the server put them in front, where no suffix shows them
        return await self._splicer.suffix(
            self._render_of(rendering),
            [*conversation[:answer], *map(plain, conversation[answer:])],
            options=rendering.suffix_hash,
            tools=rendering.tools,
            last_token=int(chain[-1]),
        )

    async def _spliced(
        self,
        call: Call,
        rendering: Rendering,
        conversation: list[Any],
        decision: Continuation,
        chain: Tokens,
        suffix: Suffix,
    ) -> dict[str, Any] | CannotSplice:
        """The admitted prompt of a continuation, with all media that it shows where they stand in it."""
        prompt = self._prompt(rendering, spliced(chain, suffix.token_ids))
        decision = decision.spliced(suffix.path, len(suffix.token_ids))
        parts = media_parts(conversation) if call.media_count else []
        if not parts:
            await self._admit(call, rendering, decision, chain, prompt, parts)
            return prompt
        try:
            kept = await self._journal.media(decision.parent.call_id)
        except LogDown:
            if not self._journal.spools:
                raise
            return CannotSplice(why="log_unavailable")
        if len(kept) != sum(item.media_count for item in call.items[: decision.suffix]):
            return CannotSplice(why="media_not_in_log")  # the parent is of a release that kept none
        # Rendered by themselves: their items, without the text of a history.
        _, (shown,) = await self._render_chat(
            [[{"role": "user", "content": [*parts]}]], rendering.chat_params, rendering.tok_params, **rendering.options
        )
        starts = starts_of(shown, kept, len(chain), suffix.token_ids)
        if starts is None:
            self._processed.refused(hashes_of(shown))
            return CannotSplice(why="media_not_placed")
        prompt |= {"type": "multimodal", **{name: shown[name] for name in ("mm_kwargs", "mm_hashes")}}
        prompt["mm_placeholders"] = {
            modality: [dataclasses.replace(each, offset=at) for each, at in zip(found, starts[modality], strict=True)]
            for modality, found in shown["mm_placeholders"].items()
        }
        await self._admit(call, rendering, decision, chain, prompt, parts, kept)
        return prompt

    async def _admit(
        self,
        call: Call,
        rendering: Rendering,
        decision: Root | Continuation,
        chain: Tokens | None,
        prompt: Any,
        parts: Sequence[Mapping[str, object]],
        kept: Sequence[MediaShown] = (),
    ) -> None:
        admission = self._admission(call, rendering, decision, chain, list(prompt["prompt_token_ids"]))
        limit = self._engine.model_config.max_model_len
        try:
            if len(admission.prompt_ids) >= limit:
                raise PromptTooLong(limit=limit, prompt_tokens=len(admission.prompt_ids))
            read = await self._processed.shown(prompt, parts, self._alone(rendering))
            require_retained(kept, read.shown[: len(kept)])
            new = read.new(parts, admission.prev_len)
            await self._processed.store(read, new)
            call.policy_version = self.policy_version
            await call.admit(dataclasses.replace(admission, media=tuple(new)))
        except BaseException as error:
            self._processed.refused(hashes_of(prompt))
            if isinstance(error, PromptTooLong | RetainedMediaChanged):
                call.refuse(admission, error)
            raise
        prompt[_CALL] = call

    def _admission(
        self,
        call: Call,
        rendering: Rendering,
        decision: Root | Continuation,
        chain: Tokens | None,
        prompt_ids: list[int],
    ) -> Admission:
        return Admission(
            rollout_id=call.rollout_id,
            call_ids=tuple(self._journal.new_id() for _ in range(call.choices)),
            dialect=call.dialect,
            model=str(call.model or self._engine.model_config.served_model_name),
            items=call.items,
            echo=rendering.keys.echo,
            hints=call.hints,
            decision=decision,
            policy=self._reasoning,
            request_hash=rendering.keys.request_hash,
            render_hash=rendering.render_hash,
            tools_digest=rendering.tools_digest,
            parent_chain=chain,
            prompt_ids=prompt_ids,
            media_count=call.media_count,
            worker=self._journal.worker,
            started_at=call.started_at,
        )

    def _prompt(self, rendering: Rendering, token_ids: list[int]) -> dict[str, Any]:
        """The engine's prompt of these ids, as the renderer would have returned it."""
        prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": token_ids, "arrival_time": time.time()}
        extras = rendering.options.get("prompt_extras") or {}
        if (salt := extras.get("cache_salt")) is not None:
            prompt["cache_salt"] = salt
        return prompt

    def _rendering(
        self, chat_params: Any, tok_params: Any, options: Mapping[str, Any], *, items: Sequence[Item], model: JsonValue
    ) -> Rendering:
        named = model or str(self._engine.model_config.served_model_name)
        return Rendering.of(
            chat_params, tok_params, options, items=items, model=named, tokenizer_template=self._template
        )

    def _render_of(self, rendering: Rendering) -> Render:
        """The template and tokenizer under one request's parameters, for the splicer."""

        async def render(messages: Sequence[Message], *, generation_prompt: bool, tools: bool) -> list[int]:
            kwargs = dict(rendering.chat_params.chat_template_kwargs)
            if not generation_prompt:
                kwargs["add_generation_prompt"] = False
            if not tools:
                kwargs["tools"] = None
            params = dataclasses.replace(rendering.chat_params, chat_template_kwargs=kwargs)
            copies = [plain(message) for message in messages]
            try:
                # Beside the cache of what the engine has: nothing of this is sent there.
                options = {**rendering.options, "skip_mm_cache": True}
                _, (prompt,) = await self._render_chat([copies], params, rendering.tok_params, **options)
            except Exception as error:  # templates raise what they like
                raise CannotRender(f"{type(error).__name__}: {error}") from error
            return list(prompt["prompt_token_ids"])

        return render

    def _alone(self, rendering: Rendering) -> Alone:
        """Renders one media part by itself, beside the cache of what the engine has."""

        async def alone(part: Mapping[str, object]) -> Any:
            messages = [[{"role": "user", "content": [part]}]]
            options = {**rendering.options, "skip_mm_cache": True}
            _, (prompt,) = await self._render_chat(messages, rendering.chat_params, rendering.tok_params, **options)
            return prompt

        return alone

    def _generated(self, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> Any:
        """Stand in for `generate`."""
        call = prompt.pop(_CALL, None) if isinstance(prompt, dict) else None
        if call is None:
            return self._generate(prompt, sampling_params, request_id, **options)
        if sampling_params.logprobs is None:
            # The sampled token's alone, on a copy: the server shows a client what it asked for itself.
            sampling_params = copy.copy(sampling_params)
            sampling_params.logprobs = 0
            sampling_params.flat_logprobs = True  # three lists, in place of an object and a dict for each token
        return self._captured(call, prompt, sampling_params, request_id, options)

    async def _captured(
        self, call: Call, prompt: Any, sampling_params: Any, request_id: str, options: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        assert call.admission is not None
        sampling = {name: plain_json(getattr(sampling_params, name, None)) for name in _SAMPLING}
        call.admission = dataclasses.replace(call.admission, sampling=sampling)
        delta = "DELTA" in str(sampling_params.output_kind)
        hashes = hashes_of(prompt)
        # aclosing, so that a client that leaves still aborts the request in the engine.
        async with aclosing(self._generate(prompt, sampling_params, request_id, **options)) as outputs:
            async for output in outputs:
                if hashes:
                    self._processed.reached(hashes)
                    hashes = []
                _collect(call, output, delta=delta)
                yield output


def check(engine: Any) -> None:
    """Refuse an engine that could not be captured truly. Raises EngineMismatch naming the method or the flag."""
    for name, method, expected in (
        ("engine.renderer.render_chat_async", engine.renderer.render_chat_async, _RENDER_PARAMETERS),
        ("engine.generate", engine.generate, _GENERATE_PARAMETERS),
    ):
        found = tuple(inspect.signature(method).parameters)
        if found[: len(expected)] != expected:
            raise EngineMismatch(
                name, f"a method of {found}", remedy=f"turnlog wraps one of {expected}, use vllm>=0.28"
            )
    mode = engine.model_config.logprobs_mode
    if mode != "processed_logprobs":
        raise EngineMismatch(
            "logprobs_mode",
            f"{mode!r}, which is not what tokens are sampled from",
            remedy="start the server with --logprobs-mode processed_logprobs",
        )
    if engine.renderer.tokenizer is None:
        raise EngineMismatch("the tokenizer", "missing", remedy="start the server without --skip-tokenizer-init")


def _collect(call: Call, output: Any, *, delta: bool) -> None:
    """Add one engine output to the call's generation."""
    if output.prompt_token_ids is not None:
        call.generation.prompt_ids = output.prompt_token_ids
    for choice in output.outputs:
        sampled = call.generation.choice(choice.index)
        if choice.logprobs is None and choice.token_ids:
            raise CaptureFailed("the engine gave no log-probabilities although they were asked for")
        if not delta:
            sampled.token_ids.clear()
            sampled.logprobs.clear()
        token_ids = list(choice.token_ids)
        sampled.extend(token_ids, _logprobs_of(token_ids, choice.logprobs or ()))
        sampled.finish_reason = choice.finish_reason or sampled.finish_reason
        if versions := getattr(choice, "weight_versions", None):
            sampled.versions = tuple((span.version, span.start, span.end) for span in versions)


def _logprobs_of(token_ids: Sequence[int], found: Any) -> list[float]:
    """The sampled tokens' own log-probabilities, which stand first at each place of vLLM's flat container."""
    if isinstance(found, FlatLogprobs):
        if [found.token_ids[at] for at in found.start_indices] != token_ids:
            raise CaptureFailed("the engine gave log-probabilities of other tokens than it sampled")
        return [found.logprobs[at] for at in found.start_indices]
    return [step[token].logprob for token, step in zip(token_ids, found, strict=True)]


@contextmanager
def _refusals_expected() -> Generator[None]:
    """Keep vLLM from warning of each conversation that its template refuses: a proof tries some, and no user asked."""

    def other(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("Chat template rejected the request")

    upstream = logging.getLogger("vllm.renderers.hf")
    upstream.addFilter(other)
    try:
        yield
    finally:
        upstream.removeFilter(other)


def _without_log(call: Call) -> Root:
    """What is served while the log is away and this worker does not know what the call continues."""
    return Root(reason="log_unavailable", evidence={"items": len(call.items)})


def _instructions(roles: Sequence[str]) -> int:
    return sum(role in ("system", "developer") for role in roles)
