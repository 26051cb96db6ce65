r"""The suffix of a prompt without its history, and the proof that a template allows it.

Knows messages, token ids and a way to render; does not know vLLM, the log or how a parent was found. Law: a suffix is
used only when it is proven for this template, these options and this shape of messages to be, token for token, what a
full render would write after the same assistant turn (design §7).

Two ways to get it. *marker*: the template renders a short fixed conversation whose assistant turn is a marker, followed
by the new messages; what follows the marker's turn is the suffix, and its cost follows the new messages alone. *full*:
where the marker's proof fails, the whole request is rendered and cut at the end of the assistant turn, which a second
render up to that turn must confirm. If that fails too the call cannot be spliced, and says why.

The end of a turn is found, not assumed: two conversations that differ only in their last assistant text end in the
same tokens, the first of which must be a special token (`<|im_end|>` for ChatML). A worked case, ChatML ids named:

    parent's chain   ... <|im_start|> assistant \n  Sure <|im_end|>
    suffix                                                     \n <|im_start|> user \n  Go on <|im_end|> \n ...

A model that stopped without its end-of-turn (length, stop string) gets it as the suffix's first token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from engine.errors import EngineError

Message = Mapping[str, object]
"""One chat message as the model server's template takes it."""

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_PROOFS_KEPT = 256
"""Options come from requests, so what is remembered about them has a bound."""


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
class TurnEnd:
    """What the template writes after an assistant's text; the first token is the special end-of-turn token."""

    token_ids: tuple[int, ...]

    @property
    def end_of_turn(self) -> int:
        """Id of the end-of-turn token."""
        return self.token_ids[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """What a proof holds for: render options, whether tools are shown, the answer's tool calls, the new roles."""

    options: bytes
    tools: bool
    tool_calls: int
    roles: tuple[str, ...]


class Splicer:
    """Finds suffixes, and remembers what was proven for which options and shape."""

    def __init__(self, special_ids: Collection[int]) -> None:
        self._special_ids = frozenset(special_ids)
        self._turn_ends: OrderedDict[bytes, TurnEnd | CannotSplice] = OrderedDict()
        self._proofs: OrderedDict[_Shape, bool] = OrderedDict()

    async def probe(self, render: Render, *, options: bytes) -> dict[str, str]:
        """Prove the usual shapes ahead of the first request; returns the path each will take, by name.

        >>> import asyncio
        >>> from engine.splice import Splicer
        >>> async def chatml(messages, *, generation_prompt, tools):  # a toy: one token a word, 0 ends a turn
        ...     text = " ".join(f"{m['role']} {m['content']} 0" for m in messages)
        ...     return [int(w) if w.isdigit() else ord(w[-1]) for w in text.split()] + [9] * generation_prompt
        >>> asyncio.run(Splicer({0}).probe(chatml, options=b""))["plain"]
        'marker'
        """
        shapes = {
            "plain": _Shape(options=options, tools=False, tool_calls=0, roles=("user",)),
            "tools offered": _Shape(options=options, tools=True, tool_calls=0, roles=("user",)),
            "tool result": _Shape(options=options, tools=True, tool_calls=1, roles=("tool",)),
            "parallel tool results": _Shape(options=options, tools=True, tool_calls=2, roles=("tool", "tool")),
            "tool result, then user": _Shape(options=options, tools=True, tool_calls=1, roles=("tool", "user")),
        }
        found: dict[str, str] = {}
        for name, shape in shapes.items():
            end = await self._turn_end(render, options)
            if isinstance(end, CannotSplice):
                found[name] = f"cannot_splice:{end.why}"
            else:
                found[name] = "marker" if await self._proven(render, shape, end) else "full"
        return found

    async def suffix(
        self, render: Render, messages: Sequence[Message], *, options: bytes, tools: bool, last_token: int
    ) -> Suffix | CannotSplice:
        """The tokens that follow the parent's chain, for a request whose last assistant turn is the parent's answer.

        `options` identifies everything but the messages that shapes a render; `last_token` is the chain's last.
        """
        last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
        answer, new = messages[last], messages[last + 1 :]
        if not all(_text_only(message) for message in new):
            return CannotSplice(why="media")
        try:
            end = await self._turn_end(render, options)
            if isinstance(end, CannotSplice):
                return end
            roles = tuple(str(message["role"]) for message in new)
            calls = _tool_calls(answer)
            shape = _Shape(options=options, tools=tools, tool_calls=min(len(calls), 2), roles=_runs(roles))
            if await self._proven(render, shape, end):
                found = await _marker_suffix(render, calls, new, end)
                path: Literal["marker", "full"] = "marker"
            else:
                found = await _full_suffix(render, messages, last, end)
                path = "full"
        except CannotRender as error:
            return CannotSplice(why=f"template:{error}")
        if found is None:
            return CannotSplice(why="boundary_not_proven")
        return Suffix(token_ids=found if last_token == end.end_of_turn else [end.end_of_turn, *found], path=path)

    async def _turn_end(self, render: Render, options: bytes) -> TurnEnd | CannotSplice:
        if options not in self._turn_ends:
            one, other = [await render(_short(text, ()), generation_prompt=False, tools=False) for text in _MARKERS]
            same = 0
            while same < min(len(one), len(other)) and one[-1 - same] == other[-1 - same]:
                same += 1
            end = one[len(one) - same :]
            known = bool(end) and end[0] in self._special_ids
            _remember(
                self._turn_ends,
                options,
                TurnEnd(token_ids=tuple(end)) if known else CannotSplice(why="no_end_of_turn_token"),
            )
        return self._turn_ends[options]

    async def _proven(self, render: Render, shape: _Shape, end: TurnEnd) -> bool:
        if shape not in self._proofs:
            _remember(self._proofs, shape, await _prove(render, shape, end))
        return self._proofs[shape]


async def _prove(render: Render, shape: _Shape, end: TurnEnd) -> bool:
    """Whether the marker's suffix equals the full render's, over fixed conversations with and without thinking."""
    calls = [_tool_call(f"turnlog{i:02}", "look_up") for i in range(shape.tool_calls)]
    new = [_probe_message(role, i, calls) for i, role in enumerate(shape.roles)]
    try:
        marker = await _marker_suffix(render, calls, new, end)
        if marker is None:
            return False
        for thinking in (False, True):
            history = [*_history(thinking), _assistant("second answer", calls, thinking=thinking)]
            head = await render(history, generation_prompt=False, tools=shape.tools)
            full = await render([*history, *new], generation_prompt=True, tools=shape.tools)
            if _after_turns(full, head.count(end.end_of_turn), end) != marker:
                return False
    except CannotRender:
        return False
    return True


async def _marker_suffix(
    render: Render, calls: Sequence[Message], new: Sequence[Message], end: TurnEnd
) -> list[int] | None:
    short = _short(_MARKERS[0], calls)
    head = await render(short, generation_prompt=False, tools=False)
    if tuple(head[-len(end.token_ids) :]) != end.token_ids:
        return None
    full = await render([*short, *new], generation_prompt=True, tools=False)
    # Counting turns, not comparing prefixes: templates drop the thinking of a turn once a user message follows it.
    return _after_turns(full, head.count(end.end_of_turn), end)


async def _full_suffix(render: Render, messages: Sequence[Message], last: int, end: TurnEnd) -> list[int] | None:
    head = await render(messages[: last + 1], generation_prompt=False, tools=True)
    cut = len(head) - len(end.token_ids) + 1
    if tuple(head[cut - 1 :]) != end.token_ids:
        return None
    full = await render(messages, generation_prompt=True, tools=True)
    return full[cut:] if full[:cut] == head[:cut] else None


def _after_turns(token_ids: list[int], turns: int, end: TurnEnd) -> list[int] | None:
    """What follows the n-th end-of-turn token; None when there are fewer, or nothing follows."""
    position = -1
    for _ in range(turns):
        try:
            position = token_ids.index(end.end_of_turn, position + 1)
        except ValueError:
            return None
    return token_ids[position + 1 :] or None


_MARKERS = ("turnlog", "golnrut")
"""Two answers that differ in their last letter, so that no token of theirs is part of the common end."""


def _short(text: str, calls: Sequence[Message]) -> list[Message]:
    return [{"role": "user", "content": "turnlog"}, _assistant(text, calls, thinking=False)]


def _history(thinking: bool) -> list[Message]:
    return [
        {"role": "user", "content": "first question"},
        _assistant("first answer", (), thinking=thinking),
        {"role": "user", "content": "second question"},
    ]


def _assistant(text: str, calls: Sequence[Message], *, thinking: bool) -> Message:
    message: dict[str, object] = {"role": "assistant", "content": text}
    if thinking:
        message |= {"reasoning": "a thought", "reasoning_content": "a thought"}
    if calls:
        message["tool_calls"] = list(calls)
    return message


def _tool_call(call_id: str, name: str) -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}


def _tool_calls(answer: Message) -> list[Message]:
    """The answer's tool calls, arguments left out: a result may render its call's id or name, never its arguments."""
    calls = answer.get("tool_calls") or ()
    found: list[Message] = []
    for call in calls if isinstance(calls, Sequence) else ():
        function = call.get("function") or {}
        found.append(_tool_call(str(call.get("id")), str(function.get("name"))))
    return found


def _probe_message(role: str, index: int, calls: Sequence[Message]) -> Message:
    message: dict[str, object] = {"role": role, "content": f"new {role} {index}"}
    if role == "tool":
        message["tool_call_id"] = str(calls[min(index, len(calls) - 1)]["id"]) if calls else "turnlog00"
    return message


def _runs(roles: tuple[str, ...]) -> tuple[str, ...]:
    """Roles with runs of more than two shortened to two: what holds for two of a kind in a row holds for more."""
    return tuple(role for i, role in enumerate(roles) if i < 2 or not role == roles[i - 1] == roles[i - 2])


_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})


def _text_only(message: Message) -> bool:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return True
    return isinstance(content, Sequence) and all(
        isinstance(part, str) or (isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS) for part in content
    )


def _remember(kept: OrderedDict[_Key, _Value], key: _Key, value: _Value) -> None:
    kept[key] = value
    if len(kept) > _PROOFS_KEPT:
        kept.popitem(last=False)
