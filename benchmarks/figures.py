"""What every benchmark has: its command line, and the file beside it that its figures are kept in.

Knows no question that is measured. Law: figures of parts that were not measured this time stay as they were.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent


def options(about: str | None) -> argparse.ArgumentParser:
    """A command line that shows a script's docstring as its help."""
    return argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)


def kept(file: Path | None) -> dict[str, Any]:
    """The figures that the file has, on the machine and at the commit of now."""
    found: dict[str, Any] = json.loads(file.read_text()) if file is not None and file.is_file() else {}
    return found | {"commit": commit(), "machine": platform.machine(), "cores": os.cpu_count()}


def keep(file: Path | None, figures: dict[str, Any]) -> None:
    """Write what is known so far; nothing where there is no file."""
    if file is not None:
        file.write_text(json.dumps(figures, indent=1) + "\n")


def commit() -> str:
    """The commit that is measured, shortened; empty outside a checkout."""
    asked = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, cwd=_HERE, capture_output=True, text=True, check=False).stdout.strip()
