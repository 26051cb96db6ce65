"""Cline's command over chat. It compacts when the server says that a request was too long; this one says so once."""

from shlex import join

from task import KEY, MODEL, PROMPT, Harness, Place, steps

TOO_LONG = (
    "This model's maximum context length is 32768 tokens. However, you requested 40000 tokens (scripted). "
    "Please reduce the length of the input messages."
)


def _answers() -> list[dict[str, object]]:
    answers = steps(lambda command: ("run_commands", {"commands": [command]}))
    return [*answers[:8], {"fail": {"status": 400, "message": TOO_LONG}}, *answers[8:]]


def _command(place: Place) -> list[str]:
    cline = str(place.installed / "npm/node_modules/.bin/cline")
    set_up = [cline, "auth", "-p", "openai", "-k", KEY, "-m", MODEL, "-b", f"{place.base}/v1"]
    run = [cline, "-P", "openai", "-m", MODEL, "--json", PROMPT]
    return ["sh", "-c", f"{join(set_up)} && {join(run)}"]


HARNESSES = [
    Harness(
        name="cline",
        version="cline 3.0.65",
        dialect="chat",
        answers=_answers(),
        command=_command,
        environment=lambda _: {"CLINE_TELEMETRY_DISABLED": "1", "CLINE_NO_AUTO_UPDATE": "1"},
        needs="npm/node_modules/.bin/cline",
        roots={"first_call": 1, "context_replaced": 1},
    )
]
