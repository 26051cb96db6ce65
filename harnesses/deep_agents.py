"""deepagents with its local shell, over chat, Responses and Messages.

Imported by run.py it says how to run; run by the Python of the harness's own environment it is the agent.
"""

import sys
from pathlib import Path

from task import KEY, MODEL, PROMPT, Harness, only, side_calls, steps

WINDOW = 24_000
"""What the model's profile says; deepagents summarises at a share of it."""


def _harness(dialect: str) -> Harness:
    answers = only(steps(lambda command: ("execute", {"command": command})), tools=True)
    return Harness(
        name=f"deepagents-{dialect}",
        version="deepagents 0.7.32",
        dialect=dialect,
        answers=[*answers, *side_calls(1)],
        command=lambda place: [str(place.installed / "agents/bin/python"), __file__, dialect, place.base],
        needs="agents/lib/*/site-packages/deepagents",
        roots={"first_call": 1, "fresh_context": 1, "context_replaced": 1},
    )


def _agent(dialect: str, base: str) -> None:
    from deepagents import create_deep_agent
    from deepagents.backends import LocalShellBackend
    from langchain_anthropic import ChatAnthropic
    from langchain_openai import ChatOpenAI

    profile = {"max_input_tokens": WINDOW, "tool_calling": True}
    if dialect == "messages":
        model = ChatAnthropic(model=MODEL, base_url=base, api_key=KEY, max_tokens=4096, profile=profile)
    else:
        model = ChatOpenAI(
            model=MODEL, base_url=f"{base}/v1", api_key=KEY, use_responses_api=dialect == "responses", profile=profile
        )
    agent = create_deep_agent(model=model, backend=LocalShellBackend(root_dir=Path.cwd(), inherit_env=True))
    found = agent.invoke({"messages": [{"role": "user", "content": PROMPT}]}, {"recursion_limit": 200})
    print(found["messages"][-1].text)


HARNESSES = [_harness(dialect) for dialect in ("chat", "responses", "messages")]

if __name__ == "__main__":
    _agent(*sys.argv[1:])
