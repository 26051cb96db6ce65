"""Claude Code over Messages, as `claude -p` runs it."""

from task import KEY, MODEL, NOTES, PROMPT, Harness, Place, steps

WINDOW = 100_000
"""The smallest that `--autocompact` takes."""
SUMMARY = "Your task is to create a detailed summary"


def _command(place: Place) -> list[str]:
    claude = str(place.installed / "npm/node_modules/.bin/claude")
    options = ["-p", "--dangerously-skip-permissions", "--autocompact", str(WINDOW)]
    return [claude, *options, PROMPT]


def _environment(place: Place) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": place.base,
        "ANTHROPIC_API_KEY": KEY,
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "8192",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "IS_SANDBOX": "1",
    }


def _shell(command: str) -> tuple[str, dict[str, str]]:
    return "Bash", {"command": command, "description": "Runs a small command"}


_summary = {"text": f"<summary>{NOTES.format(1)}</summary>", "when": {"last_user_contains": SUMMARY}}
HARNESSES = [
    Harness(
        name="claude-code",
        version="@anthropic-ai/claude-code 2.1.332",
        dialect="messages",
        answers=[_summary, *steps(_shell, again=6)],
        command=_command,
        environment=_environment,
        needs="npm/node_modules/.bin/claude",
        roots={"first_call": 1, "context_replaced": 1},
        seconds=400,
    )
]
