"""The fixed conversations that a proof about a template is made of, and what it must know of a real one.

Knows chat messages; does not know tokens, templates or what is proven with them (engine.splice). Law: nothing here
depends on a request but the ids and names of its answer's tool calls, so a proof is the same for every rollout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

_Message = Mapping[str, object]

MARKERS = ("here ends what turnlog", "here ends what golnrut")
"""Two answers that differ in their last word, and in its last letter, so that they share no token of it."""
SWITCHES = ("/no_think /nothink detailed thinking off", "/think detailed thinking on")
"""Words by which a message can switch thinking off or on in the templates of some models."""

PICTURED = "+image"
"""Behind a role: its message holds an image."""
_PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAADgAAAA4CAIAAAAn5KxJAAAARElEQVR42u3O"
    "QQkAAAgEsMtpEiMay4cphMECLNXzQkRFRUVFRUVFRUVFRUVFRUVFRUVFRUVFRUVFRUVFRUVFRUVFRc8C6BOfnn5KPRcAAAAASUVORK5CYII="
)
"""56 by 56 pixels of one colour."""
_THOUGHTS = ("reasoning", "reasoning_content")
USUAL_SHAPES = (
    ("plain", False, 0, True, ("user",)),
    ("tools offered", True, 0, True, ("user",)),
    ("tool result", True, 1, False, ("tool",)),
    ("text, then tool result", True, 1, True, ("tool",)),
    ("parallel tool results", True, 2, False, ("tool", "tool")),
    ("tool result, then user", True, 1, False, ("tool", "user")),
    ("system, then user", False, 0, True, ("system", "user")),
)
"""Shapes worth a proof before the first request: name, tools shown, tool calls, text beside them, new roles."""


class ToolCall(NamedTuple):
    """What of a tool call its result may be rendered with. Its arguments are left out: no template looks at them."""

    id: str
    name: str

    @property
    def plain(self) -> bool:
        """Whether no part of it could be read as a control token."""
        return all(letter.isalnum() or letter in "_-.:/" for letter in self.id + self.name)


def calls(count: int, word: str = "look") -> tuple[ToolCall, ...]:
    """Tool calls with the nine-letter ids that some templates demand; another word gives other names.

    >>> calls(1)
    (ToolCall(id='turnlog00', name='look_up'),)
    """
    return tuple(ToolCall(f"turnlog{i:02}", f"{word}_up") for i in range(count))


def renamed(found: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
    """As many tool calls with other ids and other names."""
    return tuple(ToolCall(f"golnrut{i:02}", "find") for i in range(len(found)))


def answer(
    found: Sequence[ToolCall] = (), *, content: str = MARKERS[0], marker: str = MARKERS[0], thinking: bool = False
) -> _Message:
    """An assistant's message; the arguments of its tool calls end in the marker."""
    message: dict[str, object] = {"role": "assistant", "content": content}
    if thinking:
        message |= dict.fromkeys(_THOUGHTS, "a thought")
    if found:
        arguments = f'{{"text": "{marker}"}}'
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
            for call in found
        ]
    return message


def new_messages(roles: Sequence[str], found: Sequence[ToolCall], word: str) -> list[_Message]:
    """One message of each role; the n-th tool result is the n-th call's. They say the word before anything else."""
    messages: list[_Message] = []
    results = 0
    for told in roles:
        role = told.removesuffix(PICTURED)
        words = f"{word} {role}"
        message: dict[str, object] = {"role": role, "content": words if role == told else _pictured(words)}
        if role == "tool" and found:
            message["tool_call_id"] = found[results % len(found)].id
            results += 1
        messages.append(message)
    return messages


def exchanges(turns: int) -> list[_Message]:
    """So many questions, all but the last answered, every other answer thought about."""
    messages: list[_Message] = [_turn("user", "question")]
    for turn in range(1, turns):
        messages += [answer(content=f"answer {turn}", thinking=turn % 2 == 0), _turn("user", f"question {turn}")]
    return messages


def unasked_histories() -> Iterator[list[_Message]]:
    """What an answer may follow where no user has said anything: instructions, and a summary as if from a model."""
    system, summary = _turn("system", "be brief"), answer(content="a summary")
    one = calls(1, "other")
    step = [answer(one), *new_messages(("tool",), one, "old")]
    for front in ([system], []):
        yield [*front, summary]
        yield [*front, summary, *step]
        yield [*front, summary, *step, *step]
        yield [*front, *step]
        if front:
            yield front


def pictured_histories() -> Iterator[list[_Message]]:
    """What an answer may follow where images were shown before: a template may count them."""
    shown: _Message = {"role": "user", "content": _pictured("question")}
    one = calls(1, "other")
    yield [shown]
    yield [*exchanges(1), answer(content="so"), shown, answer(content="so"), _turn("user", "and")]
    yield [shown, answer(one), *new_messages((f"tool{PICTURED}",), one, "old")]


def histories(*, few: bool) -> Iterator[list[_Message]]:
    """What an answer may follow: conversations that differ in all that a template was seen to look at.

    That is their length, a system message in front or later, earlier thinking, earlier tool calls of the same ids,
    words that switch thinking, how much was said, and what the answer itself follows. `few` are the most telling.
    """
    system = _turn("system", "be brief")
    one, two = calls(1, "other"), calls(2, "other")
    step = [answer(one), *new_messages(("tool",), one, "old")]
    steps = [answer(two, thinking=True), *new_messages(("tool", "tool"), two, "old")]
    agent = [*exchanges(1), *steps, *exchanges(2)[1:], *step]
    yield exchanges(1)
    yield [system, *exchanges(3)]
    yield [system, *agent]
    yield [system, *exchanges(21)]
    if few:
        return
    yield agent
    yield [*exchanges(1), *step]
    yield [system, *exchanges(1)]
    for turns in (2, 3, 4, 5, 8, 13, 21):
        yield exchanges(turns)
    for switch in SWITCHES:
        yield [_turn("system", switch), *exchanges(1)]
        yield [_turn("user", switch), *exchanges(2)[1:]]
        yield [*exchanges(2)[:-1], _turn("user", switch)]
    for front in ([], [system]):
        yield [*front, *exchanges(2), system, *exchanges(1)]
        # What is said later may be said before, a first message may say much, or nothing.
        yield [*front, _turn("user", "new user"), answer(content="so"), _turn("user", "new user")]
    for content in ("", "a long story " * 40):
        yield [_turn("system", content), _turn("user", content), answer(content=content), _turn("user", content)]
        yield [_turn("user", content)]
    yield [_turn("developer", "be brief"), *exchanges(2)]


def unthought(messages: Sequence[_Message]) -> list[_Message]:
    """The same conversation without thoughts, for a template that takes none.

    >>> unthought([answer(content="so", thinking=True)])
    [{'role': 'assistant', 'content': 'so'}]
    """
    return [{key: value for key, value in message.items() if key not in _THOUGHTS} for message in messages]


def tool_calls(message: _Message) -> tuple[ToolCall, ...]:
    """The tool calls of an assistant's message."""
    found = message.get("tool_calls") or ()
    functions = [(call, call.get("function") or {}) for call in found] if isinstance(found, Sequence) else []
    return tuple(ToolCall(str(call.get("id", "")), str(function.get("name", ""))) for call, function in functions)


def has_text(message: _Message) -> bool:
    """Whether a message says anything but white space."""
    content = message.get("content")
    parts = [content] if isinstance(content, str) else content if isinstance(content, Sequence) else ()
    texts = (part.get("text") or part.get("refusal") if isinstance(part, Mapping) else part for part in parts)
    return any(str(text).strip() for text in texts if text)


TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})
"""Types of parts that are text, in any dialect's words."""


def text_only(message: _Message) -> bool:
    """Whether a message holds no image, sound or file."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return True
    return isinstance(content, Sequence) and all(
        isinstance(part, str) or (isinstance(part, Mapping) and part.get("type") in TEXT_PARTS) for part in content
    )


def told_role(message: _Message) -> str | None:
    """A message's role, and whether it holds images; None for one with a sound, a video or a file."""
    role = str(message["role"])
    if text_only(message):
        return role
    content = message["content"]
    parts = content if isinstance(content, Sequence) else ()
    others = {part.get("type") for part in parts if isinstance(part, Mapping)} - TEXT_PARTS
    return role + PICTURED if others <= {"image_url", "input_image"} else None


def answers_its_calls(found: Sequence[ToolCall], new: Sequence[_Message]) -> bool:
    """Whether every tool result among the new messages is of one of these calls."""
    known = {call.id for call in found}
    return all(message.get("tool_call_id") in known for message in new if message["role"] == "tool")


def _pictured(words: str) -> list[_Message]:
    return [{"type": "text", "text": words}, {"type": "image_url", "image_url": {"url": _PICTURE}}]


def _turn(role: str, content: str) -> _Message:
    return {"role": role, "content": content}
