"""OpenHands SDK with its terminal and its summarising condenser, over chat and Messages.

Imported by run.py it says how to run; run by the Python of the harness's own environment it is the agent.
"""

import sys
from pathlib import Path

from task import FINAL, KEY, MODEL, PROMPT, Harness, only, side_calls, steps

PREFIX = {"chat": "openai", "messages": "anthropic"}


def _harness(dialect: str) -> Harness:
    final = {"reasoning": "\nAll there.\n", "tool_calls": [{"name": "finish", "arguments": {"message": FINAL}}]}
    answers = only(steps(lambda command: ("terminal", {"command": command}), final=final), tools=True)
    return Harness(
        name=f"openhands-sdk-{dialect}",
        version="openhands-sdk 1.58.2",
        dialect=dialect,
        answers=[*answers, *side_calls(2)],
        command=lambda place: [str(place.installed / "openhands/bin/python"), __file__, dialect, place.base],
        environment=lambda _: {"OPENHANDS_SUPPRESS_BANNER": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        needs="openhands/lib/*/site-packages/openhands/sdk",
        roots={"first_call": 1, "fresh_context": 2, "context_replaced": 2},
    )


def _agent(dialect: str, base: str) -> None:
    from openhands.sdk import LLM, Agent, Conversation, Tool
    from openhands.sdk.context.condenser import LLMSummarizingCondenser
    from openhands.tools.file_editor import FileEditorTool
    from openhands.tools.terminal import TerminalTool

    def model(usage: str) -> LLM:
        url = base if dialect == "messages" else f"{base}/v1"
        return LLM(
            model=f"{PREFIX[dialect]}/{MODEL}",
            base_url=url,
            api_key=KEY,
            usage_id=usage,
            max_output_tokens=4096,
            max_input_tokens=100_000,
        )

    agent = Agent(
        llm=model("agent"),
        tools=[Tool(name=TerminalTool.name), Tool(name=FileEditorTool.name)],
        condenser=LLMSummarizingCondenser(llm=model("condenser"), max_size=16, keep_first=2),
    )
    conversation = Conversation(agent=agent, workspace=str(Path.cwd()))
    conversation.send_message(PROMPT)
    conversation.run()


HARNESSES = [_harness(dialect) for dialect in PREFIX]

if __name__ == "__main__":
    _agent(*sys.argv[1:])
