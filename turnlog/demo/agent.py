"""A small agent: a stock client, a message list, and a habit of forgetting.

Knows the official `openai` client and a toy task; does not know turnlog, tokens or rows. Law: it speaks to the server
as any harness does. It sends messages and gets messages back; it never names a parent, a segment or a token.

The task is to write letters. Each observation says how many of the last answer's characters were letters, and the
reward is the share of letters in all answers: even a random model gets different rewards for different rollouts.

What `rewrite_every=2` sends, with observation k as Ok, the model's action k as Ak and the marker as M:

    call 1   task
    call 2   task A1 O1
    call 3   task A1 M  A2 O2
    call 4   task A1 M  A2 O2 A3 O3
    call 5   task A1 M  A2 M  A3 M  A4 O4

Calls {1, 2}, {3, 4} and {5} share a context, so the rollout is three training rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessage, ChatCompletionMessageParam, ChatCompletionToolParam

FORGOTTEN = "(an older observation was left out)"
"""What stands in the place of an observation after a rewrite."""
SYSTEM = "You are an agent. Write as many letters as you can. Call `count` to count the letters of a text."
TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "count",
        "description": "Count the letters of a text.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What the agent knows of its rollout at the end."""

    requests: tuple[tuple[dict[str, Any], ...], ...]
    """The messages of each call, as they were sent."""
    response_ids: tuple[str, ...]
    reward: float


async def run_rollout(
    client: AsyncOpenAI,
    *,
    model: str,
    task: str,
    turns: int,
    rewrite_every: int | None = None,
    thinking: bool = False,
    seed: int = 0,
    max_tokens: int = 32,
    on_turn: Callable[[], None] = lambda: None,
) -> Finished:
    """Work on the task for a number of turns; after each `rewrite_every` actions forget older observations.

    The base URL of the client says which rollout this is. `on_turn` is called after each answer.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]
    requests: list[tuple[dict[str, Any], ...]] = []
    response_ids: list[str] = []
    letters = characters = 0
    for turn in range(turns):
        if rewrite_every and turn and turn % rewrite_every == 0:
            messages = forget_older_observations(messages)
        answer = await client.chat.completions.create(
            model=model,
            messages=cast("list[ChatCompletionMessageParam]", messages),
            tools=[TOOL],
            max_tokens=max_tokens,
            temperature=1.0,
            seed=seed + turn,
            extra_body={"chat_template_kwargs": {"enable_thinking": thinking}},
        )
        requests.append(tuple(messages))
        message = as_served(answer.choices[0].message)
        text = f"{message.get('reasoning', '')}{message.get('content', '')}"
        letters += sum(map(str.isalpha, text))
        characters += len(text)
        messages = [*messages, message, *observe(message, text)]
        response_ids.append(answer.id)
        on_turn()
    reward = letters / max(characters, 1)
    return Finished(requests=tuple(requests), response_ids=tuple(response_ids), reward=reward)


def as_served(message: ChatCompletionMessage) -> dict[str, Any]:
    """The assistant's message to send back: what was served, thoughts and tool calls included, less its empty fields.

    >>> message = ChatCompletionMessage.model_validate(
    ...     {"role": "assistant", "content": "Hm.", "reasoning": "why", "tool_calls": [], "refusal": None}
    ... )
    >>> sorted(as_served(message).items())
    [('content', 'Hm.'), ('reasoning', 'why'), ('role', 'assistant')]
    """
    return {name: value for name, value in message.model_dump().items() if value}


def observe(message: dict[str, Any], text: str) -> list[dict[str, Any]]:
    """What the environment says to an action: one result for each tool call, or an observation.

    >>> observe({"role": "assistant", "content": "a1"}, "a1")
    [{'role': 'user', 'content': '1 of 2 characters were letters. Go on.'}]
    """
    said = f"{sum(map(str.isalpha, text))} of {len(text)} characters were letters. Go on."
    calls = message.get("tool_calls", [])
    if calls:
        return [{"role": "tool", "tool_call_id": call["id"], "content": said} for call in calls]
    return [{"role": "user", "content": said}]


def forget_older_observations(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same messages with all observations but the newest replaced by a marker.

    >>> roles = ["system", "user", "assistant", "user", "assistant", "user"]
    >>> texts = ["s", "task", "a", "o1", "b", "o2"]
    >>> talk = [{"role": role, "content": text} for role, text in zip(roles, texts)]
    >>> [message["content"] for message in forget_older_observations(talk)]
    ['s', 'task', 'a', '(an older observation was left out)', 'b', 'o2']
    """
    newest = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    return [
        {**message, "content": FORGOTTEN} if message["role"] in ("user", "tool") and 1 < i < newest else message
        for i, message in enumerate(messages)
    ]
