"""Continue's command over chat, as `cn -p` runs it."""

from task import FINAL, KEY, MODEL, NOTES, PROMPT, Harness, Place, steps

WINDOW = 18_000


def _prepare(place: Place) -> None:
    (place.home / "config.yaml").write_text(f"""
name: local
version: 1.0.0
schema: v1
models:
  - name: {MODEL}
    provider: openai
    model: {MODEL}
    apiBase: {place.base}/v1
    apiKey: {KEY}
    roles: [chat]
    capabilities: [tool_use]
    defaultCompletionOptions:
      contextLength: {WINDOW}
      maxTokens: 1000
""")


def _command(place: Place) -> list[str]:
    cn = str(place.installed / "npm/node_modules/.bin/cn")
    return [cn, "-p", "--auto", "--config", str(place.home / "config.yaml"), PROMPT]


_summary = {"text": NOTES.format(1), "when": {"last_user_contains": "summar"}}
HARNESSES = [
    Harness(
        name="continue-cli",
        version="@continuedev/cli 1.5.47",
        dialect="chat",
        # After a compaction it says "continue" to a first final answer.
        answers=[_summary, *steps(lambda command: ("Bash", {"command": command})), {"text": FINAL}],
        command=_command,
        environment=lambda _: {"CONTINUE_TELEMETRY_ENABLED": "0", "CONTINUE_ALLOW_ANONYMOUS_TELEMETRY": "0"},
        prepare=_prepare,
        needs="npm/node_modules/.bin/cn",
        roots={"first_call": 1, "ends_with_model_item": 1},
    )
]
