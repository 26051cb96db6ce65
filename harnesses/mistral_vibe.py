"""Mistral Vibe over chat, as `vibe -p` runs it."""

from task import KEY, MODEL, NOTES, PROMPT, Harness, Place, steps

COMPACT_AT = 14_000


def _prepare(place: Place) -> None:
    folder = place.home / ".vibe"
    folder.mkdir()
    (folder / "config.toml").write_text(f"""
active_model = "local"
enable_telemetry = false
enable_update_checks = false
enable_auto_update = false
auto_compact_threshold = {COMPACT_AT}
[[providers]]
name = "local"
api_base = "{place.base}/v1"
api_key_env_var = "LOCAL_API_KEY"
api_style = "openai"
backend = "generic"
[[models]]
name = "{MODEL}"
provider = "local"
alias = "local"
auto_compact_threshold = {COMPACT_AT}
""")


_summaries = [
    {"text": NOTES.format(number), "when": {"last_user_contains": "You are performing a CONTEXT"}} for number in (1, 2)
]
HARNESSES = [
    Harness(
        name="mistral-vibe",
        version="mistral-vibe 3.0.2",
        dialect="chat",
        answers=[*_summaries, *steps(lambda command: ("bash", {"command": command}))],
        command=lambda place: [str(place.installed / "vibe/bin/vibe"), "-p", PROMPT, "--auto-approve", "--trust"],
        environment=lambda _: {"LOCAL_API_KEY": KEY},
        prepare=_prepare,
        needs="vibe/bin/vibe",
        roots={"first_call": 1, "fresh_context": 2},
    )
]
