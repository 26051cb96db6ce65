"""What an operator sets for the plug-in, read from the environment once, at start-up.

Knows names, defaults and what a value may be; does not know who uses them. `turnlog serve` sets these variables from
its flags; whoever runs `vllm serve` sets them by hand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, Self

from pydantic import BaseModel, ByteSize, ConfigDict, Field, SecretStr, ValidationError

from engine.errors import EngineMismatch
from store.database import Durability
from store.events import ReasoningPolicy
from store.spool import LIMIT

LogFailure = Literal["refuse", "spool"]
_TOKEN = re.compile(r"[!-~]{16,}")
"""Characters that a header can hold, and more than anybody guesses."""


class Settings(BaseModel):
    """The plug-in's settings.

    >>> Settings.from_environment({"TURNLOG_REASONING": "restore"}).reasoning
    'restore'
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    url: str | None = Field(default=None, description="TURNLOG_URL: database URL; default sqlite:///turnlog.db")
    media: str | None = Field(
        default=None, description="TURNLOG_MEDIA: fsspec URL; default a folder beside the database"
    )
    reasoning: ReasoningPolicy = Field(default="strict", description="TURNLOG_REASONING: strict or restore")
    require_open: bool = Field(
        default=False, description="TURNLOG_REQUIRE_OPEN: 1 serves a rollout by its secret alone"
    )
    token: SecretStr | None = Field(
        default=None, description="TURNLOG_TOKEN: what the operator shows as 'Authorization: Bearer TOKEN'"
    )
    worker: str | None = Field(
        default=None, description="TURNLOG_WORKER: stable name of this server; default host:port"
    )

    on_log_failure: LogFailure = Field(
        default="refuse",
        description="TURNLOG_ON_LOG_FAILURE: refuse or spool, what happens to calls while the log is away",
    )
    spool: str | None = Field(
        default=None, description="TURNLOG_SPOOL: folder; default turnlog.spool beside the SQLite file, or here"
    )
    spool_limit: ByteSize = Field(
        default=ByteSize(LIMIT),
        ge=1 << 20,
        description="TURNLOG_SPOOL_LIMIT: of a worker, 1MiB or more, such as 500MB or 16GiB; default 4GiB",
    )
    durability: Durability = Field(
        default="full",
        description="TURNLOG_DURABILITY: full or relaxed, whether what was answered last may be lost in a power cut",
    )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Read `TURNLOG_<NAME>` for each setting; an empty value counts as unset. Raises EngineMismatch."""
        names = {name: f"TURNLOG_{name.upper()}" for name in cls.model_fields}
        given = {name: environment[variable] for name, variable in names.items() if environment.get(variable)}
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            variable = names[str(first["loc"][0])]
            remedy = f"{first['msg']}; {cls.model_fields[str(first['loc'][0])].description}"
            raise EngineMismatch(variable, repr(environment[variable]), remedy=remedy) from None

    def model_post_init(self, _: object) -> None:
        """Refuse a door without a key. Raises EngineMismatch."""
        strong = "set it to 16 or more characters without spaces, such as `openssl rand -hex 32` gives"
        if self.token is None:
            if self.require_open:
                raise EngineMismatch("TURNLOG_TOKEN", "not set, but --require-open needs it", remedy=strong)
        elif _TOKEN.fullmatch(self.token.get_secret_value()) is None:
            raise EngineMismatch("TURNLOG_TOKEN", "one that can be guessed or fits no header", remedy=strong)
