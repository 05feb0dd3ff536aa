"""How fast do tensor files become tensors, beside every loader that people use, and what do the media allow?

Two images: "dense" has a Llama's shapes, 4 GB in four shards; "small" is 20,000 tensors in 1 GB. From a
disk of which nothing is in the page cache ("cold", seen by cachestat before each run), from the page cache
("warm"), and from S3: SeaweedFS on this machine, over loopback, its own files in the page cache as far as
that has room.

Each run is a process of its own; imports and what must be allocated before come before the clock,
connections and clients under it. Everybody loads all tensors, and the clock stops when one byte of each
page of each was read, so that nobody is timed for what is only mapped. Then every byte is checked.
Contenders run interleaved.

- Into "fresh": new tensors in memory of the process's own; "existing": a model's tensors that are there
  already, one allocation each; "mapped": tensors that are the files' pages in the page cache, which costs
  no copy and holds for as long as nobody truncates the file. Who only maps is cloned, or copied, for the
  other two.
- "rfork" is `rfork.load` and its like at the default settings; "direct=always", "=never": past the page
  cache, or through it, where the default chooses by what it measures. "verified": every chunk is checked
  against its digest.
- Peers run at the settings that were fastest on the machines this was made on, with huge pages for new
  tensors (THP_MEM_ALLOC_ENABLE), which rfork is not given.
- "limit": fio with O_DIRECT (cold), preadv by two threads (warm), range requests over eight bare sockets
  (S3).
- "spread" is the slowest run's time less the fastest's, over the median. "CPU s" are user and system time
  of the process and its children; "over image" is the most memory (VmHWM) that the process had in any run,
  beside what it had before and the tensors themselves.

`storage_vs_best_peer` is the worst row of ours: the best peer's time over ours, of the same image and
medium, into the same kind of memory. `storage_cold_vs_medium` is the worse of fresh and existing over
fio's, of the dense image. GB/s are 1e9 bytes of tensors a second, over the median of the rounds.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks import harness
from benchmarks.seaweed import SeaweedError, why_not
from benchmarks.storage_draw import draw
from benchmarks.storage_image import SHARDS, check_room, lay_out
from benchmarks.storage_ours import write_snapshot
from benchmarks.storage_rounds import Bench
from benchmarks.storage_s3 import serving
from benchmarks.storage_table import figures, notes, row
from rfork import logs
from rfork.errors import RforkError


def main() -> None:
    """Measure, print, and write what was asked for."""
    options = harness.options("storage", __doc__)
    logs.configure(json=False, level="warning")
    harness.heed_sigterm()
    if missing := why_not():
        raise RforkError(missing)
    with tempfile.TemporaryDirectory(prefix="rfork-storage-") as name:
        folder = Path(name)
        check_room(folder, options.quick)
        images = {image: lay_out(image, options.quick, folder / image) for image in SHARDS}
        for stored in images.values():
            write_snapshot(stored)
        with serving(images, folder) as buckets:
            results = Bench(images, buckets, options).run()
    harness.publish(
        replace(options, plot=None),
        settings={
            **{f"{image}_bytes": stored.bytes for image, stored in images.items()},
            **{f"{image}_files": len(stored.safetensors) for image, stored in images.items()},
            **notes(results),
        },
        rows=[row(result) for result in results],
        figures=figures(results),
        plot=("contender", "GB/s"),
    )
    if options.plot:
        draw(options.plot, results)


if __name__ == "__main__":
    try:
        main()
    except (RforkError, SeaweedError) as error:
        raise SystemExit(f"{error}\n{getattr(error, 'hint', '')}".rstrip()) from None
