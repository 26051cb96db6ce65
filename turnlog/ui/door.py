"""Who may see the page: everyone on this machine, or whoever shows the token; and what a browser may do with it.

Knows ASGI, cookies and headers; does not know pages or the log. Law: without the token nothing of the log leaves, the
token stands in no URL, cookie or log line, and the page can load and run nothing that it does not ship.

Without a token the page is bound to loopback, and answers only to names of this machine: else a foreign web page could
have its own name resolved to 127.0.0.1 and read the log through the reader's browser. With one, a browser shows it once
in a form and keeps a cookie that is good until `turnlog ui` ends; a program sends `authorization: Bearer TOKEN`.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qs, quote

from turnlog.ui.errors import OpenToAll, WeakToken

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

LOGIN = "/login"
COOKIE = "turnlog_ui"
_OPEN = frozenset((LOGIN, "/style.css", "/icon.svg"))
_TOKEN = re.compile(r"[!-~]{20,}")
_MOST_OF_FORM = 4096
_HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; base-uri 'none'; "
        b"frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


def expect_guarded(host: str, token: str | None) -> None:
    """Refuse to listen where others could read the log. Raises OpenToAll, WeakToken."""
    if token is not None and _TOKEN.fullmatch(token) is None:
        raise WeakToken
    if token is None and not is_loopback(host):
        raise OpenToAll(host)


def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine's own.

    >>> [is_loopback(host) for host in ("localhost", "127.0.0.5", "::1", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


class Door:
    """ASGI middleware around the whole page."""

    def __init__(self, app: App, *, token: str | None) -> None:
        self._app = app
        self._token = None if token is None else _digest(token)
        self._session = secrets.token_urlsafe(32)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if self._token is None:
            if is_loopback(_host_of(headers.get("host", ""))):
                await self._app(scope, receive, _with_headers(send))
            else:
                why = "without a token this page answers to localhost alone: open it there, or set TURNLOG_UI_TOKEN"
                await _answer(send, 421, why)
        elif scope["path"] == LOGIN and scope["method"] == "POST":
            await self._log_in(scope, receive, send)
        elif scope["path"] in _OPEN or self._is_known(headers):
            await self._app(scope, receive, _with_headers(send))
        elif "text/html" in headers.get("accept", ""):
            query = scope["query_string"].decode("latin-1")
            wanted = scope["path"] + (f"?{query}" if query else "")
            await _answer(send, 303, "", (b"location", f"{LOGIN}?next={quote(wanted, safe='')}".encode()))
        else:
            why = "send `authorization: Bearer` with the token that the page was started with"
            await _answer(send, 401, why, (b"www-authenticate", b"Bearer"))

    def _is_known(self, headers: MutableMapping[str, str]) -> bool:
        scheme, _, shown = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and secrets.compare_digest(_digest(shown), self._token or b""):
            return True
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            return False
        return cookie is not None and secrets.compare_digest(_digest(cookie.value), _digest(self._session))

    async def _log_in(self, scope: Message, receive: Receive, send: Send) -> None:
        fields = parse_qs((await _read(receive)).decode("utf-8", "replace"))
        wanted = safe_path(fields.get("next", ["/"])[0])
        if not secrets.compare_digest(_digest(fields.get("token", [""])[0].strip()), self._token or b""):
            place = f"{LOGIN}?wrong=1&next={quote(wanted, safe='')}"
            await _answer(send, 303, "", (b"location", place.encode()))
            return
        secure = "; Secure" if scope.get("scheme") == "https" else ""
        cookie = f"{COOKIE}={self._session}; Path=/; HttpOnly; SameSite=Strict{secure}"
        await _answer(send, 303, "", (b"location", wanted.encode()), (b"set-cookie", cookie.encode()))


def safe_path(wanted: str) -> str:
    r"""A path of this page, to go on to; its front page for anything else.

    >>> safe_path("/rollouts/r1?first=2"), safe_path("//example.org"), safe_path("/a\r\nb")
    ('/rollouts/r1?first=2', '/', '/')
    """
    return wanted if re.fullmatch(r"/(?![/\\])[!-~]*", wanted) else "/"


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def _host_of(header: str) -> str:
    """The host of a `host` header, without its port.

    >>> _host_of("localhost:7080"), _host_of("[::1]:7080"), _host_of("127.0.0.1")
    ('localhost', '::1', '127.0.0.1')
    """
    bracketed = re.match(r"\[([^]]*)\]", header)
    return bracketed[1] if bracketed else header.partition(":")[0]


def _with_headers(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *_HEADERS]}
        await send(message)

    return sent


async def _read(receive: Receive) -> bytes:
    body = b""
    more = True
    while more and len(body) <= _MOST_OF_FORM:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body[:_MOST_OF_FORM]


async def _answer(send: Send, status: int, text: str, *more: tuple[bytes, bytes]) -> None:
    body = text.encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode()), *more]
    await _with_headers(send)({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
