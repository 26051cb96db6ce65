r"""The suffix of a prompt without its history, and the proof that a template allows it.

Knows messages, token ids and a way to render; does not know vLLM, the log or how a parent was found. Law: a suffix is
used only when it is proven for this template, these options and this shape of call to be, token for token, what a full
render writes after the same assistant turn (design §7).

Two ways to get it. *marker*: the template renders a short fixed conversation whose assistant turn is a marker, followed
by the new messages; what follows the marker's turn is the suffix, and its cost follows the new messages alone. *full*:
where the marker's proof fails, the whole request is rendered and cut at the end of the assistant turn, which a second
render up to that turn must confirm. If that fails too the call cannot be spliced, and says why.

Where a turn ends is found, not assumed: two conversations that differ in the last word of their answer alone agree from
there on, and a control token after that word ends the turn. A worked case, ChatML ids named:

    parent's chain   ... <|im_start|> assistant \n  Sure <|im_end|>
    suffix                                                     \n <|im_start|> user \n  Go on <|im_end|> \n ...

An answer that stopped otherwise (length, stop string, another stop token) gets it as the suffix's first token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal, Protocol, TypeVar

from engine.conversations import (
    MARKERS,
    PICTURED,
    USUAL_SHAPES,
    ToolCall,
    answer,
    answers_its_calls,
    calls,
    exchanges,
    has_text,
    histories,
    new_messages,
    pictured_histories,
    renamed,
    told_role,
    tool_calls,
    unasked_histories,
    unthought,
)
from engine.errors import EngineError

Message = Mapping[str, object]
"""One chat message as the model server's template takes it."""

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_PROOFS_KEPT = 256
"""Options and shapes come from requests, so what is remembered about them has a bound."""
_PROVEN_MESSAGES = 32
"""A call with more new messages or tool calls than this is not worth a proof of its own."""
_CONTEXT = 3
"""Tokens of the answer that must stand before its turn's end, so that it is that turn's end and no other's."""


class Render(Protocol):
    """The model server's own template and tokenizer, for one request's options."""

    async def __call__(self, messages: Sequence[Message], *, generation_prompt: bool, tools: bool) -> list[int]:
        """Token ids of the messages; `tools` says whether the request's tools are shown.

        Raises CannotRender when the template refuses the messages.
        """
        ...


class CannotRender(EngineError):
    """The template refuses a conversation, for example a role it does not know."""

    status = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Suffix:
    """Tokens that follow the parent's chain in the prompt, and how they were found."""

    token_ids: list[int]
    path: Literal["marker", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CannotSplice:
    """No proven suffix: the call is served fresh, as a root with reason `cannot_splice:<why>`."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """An answer as a template may tell it from others, under these render options."""

    options: bytes
    calls: int
    text: bool

    @property
    def content(self) -> str:
        """A marker's text in an answer of this kind; an empty answer is marked as if it had text."""
        return MARKERS[0] if self.text or not self.calls else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """What a proof holds for: the answer's kind, whether tools are shown, and the roles of the new messages."""

    kind: _Kind
    tools: bool
    roles: tuple[str, ...]
    asked: bool
    """Whether a user message stands before the answer: behind a summary there may be none (Continue)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ending:
    """What the template writes after an answer's last word when nothing follows, and what of that ends the turn.

    The end-of-turn token stands in `tail` at `at`; at its length, the next turn's first token ends this one (GLM). A
    chain whose last token is one of `ends` is ended, and any other gets the end-of-turn token. It is not known what to
    do where more than that token may be missing, or it may be part of a tool call's syntax (not `certain`), nor after a
    token of `beyond`, which the template writes behind it.
    """

    tail: list[int]
    at: int
    ends: frozenset[int]
    beyond: frozenset[int]
    certain: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proof:
    """How to cut a shape's marker render: it begins with `head`, then come these control tokens and end the turn."""

    head: list[int]
    control: list[int]
    ending: _Ending


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What follows the answer's end-of-turn token, before the chain's own last token is looked at."""

    token_ids: list[int]
    end_of_turn: int
    ending: _Ending
    path: Literal["marker", "full"]

    def after(self, last_token: int) -> Suffix | CannotSplice:
        """The suffix for a chain that ends in that token."""
        if last_token == self.end_of_turn or last_token in self.ending.ends:
            return Suffix(token_ids=self.token_ids, path=self.path)
        if self.ending.certain and last_token not in self.ending.beyond:
            return Suffix(token_ids=[self.end_of_turn, *self.token_ids], path=self.path)
        return CannotSplice(why="open_answer")


class Splicer:
    """Finds suffixes, and remembers what was proven for which options and shape.

    `special_ids` are the tokenizer's added and special tokens, here called control tokens: no merge crosses one.
    """

    def __init__(self, special_ids: Collection[int]) -> None:
        self._control = frozenset(special_ids)
        self._endings: OrderedDict[_Kind, _Ending | CannotSplice] = OrderedDict()
        self._proofs: OrderedDict[_Shape, _Proof | None] = OrderedDict()
        self._histories: OrderedDict[tuple[bytes, bool, bool], list[list[Message]]] = OrderedDict()

    async def probe(self, render: Render, *, options: bytes) -> dict[str, str]:
        """Prove the usual shapes ahead of the first request; returns the path that each takes, by name.

        >>> import asyncio
        >>> from engine.splice import Splicer
        >>> async def chatml(messages, *, generation_prompt, tools):  # a toy: one token a word, 0 ends a turn
        ...     text = " ".join(f"{m['role']} {m['content']} 0" for m in messages)
        ...     return [int(w) if w.isdigit() else ord(w[-1]) for w in text.split()] + [9] * generation_prompt
        >>> asyncio.run(Splicer({0}).probe(chatml, options=b""))["plain"]
        'marker'
        """
        paths: dict[str, str] = {}
        for name, tools, count, text, roles in USUAL_SHAPES:
            made = answer(calls(count), content=MARKERS[0] if text else "", thinking=True)
            messages = [*exchanges(2), made, *new_messages(roles, calls(count), "new")]
            found = await self._find(render, messages, options=options, tools=tools)
            if isinstance(found, CannotSplice) and found.why.startswith("template:"):
                found = await self._find(render, unthought(messages), options=options, tools=tools)
            paths[name] = found.path if isinstance(found, _Found) else f"cannot_splice:{found.why}"
        return paths

    async def suffix(
        self, render: Render, messages: Sequence[Message], *, options: bytes, tools: bool, last_token: int
    ) -> Suffix | CannotSplice:
        """The tokens that follow the parent's chain, for a request whose last assistant turn is the parent's answer.

        `options` identifies everything but the messages that shapes a render; `last_token` is the chain's last.
        """
        found = await self._find(render, messages, options=options, tools=tools)
        return found.after(last_token) if isinstance(found, _Found) else found

    async def _find(
        self, render: Render, messages: Sequence[Message], *, options: bytes, tools: bool
    ) -> _Found | CannotSplice:
        last = next(i for i in reversed(range(len(messages))) if messages[i]["role"] == "assistant")
        new, made = messages[last + 1 :], tool_calls(messages[last])
        kind = _Kind(options=options, calls=len(made), text=has_text(messages[last]))
        before = {messages[i]["role"] for i in range(last)}
        told = [told_role(message) for message in new]
        roles = tuple(role for role in told if role is not None)
        shape = _Shape(kind=kind, tools=tools, roles=roles, asked="user" in before)
        # What no proof covers: sounds and videos, results of older calls, names that could be read as control tokens,
        # a system message
        # after a developer's (vLLM moves both to the front for templates that know no developer).
        provable = (
            max(len(new), len(made)) <= _PROVEN_MESSAGES
            and answers_its_calls(made, new)
            and all(call.plain for call in made)
            and not ("system" in roles and "developer" in before)
            and len(roles) == len(new)
        )
        try:
            ending = await self._ending(render, kind)
            if isinstance(ending, CannotSplice):
                return ending
            found = await self._marker(render, shape, made, new) if provable else None
            return found or await _full(render, messages, last, ending)
        except CannotRender as error:
            return CannotSplice(why=f"template:{error}")

    async def _marker(
        self, render: Render, shape: _Shape, made: Sequence[ToolCall], new: Sequence[Message]
    ) -> _Found | None:
        proof = await self._proof(render, shape)
        if proof is None:
            return None
        conversation = [*exchanges(1), answer(made, content=shape.kind.content), *new]
        try:
            rendered = await render(conversation, generation_prompt=True, tools=False)
        except CannotRender:  # the full render tells whether the template refuses the request or only this
            return None
        if rendered[: len(proof.head)] != proof.head:  # a clock in the head went on, or what is new shows there
            self._proofs.pop(shape, None)
            proof = await self._proof(render, shape)
            if proof is None or rendered[: len(proof.head)] != proof.head:
                return None
        places = (i for i in range(len(proof.head), len(rendered)) if rendered[i] in self._control)
        turn = list(islice(places, len(proof.control)))
        if [rendered[i] for i in turn] != proof.control:  # a tool whose calls are written otherwise (`<|python_tag|>`)
            return None
        cut = turn[-1] + 1 if turn else len(proof.head)
        if cut == len(rendered):
            return None
        return _Found(token_ids=rendered[cut:], end_of_turn=rendered[cut - 1], ending=proof.ending, path="marker")

    async def _ending(self, render: Render, kind: _Kind) -> _Ending | CannotSplice:
        if kind not in self._endings:
            try:
                ending = await self._find_ending(render, kind)
            except CannotRender as error:
                ending = CannotSplice(why=f"template:{error}")
            _remember(self._endings, kind, ending)
        return self._endings[kind]

    async def _find_ending(self, render: Render, kind: _Kind) -> _Ending | CannotSplice:
        text = await self._ending(render, replace(kind, calls=0)) if kind.calls else None
        if isinstance(text, CannotSplice):
            return text
        try:
            tail = await _after_answer(render, kind, ())
        except CannotRender:  # mistral-common lets no conversation end with an answer: look before what is new
            tail = await _after_answer(render, kind, ("tool",) * kind.calls or ("user",))
            last = (i for i, token in enumerate(tail or ()) if token in (text.ends if text else self._control))
            tail = tail and tail[: next(last, -1) + 1]
        if tail is None:
            return CannotSplice(why="answer_not_shown")
        control = [i for i, token in enumerate(tail) if token in self._control]
        if tail and not control:
            return CannotSplice(why="no_end_of_turn_token")
        if text is None:
            at = control[0] if tail else 0
            ends, beyond = frozenset(tail[at : at + 1]), frozenset(tail[i] for i in control[1:])
            return _Ending(tail=tail, at=at, ends=ends, beyond=beyond - ends, certain=at == 0)
        if not text.tail:
            return replace(text, tail=tail, at=len(tail))
        # The same token ends a turn of text and one of calls, or else the last control token does (`<|eom_id|>`).
        alike = [i for i in control if tail[i] in text.ends]
        at = (alike or control)[-1]
        return replace(text, tail=tail, at=at, ends=text.ends | {tail[at]}, certain=text.certain and bool(alike))

    async def _proof(self, render: Render, shape: _Shape) -> _Proof | None:
        if shape not in self._proofs:
            try:
                proof = await self._prove(render, shape)
            except CannotRender:
                proof = None
            _remember(self._proofs, shape, proof)
        return self._proofs[shape]

    async def _prove(self, render: Render, shape: _Shape) -> _Proof | None:
        """Whether the marker's suffix is what full renders write, after histories of many kinds."""
        kind, made = shape.kind, calls(shape.kind.calls)
        ending = await self._ending(render, kind)
        if isinstance(ending, CannotSplice):
            return None
        if shape.tools and await self._proof(render, replace(shape, tools=False)) is None:
            return None

        async def marked(found: Sequence[ToolCall], word: str) -> list[int]:
            conversation = [*exchanges(1), answer(found, content=kind.content), *new_messages(shape.roles, found, word)]
            return await render(conversation, generation_prompt=True, tools=False)

        thoughts = await _takes_thoughts(render, kind, shape.roles)
        one, two = await marked(made, "new"), await marked(made, "other")
        after = await _after_answer(render, kind, shape.roles)
        shown = len(one) - len(after or ())
        cut = shown + ending.at + 1
        if cut >= len(one) or one[shown : cut - 1] != ending.tail[: ending.at] or one[cut - 1] not in self._control:
            return None
        # Its last words tell the answer's turn from others that end alike; an empty answer has none.
        start = shown - (_CONTEXT if kind.text or kind.calls else 0)
        new = [
            (marker[start:], new_messages(shape.roles, made, word)) for marker, word in ((one, "new"), (two, "other"))
        ]
        taken = [*await self._taken(render, shape)]
        if any(role.endswith(PICTURED) for role in shape.roles):
            taken += await self._pictured(render, shape)
        for n, history in enumerate(taken):
            content = kind.content if kind.text or kind.calls else " " * (n % 3)
            conversation = [*history, answer(made, content=content, thinking=thoughts and n % 2 == 1)]
            if not await _agree(render, conversation, new, cut - start, tools=shape.tools):
                return None
        if not taken:
            return None
        head = one[: min(cut, _same(one, await marked(renamed(made), "new")))]
        control = [token for token in one[len(head) : cut] if token in self._control]
        return _Proof(head=head, control=control, ending=replace(ending, ends=ending.ends | {one[cut - 1]}))

    async def _pictured(self, render: Render, shape: _Shape) -> list[list[Message]]:
        """The histories with images that the template takes."""
        taken: list[list[Message]] = []
        for history in pictured_histories():
            with suppress(CannotRender):
                await render(history, generation_prompt=True, tools=shape.tools)
                taken.append(history)
        return taken

    async def _taken(self, render: Render, shape: _Shape) -> list[list[Message]]:
        """The histories that the template takes; one that it refuses has no answer to continue."""
        key = shape.kind.options, shape.tools, shape.asked
        if key not in self._histories:
            taken: list[list[Message]] = []
            for history in histories(few=shape.tools) if shape.asked else unasked_histories():
                for told in (history, unthought(history)):
                    with suppress(CannotRender):
                        await render(told, generation_prompt=True, tools=shape.tools)
                        taken.append(told)
                        break
            _remember(self._histories, key, taken)
        system = "system" in shape.roles
        return [each for each in self._histories[key] if not (system and each[0]["role"] == "developer")]


async def _takes_thoughts(render: Render, kind: _Kind, roles: Sequence[str]) -> bool:
    """Whether the template takes an answer with thoughts: no request whose answers have some is served otherwise."""
    made = calls(kind.calls)
    conversation = [*exchanges(1), answer(made, content=kind.content, thinking=True), *new_messages(roles, made, "new")]
    with suppress(CannotRender):
        await render(conversation, generation_prompt=True, tools=False)
        return True
    return False


async def _after_answer(render: Render, kind: _Kind, roles: Sequence[str]) -> list[int] | None:
    """What follows an answer's last word: where two conversations agree that differ in this word and nothing else.

    None if the template does not show it.
    """
    made = calls(kind.calls)
    one, other = [
        await render(
            [
                *exchanges(1),
                answer(made, content=kind.content and marker, marker=marker),
                *new_messages(roles, made, "new"),
            ],
            generation_prompt=bool(roles),
            tools=False,
        )
        for marker in MARKERS
    ]
    return None if one == other else one[len(one) - _same(one[::-1], other[::-1]) :]


async def _agree(
    render: Render,
    conversation: Sequence[Message],
    new: Sequence[tuple[list[int], list[Message]]],
    cut: int,
    *,
    tools: bool,
) -> bool:
    """Whether full renders end in what is expected after each wording of the new messages, and begin alike.

    What the new messages say would be lost before the cut.
    """
    heads: list[list[int]] = []
    for expected, messages in new:
        try:
            full = await render([*conversation, *messages], generation_prompt=True, tools=tools)
        except CannotRender:
            return False
        if full[-len(expected) :] != expected:
            return False
        heads.append(full[: len(full) - len(expected) + cut])
    return heads[0] == heads[1]


async def _full(render: Render, messages: Sequence[Message], last: int, ending: _Ending) -> _Found | CannotSplice:
    full = await render(messages, generation_prompt=True, tools=True)
    try:
        head = await render(messages[: last + 1], generation_prompt=False, tools=True)
    except CannotRender:
        return CannotSplice(why="boundary_not_proven")
    tail = ending.tail[ending.at :]
    cut = len(head) - len(tail) + 1
    if not tail or head[cut - 1 :] != tail or cut >= len(full) or full[:cut] != head[:cut]:
        return CannotSplice(why="boundary_not_proven")
    return _Found(token_ids=full[cut:], end_of_turn=tail[0], ending=ending, path="full")


def _same(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens two renders share.

    >>> _same([1, 2, 3], [1, 2, 4])
    2
    """
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _remember(kept: OrderedDict[_Key, _Value], key: _Key, value: _Value) -> None:
    kept[key] = value
    if len(kept) > _PROOFS_KEPT:
        kept.popitem(last=False)
