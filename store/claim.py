"""A file that one live process holds, so that another can tell that it lives.

Knows one advisory lock of the operating system; does not know what the file is for. Law: the claim ends with the
process, however it ends, and never before.

>>> file = getfixture("tmp_path") / "claimed"
>>> held = claim(file)
>>> claim(file) is None
True
>>> held.close()
>>> claim(file).close()
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import BinaryIO


def claim(path: Path) -> BinaryIO | None:
    """The file, made if it is missing, open and held until it is closed; None while another process holds it.

    Nobody may remove such a file: whoever opened it before would hold what no other can find. Raises OSError.
    """
    file = claimable(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def claimable(path: Path) -> BinaryIO:
    """The file, made if it is missing, open and not held. Raises OSError."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b", buffering=0)
