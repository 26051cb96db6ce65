"""Errors of the command line and the demo, one class per choice a user can make.

    CommandError
    ├── BadModel            `turnlog serve` got a flag where the model's name belongs
    ├── NoModelServer       vLLM is not installed here
    ├── NoPlugIn            vLLM would not find turnlog here
    ├── MissingPackages     the demo needs packages that are not installed here
    ├── NoMegatron          an export needs megatron-core, which is not installed here
    ├── BadJson             a file or an option that should hold JSON cannot be read
    ├── CorpusTooSmall      this Python ships too little source text for the demo's tokenizer
    ├── BadSql              the log refused a query
    ├── NotTabular          a query's answer fits no Parquet file
    ├── NoTokenizer         the text of tokens was asked for, and their tokenizer is not at hand
    ├── NoBoundary          a call to compare with an earlier one is none that begins a row
    ├── FolderTaken         the demo's folder holds other files
    └── DemoFailed          the demo found something that turnlog promises not to happen
        └── ServerFailed    the model server did not start, or ended during the demo

Every message gives the value, the rule it breaks and the remedy.
"""

from __future__ import annotations

from pathlib import Path


class CommandError(Exception):
    """Base of every error that the command line raises itself."""


class BadModel(CommandError):
    """The first argument of `turnlog serve` is a flag."""

    def __init__(self, argument: str) -> None:
        self.argument = argument
        super().__init__(
            f"{argument!r} stands where the model belongs: write it first, as in `turnlog serve MODEL --port 8000`"
        )


class NoModelServer(CommandError):
    """vLLM is not installed here."""

    def __init__(self) -> None:
        super().__init__(
            "vLLM is not installed in this environment: install `vllm` where a GPU is, turnlog's extra `cpu` elsewhere"
        )


class NoPlugIn(CommandError):
    """turnlog's code is at hand here, but not its entry points."""

    def __init__(self) -> None:
        super().__init__(
            "turnlog is not installed in this environment, so vLLM would not find its plug-in and log nothing: "
            "install it, for example with `pip install -e .`"
        )


class MissingPackages(CommandError):
    """Packages that the demo needs are not installed here."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        super().__init__(
            f"the demo needs {', '.join(names)}, not installed in this environment: run `make demo` in a checkout, "
            "or install turnlog's extras `cpu` and `megatron`"
        )


class NoMegatron(CommandError):
    """An export needs megatron-core, which is not installed here."""

    def __init__(self, form: str) -> None:
        super().__init__(
            f"the format {form!r} is written by megatron-core, not installed in this environment: install turnlog's "
            "extra `megatron`, or write --format parquet"
        )


class BadJson(CommandError):
    """What should be JSON is not there, or is none."""

    def __init__(self, where: str, why: str, remedy: str = "name a file of JSON, or - for standard input") -> None:
        self.where = where
        super().__init__(f"{where} cannot be read as JSON ({why}): {remedy}")


class CorpusTooSmall(CommandError):
    """The Python at hand ships too little source text to train the demo's tokenizer on."""

    def __init__(self, folder: Path, entries: int, needed: int) -> None:
        self.folder = folder
        self.entries = entries
        super().__init__(
            f"the Python sources in {folder} give a tokenizer of {entries} entries, the demo's model needs {needed}: "
            "run it with a Python that ships its standard library as source files"
        )


class BadSql(CommandError):
    """The log refused a query."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(
            f"the log refused the query ({why}): give one statement that only reads, in the SQL of the log's database; "
            "`turnlog sql` alone lists the tables"
        )


class NotTabular(CommandError):
    """A query's answer fits no Parquet file."""

    def __init__(self, cause: str) -> None:
        super().__init__(
            f"the answer fits no Parquet file, whose columns have one type each ({cause}): cast them in the query"
        )


class NoTokenizer(CommandError):
    """A tokenizer cannot be opened here."""

    def __init__(self, folder: str, why: str) -> None:
        self.folder = folder
        super().__init__(
            f"there is no tokenizer at {folder!r} ({why}): name the folder of the served model with --tokenizer, or "
            "leave it out to see which items changed without their texts"
        )


class NoBoundary(CommandError):
    """A call that is to be compared with an earlier one begins no row, or is not there."""

    def __init__(self, rollout_id: str, call: str, why: str) -> None:
        self.rollout_id = rollout_id
        self.call = call
        super().__init__(
            f"call {call!r} of rollout {rollout_id!r} {why}: name one that begins a row, by its number or id; "
            f"`turnlog show {rollout_id}` marks them"
        )


class FolderTaken(CommandError):
    """The demo's model would be built among other files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        super().__init__(f"{folder} holds other files, the demo's model needs a folder of its own: name another one")


class DemoFailed(CommandError):
    """The demo found something that turnlog promises not to happen, or could not go on."""


class ServerFailed(DemoFailed):
    """The model server did not start, or ended during the demo."""

    def __init__(self, what: str, log: Path, tail: str) -> None:
        self.log = log
        super().__init__(f"the model server {what}: read {log}, whose last lines are\n{tail}")
