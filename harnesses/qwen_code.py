"""Qwen Code over chat, as `qwen -p` runs it."""

import json

from task import KEY, MODEL, NOTES, PROMPT, Harness, Place, steps

WINDOW = 70_000
SUMMARY = "You are the component that summarizes a conversation"


def _prepare(place: Place) -> None:
    folder = place.home / ".qwen"
    folder.mkdir()
    settings = {
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"generationConfig": {"contextWindowSize": WINDOW}},
        "telemetry": {"enabled": False},
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"disableAutoUpdate": True, "enableAutoUpdate": False},
    }
    (folder / "settings.json").write_text(json.dumps(settings))


def _command(place: Place) -> list[str]:
    return [str(place.installed / "npm/node_modules/.bin/qwen"), "-y", "-p", PROMPT]


def _environment(place: Place) -> dict[str, str]:
    return {"OPENAI_BASE_URL": f"{place.base}/v1", "OPENAI_API_KEY": KEY, "OPENAI_MODEL": MODEL}


def _shell(command: str) -> tuple[str, dict[str, object]]:
    # It loses the output of a command that ends at once.
    return "run_shell_command", {
        "command": f"{command}; sleep 0.5",
        "description": "Runs a small command",
        "is_background": False,
    }


_summary = {
    "text": f"<state_snapshot>{NOTES.format(1)}</state_snapshot>",
    "when": {"last_user_contains": SUMMARY},
}
HARNESSES = [
    Harness(
        name="qwen-code",
        version="@qwen-code/qwen-code 0.24.4",
        dialect="chat",
        answers=[_summary, *steps(_shell)],
        command=_command,
        environment=_environment,
        prepare=_prepare,
        needs="npm/node_modules/.bin/qwen",
        roots={"first_call": 1, "context_replaced": 1, "item_edited": 1},
    )
]
