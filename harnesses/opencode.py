"""OpenCode in its three dialects; which one it speaks is the provider package's choice."""

import json

from task import KEY, MODEL, PROMPT, Harness, Place, only, side_calls, steps

WINDOW, OUTPUT = 28_000, 4_096
"""It compacts when the context is within `OUTPUT` of `WINDOW`."""
PACKAGES = {"chat": "@ai-sdk/openai-compatible", "messages": "@ai-sdk/anthropic", "responses": "@ai-sdk/openai"}


def _shell(command: str) -> tuple[str, dict[str, str]]:
    return "bash", {"command": command, "description": "Runs a small command"}


def _harness(dialect: str) -> Harness:
    def prepare(place: Place) -> None:
        model = {
            "name": MODEL,
            "limit": {"context": WINDOW, "output": OUTPUT},
            "tool_call": True,
            "reasoning": True,
        }
        config = {
            "$schema": "https://opencode.ai/config.json",
            "provider": {
                "local": {
                    "npm": PACKAGES[dialect],
                    "options": {"baseURL": f"{place.base}/v1", "apiKey": KEY},
                    "models": {MODEL: model},
                }
            },
            "model": f"local/{MODEL}",
            "small_model": f"local/{MODEL}",
            "autoupdate": False,
            "share": "disabled",
            "compaction": {"auto": True, "prune": False},
        }
        (place.home / "opencode.json").write_text(json.dumps(config))

    def command(place: Place) -> list[str]:
        return [str(place.installed / "npm/node_modules/.bin/opencode"), "run", "--auto", "--print-logs", PROMPT]

    def environment(place: Place) -> dict[str, str]:
        return {
            "OPENCODE_CONFIG": str(place.home / "opencode.json"),
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        }

    return Harness(
        name=f"opencode-{dialect}",
        version="opencode-ai 1.18.33",
        dialect=dialect,
        answers=[*only(steps(_shell), tools=True), *side_calls(2)],
        command=command,
        environment=environment,
        prepare=prepare,
        needs="npm/node_modules/.bin/opencode",
        roots={"first_call": 1, "fresh_context": 2, "context_replaced": 1},
    )


HARNESSES = [_harness(dialect) for dialect in PACKAGES]
