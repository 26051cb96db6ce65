"""A trainer in small, to be killed: it walks a run through loader workers and prints a SHA-256 a batch.

    python resumed_run.py URL RUN PLACE WORKERS

RUN is a file with the run, PLACE one with the place to go on from, written anew after each batch, as a checkpoint is.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from torch.utils.data import DataLoader

from replay.dataset import MicroBatches
from replay.run import PlacedPack, Run, Steps
from store.database import open_database


def main(url: str, run_file: str, place_file: str, workers: str) -> None:
    database = open_database(url)
    steps = Steps.of(database, Run.from_json(json.loads(Path(run_file).read_text())))
    database.dispose()
    micro_batches = MicroBatches(steps, url)
    place = Path(place_file)
    if place.exists():
        micro_batches.load_state_dict(json.loads(place.read_text()))
    loader: DataLoader[PlacedPack] = DataLoader(micro_batches, batch_size=None, num_workers=int(workers))
    for each in loader:
        aside = place.with_suffix(".part")
        aside.write_text(json.dumps(micro_batches.place_after(step=each.step, micro_batch=each.micro_batch)))
        print(each.step, each.micro_batch, each.pack.digest(), flush=True)
        aside.replace(place)


if __name__ == "__main__":
    main(*sys.argv[1:])
