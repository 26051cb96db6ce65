"""Errors of the engine's side, one class per choice a caller can make.

    EngineError             500  base; what we cause ourselves
    ├── BadRequest          400  the harness sent something that cannot be read: mend the request
    │   ├── UnknownItem     400  a kind of message, part or call that turnlog does not know by name
    │   ├── PromptTooLong   400  the prompt does not fit the model: compact, then ask again
    │   └── RetainedMediaChanged 400  an image that is only repeated is not what the model saw: send the same bytes
    ├── NoToken             401  what the operator alone may reach, asked for without the operator's token
    ├── UnknownRoute        404  the path under a rollout is not served
    ├── UnknownRollout      404  the rollout was never opened, and this server wants it to be
    ├── WrongSecret         404  the rollout does not exist, or has another secret
    ├── OutcomeTaken        409  an outcome with this id, but another content, is in the log
    ├── BadRolloutId        422  the id in the URL or header breaks the rule for ids
    ├── LogDown             503  the log cannot be asked or written: retry later
    ├── UnreadableAnswer    500  the server's own answer has a shape that turnlog does not know
    └── EngineMismatch      500  raised at start-up only: this engine's methods or settings do not fit

`status` is the HTTP status, `param` the part of the request that is to blame. Every message gives the value, the rule
it breaks and the remedy. A dialect turns an error into its own wire shape; it is not known here.
"""

from __future__ import annotations

import re
from typing import ClassVar

_SECRET = re.compile(r"(?:~|%(?:25)*7e)[^/?'\"\s]*", re.IGNORECASE)


def shown_path(path: str, hidden: str = "~***") -> str:
    """A path or an id without the secret that may follow a `~` in it, however that is written.

    >>> shown_path("/rollouts/r1~k9Xw/v1/models"), shown_path("/rollouts/r1%257Ek9Xw/v1", hidden="")
    ('/rollouts/r1~***/v1/models', '/rollouts/r1/v1')
    """
    return _SECRET.sub(hidden, path)


class EngineError(Exception):
    """Base of every error that the engine's side raises."""

    status: ClassVar[int] = 500

    def __init__(self, message: str, *, param: str | None = None) -> None:
        self.param = param
        super().__init__(message)


class BadRequest(EngineError):
    """The request cannot be read."""

    status = 400


class UnknownItem(BadRequest):
    """A request holds a kind of item that has no canonical form, so it can neither be compared nor skipped."""

    def __init__(self, kind: str, *, known: str, param: str) -> None:
        self.kind = kind
        super().__init__(f"{param} is {kind[:80]!r}, which turnlog cannot compare: send {known}", param=param)


class PromptTooLong(BadRequest):
    """The prompt leaves the model no room; the words are those that stock harnesses look for before they compact."""

    def __init__(self, *, limit: int, prompt_tokens: int, at_least: bool = False) -> None:
        self.limit = limit
        self.prompt_tokens = prompt_tokens
        shown = f"at least {prompt_tokens}" if at_least else str(prompt_tokens)
        found = f"your messages resulted in {shown} tokens. Please reduce the length of the messages."
        super().__init__(f"This model's maximum context length is {limit} tokens. However, {found}", param="messages")


class RetainedMediaChanged(BadRequest):
    """What the processor makes of an image that the request only repeats is not what the model saw before."""

    code = "retained_media_changed"

    def __init__(self, place: int, modality: str, why: str) -> None:
        self.place = place
        super().__init__(
            f"{self.code}: {modality} {place + 1} of this conversation {why}, under a message that did not change: "
            "send what was sent before, or start the server with the processor settings that it had",
            param="messages",
        )


class NoToken(EngineError):
    """A path that needs the operator's token was asked for without it."""

    status = 401

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(
            f"{shown_path(path)} is the operator's: send the header 'Authorization: Bearer TOKEN' with its token, "
            "or call a model at the base URL that POST /rollouts gave"
        )


class UnknownRoute(EngineError):
    """A path under a rollout that is not served."""

    status = 404


class UnknownRollout(EngineError):
    """A rollout that was never opened, on a server that opens none by itself."""

    status = 404

    def __init__(self, rollout_id: str) -> None:
        self.rollout_id = rollout_id
        super().__init__(f"rollout {rollout_id!r} was never opened: open it with POST /rollouts first")


class WrongSecret(EngineError):
    """A rollout and a secret that do not belong together; says the same whether there is such a rollout or not."""

    status = 404

    def __init__(self, rollout_id: str) -> None:
        self.rollout_id = rollout_id
        super().__init__(
            f"no rollout {rollout_id!r} has the secret in this URL: use the base URL that POST /rollouts gave, "
            "or open another rollout"
        )


class OutcomeTaken(EngineError):
    """An outcome's id that another outcome has."""

    status = 409

    def __init__(self, outcome_id: str) -> None:
        self.outcome_id = outcome_id
        super().__init__(
            f"outcome {outcome_id} is in the log with other content, an id names one outcome: leave the id out"
        )


class BadRolloutId(EngineError):
    """A rollout id that breaks the rule for ids."""

    status = 422

    def __init__(self, rollout_id: str) -> None:
        self.rollout_id = rollout_id
        super().__init__(
            f"rollout id {shown_path(rollout_id)!r} is not 1 to 128 of letters, digits and ._-: choose another id"
        )


class LogDown(EngineError):
    """The log cannot be asked or written, and no answer may go out that is not in it."""

    status = 503

    def __init__(self, cause: str, *, retry_after: int = 5) -> None:
        self.retry_after = retry_after
        """Seconds, for the header of that name."""
        super().__init__(f"the log is down, nothing was answered ({cause}): retry in {retry_after} seconds")


class UnreadableAnswer(EngineError):
    """The server answered in a shape that turnlog does not know, so the call cannot be captured."""


class EngineMismatch(EngineError):
    """A method or a setting of the model server does not fit; `subject` names the method or the flag."""

    def __init__(self, subject: str, found: str, *, remedy: str) -> None:
        self.subject = subject
        super().__init__(f"{subject} is {found}: {remedy}")
