"""A tokenizer from its folder, as far as the text of logged tokens needs one.

Knows transformers; does not know models or the log. Law: what is not at hand is asked for by name, and nothing is
downloaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from turnlog.boundary import Detokenizer
from turnlog.errors import NoTokenizer


def open_tokenizer(folder: str) -> Detokenizer:
    """The tokenizer of a model's folder, or of a name in the local cache of Hugging Face. Raises NoTokenizer."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise NoTokenizer(folder, "the package transformers is not installed here") from error
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # each kind of tokenizer raises its own
        lines = str(error).strip().splitlines()
        raise NoTokenizer(folder, lines[0] if lines else type(error).__name__) from error
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    return Detokenizer(
        decode=lambda tokens: str(tokenizer.decode([*tokens], skip_special_tokens=False)), special=frozenset(special)
    )


def tokenizer_of(model: str) -> Detokenizer | None:
    """The tokenizer of a served model where its name is a folder of this machine; None elsewhere."""
    if not (Path(model) / "tokenizer_config.json").is_file():
        return None
    return open_tokenizer(model)
