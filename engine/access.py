"""The door of the server: what a request is for, and whether whoever sent it may have that.

Knows paths, rollouts' secrets and the operator's keys; does not know what is served, vLLM, or how a call is captured.
Law: a secret opens the model routes of its own rollout and nothing else, and goes no further than this module: it is
taken off the request before anything behind the door, an access log among them, can see it.

A rollout's base URL is `/rollouts/ID~SECRET/v1`. The log keeps the secret's SHA-256 with the rollout's opening; an
opening never changes, so what was looked up once is remembered.

>>> of_request({"path": "/rollouts/r1~k9Xw/v1/messages", "headers": []})
Wanted(rollout_id='r1', path='/v1/messages')
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from engine.dialects.routes import DIALECTS, PASSED, dialect_at
from engine.errors import BadRolloutId, NoToken, UnknownRollout, UnknownRoute, WrongSecret, shown_path
from engine.journal import Journal
from store import log

_ROLLOUT_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_UNDER_ROLLOUT = re.compile(r"/rollouts/(?P<rollout>[^/~]*)(?:~(?P<secret>[^/]*))?(?P<path>/.*)?", re.DOTALL)
_SECRET = re.compile(r"[A-Za-z0-9_-]{32,128}")
_KEPT = 100_000
"""Openings remembered; beyond that all are forgotten, which costs one look-up each."""
_ALWAYS_OPEN = frozenset(("/health", "/ping"))
"""What a load balancer asks; tells nothing of any rollout."""
_TRAFFIC = ("/v1/", "/v2/", "/cohere/", "/inference/")
"""Under these vLLM has the routes that ask a model; its own API keys guard the same."""
_CONTROL = frozenset(("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/inference/v1/abort_requests"))
"""And these there that steer the server."""
_ASKED = _ALWAYS_OPEN | {
    *("/load", "/version", "/metrics", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"),
    *("/tokenize", "/detokenize", "/tokenizer_info"),
    *("/classify", "/pooling", "/score", "/rerank", "/generative_scoring", "/invocations"),
}
"""Paths of vLLM elsewhere that ask a model or the server and change nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a request is for."""

    rollout_id: str | None
    """The rollout that it belongs to; None for traffic that is not captured."""
    path: str
    """What to serve it as."""
    secret: str | None = field(default=None, repr=False)


class Access:
    """Who may reach what.

    Without keys everything is open, but a secret that is shown must be right. `token` guards what steers the server or
    a rollout, and with `require_open` all but the model routes that a secret opens. `api_keys` are the model server's
    own: where there is no token they guard the rollout API, as they guard the server's model routes.
    """

    def __init__(
        self, journal: Journal, *, token: str | None = None, api_keys: Sequence[str] = (), require_open: bool = False
    ) -> None:
        self._journal = journal
        self._has_token = token is not None
        self._keys = tuple(map(digest, api_keys if token is None else [token]))
        self._require_open = require_open
        self._openings: dict[str, bytes | None] = {}

    async def admit(self, scope: MutableMapping[str, Any]) -> Wanted:
        """Let a request in, without its secret, or raise.

        Raises NoToken, WrongSecret, BadRolloutId, UnknownRollout, UnknownRoute, LogDown.
        """
        wanted = of_request(scope)
        _take_off_secret(scope)
        if wanted.secret is not None:
            await self._expect_secret(wanted.rollout_id, wanted.secret)
        elif self._is_guarded(wanted) and not self._shows_key(scope["headers"]):
            raise NoToken(wanted.path)
        if wanted.rollout_id is not None:
            if wanted.path not in PASSED and dialect_at(wanted.path) is None:
                served = [*(dialect.PATH for dialect in DIALECTS), *sorted(PASSED)]
                raise UnknownRoute(f"{wanted.path} is not served for a rollout: use {', '.join(served)}")
            if _ROLLOUT_ID.fullmatch(wanted.rollout_id) is None:
                raise BadRolloutId(wanted.rollout_id)
            if self._require_open:
                await self._secret_hash(wanted.rollout_id)
        return wanted

    def remember(self, rollout_id: str, secret_hash: bytes | None) -> None:
        """Note how a rollout was opened, so that its first call need not look it up."""
        if len(self._openings) >= _KEPT:
            self._openings.clear()
        self._openings[rollout_id] = secret_hash

    async def _expect_secret(self, rollout_id: str | None, secret: str) -> None:
        try:
            expected = await self._secret_hash(rollout_id or "")
        except UnknownRollout:
            expected = None
        if expected is None or not secrets.compare_digest(digest(secret), expected):
            raise WrongSecret(rollout_id or "")

    async def _secret_hash(self, rollout_id: str) -> bytes | None:
        """The hash that an opened rollout's secret has; None for one that has none. Raises UnknownRollout."""
        if rollout_id in self._openings:
            return self._openings[rollout_id]
        known = _ROLLOUT_ID.fullmatch(rollout_id) is not None  # else no log has it, and not every one can be asked
        opened = await self._journal.query(lambda connection: log.rollout(connection, rollout_id)) if known else None
        if opened is None:
            raise UnknownRollout(rollout_id)
        self.remember(rollout_id, opened.secret_hash)
        return opened.secret_hash

    def _is_guarded(self, wanted: Wanted) -> bool:
        """Whether it takes a key to reach this without a secret."""
        if self._require_open:
            return wanted.path not in _ALWAYS_OPEN
        if wanted.rollout_id is not None or not self._keys:
            return False
        if self._has_token:
            return wanted.path in _CONTROL or not (wanted.path in _ASKED or wanted.path.startswith(_TRAFFIC))
        return wanted.path == "/policy_version" or wanted.path.startswith("/rollouts")

    def _shows_key(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        sent = next((value.decode("latin-1") for name, value in headers if name == b"authorization"), "")
        scheme, _, key = sent.partition(" ")
        shown = digest(key) if scheme.lower() == "bearer" else b""
        return any(secrets.compare_digest(shown, known) for known in self._keys)


def of_request(scope: MutableMapping[str, Any]) -> Wanted:
    """What a request is for, by its path, or by its header where the path is a stock one that is captured."""
    path = str(scope["path"].removeprefix(scope.get("root_path", "")))
    under = _UNDER_ROLLOUT.fullmatch(path)
    if under is not None and (under["secret"] is not None or (under["path"] or "").startswith("/v1/")):
        return Wanted(rollout_id=under["rollout"], path=under["path"] or "/", secret=under["secret"])
    named = next((value for name, value in scope["headers"] if name == b"x-turnlog-rollout"), None)
    if named is None or dialect_at(path) is None:
        return Wanted(rollout_id=None, path=path)
    return Wanted(rollout_id=named.decode("latin-1"), path=path)


def new_secret() -> str:
    """A fresh secret: 32 random bytes, in characters that any URL may hold."""
    return secrets.token_urlsafe(32)


def is_secret(text: object) -> bool:
    """Whether a caller may bring this as a rollout's secret.

    >>> is_secret("too-short"), is_secret("k9Xw" * 8)
    (False, True)
    """
    return isinstance(text, str) and _SECRET.fullmatch(text) is not None


def digest(secret: str) -> bytes:
    """What is kept of a secret or a key: its SHA-256. Either is random and long, so that no salt is needed."""
    return hashlib.sha256(secret.encode()).digest()


def hide_secrets(record: logging.LogRecord) -> bool:
    """A filter for a logger that sees requests before the door does, as uvicorn's does at its level `trace`."""
    record.msg, record.args = shown_path(record.getMessage()), None
    return True


def _take_off_secret(scope: MutableMapping[str, Any]) -> None:
    """Change the request itself, not a copy: the server writes its access log from it when it is answered.

    Whatever looks like a secret goes, also where a mistyped path leads nowhere.
    """
    path = shown_path(scope["path"], hidden="")
    if path != scope["path"]:
        scope["path"], scope["raw_path"] = path, quote(path).encode()
