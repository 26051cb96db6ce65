"""OpenAI Agents SDK over chat and Responses: a tool that runs commands, and a loop of the SDK's own.

Imported by run.py it says how to run; run by the Python of the harness's own environment it is the agent.
"""

import subprocess
import sys

from task import KEY, MODEL, PROMPT, Harness, Place, steps


def _harness(dialect: str) -> Harness:
    return Harness(
        name=f"openai-agents-{dialect}",
        version="openai-agents 0.24.0",
        dialect=dialect,
        answers=steps(lambda command: ("shell", {"command": command})),
        command=lambda place: _command(place, dialect),
        needs="agents/lib/*/site-packages/agents",
        roots={"first_call": 1},
    )


def _command(place: Place, dialect: str) -> list[str]:
    return [str(place.installed / "agents/bin/python"), __file__, dialect, f"{place.base}/v1"]


def _agent(dialect: str, base: str) -> None:
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    @function_tool
    def shell(command: str) -> str:
        """Run a shell command and return what it prints."""
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=30)
        return done.stdout + done.stderr

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=base, api_key=KEY)
    make = OpenAIChatCompletionsModel if dialect == "chat" else OpenAIResponsesModel
    agent = Agent(
        name="Collector",
        instructions="You work with files.",
        model=make(model=MODEL, openai_client=client),
        tools=[shell],
    )
    print(Runner.run_sync(agent, PROMPT, max_turns=30).final_output)


HARNESSES = [_harness("chat"), _harness("responses")]

if __name__ == "__main__":
    _agent(*sys.argv[1:])
