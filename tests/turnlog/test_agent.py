from __future__ import annotations

from itertools import pairwise
from typing import Any

from turnlog.demo.agent import FORGOTTEN, forget_older_observations, observe
from turnlog.demo.run import CLOSE
from turnlog.demo.sample import plan


def _talk(turns: int, *, rewrite_every: int | None) -> list[list[dict[str, Any]]]:
    """The requests of an agent whose model says a1, a2, ..."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "s"}, {"role": "user", "content": "task"}]
    requests: list[list[dict[str, Any]]] = []
    for turn in range(turns):
        if rewrite_every and turn and turn % rewrite_every == 0:
            messages = forget_older_observations(messages)
        requests.append(messages)
        message = {"role": "assistant", "content": f"a{turn}"}
        messages = [*messages, message, *observe(message, f"a{turn}")]
    return requests


def _contexts(requests: list[list[dict[str, Any]]]) -> list[int]:
    """How many calls share each context; a call without all messages of the last one in front begins another."""
    contexts = [1]
    for before, after in pairwise(requests):
        if after[: len(before)] == before:
            contexts[-1] += 1
        else:
            contexts.append(1)
    return contexts


def test_an_agent_that_rewrites_after_every_two_actions_has_the_contexts_of_the_plan() -> None:
    requests = _talk(5, rewrite_every=2)
    assert _contexts(requests) == [2, 2, 1]
    assert [message["content"] for message in requests[4]].count(FORGOTTEN) == 3
    assert FORGOTTEN not in requests[4][-1]["content"]


def test_an_agent_that_does_not_rewrite_has_one_context() -> None:
    assert _contexts(_talk(20, rewrite_every=None)) == [20]


def test_a_tool_call_is_answered_by_a_result_with_its_id() -> None:
    message = {"role": "assistant", "tool_calls": [{"id": "c1"}, {"id": "c2"}]}
    assert [(result["role"], result["tool_call_id"]) for result in observe(message, "")] == [
        ("tool", "c1"),
        ("tool", "c2"),
    ]


def test_the_plan_of_the_demo_is_four_short_rollouts_of_one_group_and_a_long_one() -> None:
    rollouts = plan("demo")
    assert [(rollout.turns, len(rollout.rows)) for rollout in rollouts] == [(5, 3)] * 4 + [(20, 1)]
    assert [rollout.group_id for rollout in rollouts] == ["demo"] * 4 + ["demo-long"]
    assert CLOSE == 1e-3
