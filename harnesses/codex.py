"""Codex over Responses, as `codex exec` runs it."""

from task import KEY, MODEL, PROMPT, Harness, Place, only, side_calls, steps

WINDOW, COMPACT_AT = 40_000, 18_000


def _prepare(place: Place) -> None:
    folder = place.home / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(f"""
model = "{MODEL}"
model_provider = "local"
model_context_window = {WINDOW}
model_auto_compact_token_limit = {COMPACT_AT}
check_for_update_on_startup = false
[model_providers.local]
name = "local"
base_url = "{place.base}/v1"
env_key = "LOCAL_API_KEY"
wire_api = "responses"
[analytics]
enabled = false
""")


def _command(place: Place) -> list[str]:
    codex = str(place.installed / "npm/node_modules/.bin/codex")
    return [codex, "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", PROMPT]


HARNESSES = [
    Harness(
        name="codex",
        version="@openai/codex 0.171.0",
        dialect="responses",
        answers=[*only(steps(lambda command: ("exec_command", {"cmd": command})), tools=True), *side_calls(1)],
        command=_command,
        environment=lambda _: {"LOCAL_API_KEY": KEY},
        prepare=_prepare,
        needs="npm/node_modules/.bin/codex",
        roots={"first_call": 1, "tools_changed": 1, "fresh_context": 1},
    )
]
