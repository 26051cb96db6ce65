"""How fast is an audit? Tokens and calls a second of `turnlog audit`, and the memory that it takes.

Two logs: that of the recordings (small calls, every rule at work, clean), and a synthetic one of 20,000 calls and 13
million tokens (`synthetic_log.py`), whose event digests are random and whose calls nobody admitted, so that each call
has differences to count; the time is that of deriving everything, which is the same.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from figures import keep, kept, options
from synthetic_log import Shape, fill_sqlite

from store import migrate
from store.database import open_database
from turnlog.audit.run import audit

HERE = Path(__file__).parent
PLAYED = HERE.parent / "tests" / "played" / "played.db.gz"


def measured(file: Path) -> dict[str, Any]:
    """One audit, in a process of its own, so that the memory is its own."""
    found = subprocess.run([sys.executable, __file__, "--one", str(file)], check=True, capture_output=True, text=True)
    figures: dict[str, Any] = json.loads(found.stdout)
    return figures


def memory(name: str) -> int:
    """MiB of this process, now (VmRSS) or at most (VmHWM); Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) // 1024


def one(file: Path) -> None:
    """Audit and print."""
    before = memory("VmRSS")
    database = open_database(f"sqlite:///{file}")
    found = audit(database, archive="")
    database.dispose()
    print(
        json.dumps(
            {
                "calls": found.findings.checked["decision"] + found.findings.notes["echo_not_kept"],
                "tokens": found.tokens,
                "seconds": round(found.seconds, 2),
                "tokens_per_s": round(found.tokens / found.seconds),
                "calls_per_s": round(found.events["call_completed"] / found.seconds),
                "peak_mib": memory("VmHWM"),
                "of_them_before_mib": before,
                "clean": found.clean,
            }
        )
    )


def main() -> None:
    """Make both logs, audit each, and write the figures."""
    parser = options(__doc__)
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rollouts", type=int, default=1000, help="of the synthetic log; 20 calls each")
    parser.add_argument("--out", type=Path, default=HERE / "audit.json", help="where the figures go")
    asked = parser.parse_args()
    if asked.one is not None:
        one(asked.one)
        return
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("recordings", "synthetic"):
            file = Path(folder) / f"{name}.db"
            if name == "recordings":
                file.write_bytes(gzip.decompress(PLAYED.read_bytes()))
            database = open_database(f"sqlite:///{file}")
            migrate.upgrade(database)
            database.dispose()
            if name == "synthetic":
                fill_sqlite(file, Shape(rollouts=asked.rollouts))
            figures[name] = measured(file)
    keep(asked.out, kept(asked.out) | figures)


if __name__ == "__main__":
    main()
