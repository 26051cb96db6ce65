"""pi over chat and Messages, as `pi -p` runs it."""

import json

from task import KEY, MODEL, PROMPT, Harness, Place, only, side_calls, steps

WINDOW, RESERVE, KEEP = 36_000, 16_384, 1_500
"""It compacts at `WINDOW` less `RESERVE`, and keeps the newest `KEEP` tokens as they are."""
KINDS = {"chat": "openai-completions", "messages": "anthropic-messages"}


def _harness(dialect: str) -> Harness:
    def prepare(place: Place) -> None:
        folder = place.home / ".pi/agent"
        folder.mkdir(parents=True)
        model = {"id": MODEL, "reasoning": True, "input": ["text"], "contextWindow": WINDOW, "maxTokens": 4096}
        provider = {
            "baseUrl": place.base if dialect == "messages" else f"{place.base}/v1",
            "api": KINDS[dialect],
            "apiKey": KEY,
            "models": [model],
        }
        settings = {
            "defaultProvider": "local",
            "defaultModel": MODEL,
            "compaction": {"enabled": True, "reserveTokens": RESERVE, "keepRecentTokens": KEEP},
        }
        (folder / "models.json").write_text(json.dumps({"providers": {"local": provider}}))
        (folder / "settings.json").write_text(json.dumps(settings))

    return Harness(
        name=f"pi-{dialect}",
        version="@earendil-works/pi-coding-agent 1.6.0",
        dialect=dialect,
        answers=[*only(steps(lambda command: ("bash", {"command": command})), tools=True), *side_calls(1)],
        command=lambda place: [str(place.installed / "npm/node_modules/.bin/pi"), "-p", PROMPT],
        environment=lambda _: {"PI_OFFLINE": "1"},
        prepare=prepare,
        needs="npm/node_modules/.bin/pi",
        roots={"first_call": 1, "fresh_context": 1, "context_replaced": 1},
    )


HARNESSES = [_harness(dialect) for dialect in KINDS]
