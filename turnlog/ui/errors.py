"""Errors of the web page, one class per choice a user can make; all of them are `turnlog.errors.CommandError`.

    PageError
    ├── OpenToAll       the page would be reachable from elsewhere without a token
    ├── WeakToken       the token can be guessed, or fits no header
    ├── CannotListen    the address is taken, or none of this machine
    ├── MissingParts    packages that the page needs are not installed here
    ├── UnknownCall     no call has this id
    ├── NoPicture       what was asked for is no image that can be shown
    └── UnknownRun      no training run has this name, or no such step

Every message gives the value, the rule it breaks and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence

from turnlog.errors import CommandError


class PageError(CommandError):
    """Base of every error of the web page."""

    status = 404


class OpenToAll(PageError):
    """Anybody could read the log."""

    def __init__(self, host: str) -> None:
        self.host = host
        super().__init__(
            f"--host {host} can be reached from other machines, and whoever reaches the page reads the whole log: set "
            "TURNLOG_UI_TOKEN, for example to what `openssl rand -hex 32` gives, or leave --host out"
        )


class WeakToken(PageError):
    """The token that guards the page is none."""

    def __init__(self) -> None:
        super().__init__(
            "the token has fewer than 20 characters or some that fit no header: take what `openssl rand -hex 32` gives"
        )


class CannotListen(PageError):
    """The address cannot be listened on."""

    def __init__(self, host: str, port: int, why: str) -> None:
        self.host = host
        self.port = port
        super().__init__(f"{host}:{port} cannot be listened on ({why}): name another --port, or 0 for one that is free")


class MissingParts(PageError):
    """Packages that the page needs are not installed here."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        super().__init__(
            f"the page needs {', '.join(names)}, not installed in this environment: install turnlog with its "
            "dependencies, for example with `pip install -e .`"
        )


class UnknownCall(PageError):
    """No call has this id."""

    def __init__(self, call_id: str) -> None:
        self.call_id = call_id
        super().__init__(f"call {call_id!r} is not in the log: follow a link from its rollout")


class UnknownRun(PageError):
    """No training run has this name, or it has no such step."""

    def __init__(self, run: str, step: int | None = None) -> None:
        self.run = run
        self.step = step
        what = f"training run {run!r}" if step is None else f"step {step} of training run {run!r}"
        super().__init__(f"{what} is not in the log: follow a link from the list of runs")


class NoPicture(PageError):
    """What was asked for is no image that can be shown."""

    def __init__(self, sha256: str, why: str) -> None:
        self.sha256 = sha256
        super().__init__(f"there is no picture of {sha256} ({why}): the media of a call are listed on its page")
