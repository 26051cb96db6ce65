"""mini-swe-agent in its three dialects, as its own command runs it."""

from task import FINAL, KEY, MODEL, PROMPT, Harness, Place, steps

END = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
MODELS = {
    "chat": [f"openai/{MODEL}"],
    "responses": [f"openai/{MODEL}", "--model-class", "litellm_response"],
    "messages": [f"anthropic/{MODEL}"],
}


def _harness(dialect: str) -> Harness:
    end = {"text": FINAL, "tool_calls": [{"name": "bash", "arguments": {"command": END}}]}
    return Harness(
        name=f"mini-swe-agent-{dialect}",
        version="mini-swe-agent 2.4.6",
        dialect=dialect,
        answers=steps(lambda command: ("bash", {"command": command}), final=end),
        command=lambda place: _command(place, dialect),
        environment=_environment,
        needs="agents/bin/mini",
        roots={"first_call": 1},
    )


def _command(place: Place, dialect: str) -> list[str]:
    mini = [str(place.installed / "agents/bin/mini"), "-t", PROMPT, "-y", "--exit-immediately"]
    return [*mini, "-o", str(place.home / "out.json"), "-m", *MODELS[dialect]]


def _environment(place: Place) -> dict[str, str]:
    return {
        "OPENAI_API_BASE": f"{place.base}/v1",
        "OPENAI_API_KEY": KEY,
        "ANTHROPIC_API_BASE": place.base,
        "ANTHROPIC_API_KEY": KEY,
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


HARNESSES = [_harness(dialect) for dialect in MODELS]
