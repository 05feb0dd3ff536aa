"""Measure how fast tensor files become tensors, compared with all common loaders and with the limits of the
media.

Two images: "dense" has a Llama's shapes, 4 GB in four shards; "small" is 20,000 tensors in 1 GB. They are
loaded from a disk with an empty page cache ("cold", checked by cachestat before each run), from the page
cache ("warm"), and from S3: SeaweedFS on this machine, over loopback, its own files in the page cache as far
as they fit.

What is counted. Each run is a separate process. Imports, existing tensors and the module are created before
the clock starts; headers, connections, clients and the allocation of new tensors count. Every contender loads
all tensors, and the clock stops when one byte of each page of each was read, so that mapping alone does not
count as loading. Then every byte is checked. Contenders run interleaved, every second round in reverse order.
Between runs the benchmark keeps as much memory allocated as the image needs, and frees it right before the
clock starts: a virtual machine that returns free memory to its host gets it back at a tenth of its speed, and
no contender should pay for that by chance.

Destinations. "fresh": new tensors in the process's own memory; "existing": a model's existing tensors, one
allocation each; "mapped": the files' pages in the page cache, which costs no copy and is valid as long as the
file is not truncated. The tensors of loaders that only map are cloned or copied for the other two.

Contenders. "rfork" is `rfork.load` and related functions at the default settings. The peers are safetensors' own
loader, which most tools use, and Run:ai's, the fastest other one. --quick and the full form have the same rows, except
small tensors from S3, so that they differ in size alone. --all adds the other rows and takes several times as long:
more loaders, all destinations, and rfork with other settings: "direct=always", "=never" (bypassing the page cache, or
through it, where the default decides by measurement), and "rfork snapshot", which checks every chunk against its
digest, as "tensorizer, hashes" checks every tensor. These two are compared with
each other in `storage_verified_vs_best_peer`; nothing else here verifies anything. Peers run at the best settings
found (`benchmarks/storage/other_loaders.py`), with huge pages for new tensors (THP_MEM_ALLOC_ENABLE), which rfork
does not get. "limit": fio and a reader of our own, both with O_DIRECT, of which the faster one is the limit (cold),
preadv by two threads (warm), range requests over eight bare sockets (S3). Contenders that could not run are listed
below the table.

Columns. "GB/s" are 1e9 bytes of tensors per second, for the median of the runs; "CPU s" user and system time
of the process and its children; "+MiB" the peak memory (VmHWM) of the process in any run, minus what it had
before and the tensors themselves; "spread" the slowest run's time minus the fastest's, divided by the median;
"runs" the number of runs: with --rounds above three, at most three from S3, of mapped loads, and of contenders that
are far slower.

Known limits. SeaweedFS shares the CPUs with its readers, so S3 rows measure CPU time as much as the network.
Loaders made for GPUs run on a CPU here. Files are new and of random bytes; the disk is a virtual machine's,
and its host may cache too. Reading a checkpoint into existing tensors uses a library's own call if it has
one, and `copy_` otherwise.

`storage_vs_best_peer` is rfork's worst row: the best peer's time divided by rfork's, for the same image and
medium, into the same type of memory. `storage_cold_vs_medium` is the worse of fresh and existing relative to
the disk's limit, of the dense image; `storage_small_vs_dense` is GB/s of small tensors relative to dense, the
worse of those measured, cold. `storage_peak_rss_over` is the maximum of "+MiB" in any row of rfork.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import harness
from benchmarks.seaweed import SeaweedError, unavailable_reason
from benchmarks.storage.cases import MEDIA, Part
from benchmarks.storage.images import SHARDS, SMALL, check_free_space, write_image
from benchmarks.storage.results import figures, notes, plot, row
from benchmarks.storage.rfork_loader import write_snapshot
from benchmarks.storage.runner import StorageBench, estimate_s, formats_by_image, minutes, written_bytes
from benchmarks.storage.s3 import serving
from rfork import logs
from rfork.errors import RforkError

ROUNDS = 3
"""Rounds by default: the full form is to end within 15 minutes."""
SLOW: Part = (SMALL, "s3")
"""Left out of --quick unless requested."""


def main() -> None:
    """Run the benchmark, print the table and write the requested files."""
    options, parts, every = parse()
    logs.configure(json=False, level="warning")
    harness.exit_on_sigterm()
    in_s3 = [part for part in parts if part[1] == "s3"]
    if in_s3 and (missing := unavailable_reason()):
        raise RforkError(missing)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rfork-storage-") as name:
        folder = Path(name)
        check_free_space(folder, sum(written_bytes(parts, options.quick, every)))
        print(f"{options.rounds} rounds, about {minutes(estimate_s(parts, options, every))}", file=sys.stderr)
        read = formats_by_image(parts, every)
        images = {image: write_image(image, options.quick, folder / image, read[image]) for image in read}
        for image, stored in images.items():
            if "snapshot" in read[image]:
                write_snapshot(stored)
        bench = StorageBench(images, options, every)
        bench.run([part for part in parts if part not in in_s3], {})
        # The server starts last: until then its files would use the memory of the page cache.
        if in_s3:
            with serving(images, formats_by_image(in_s3, every), folder) as buckets:
                bench.run(in_s3, buckets)
    results = bench.results(parts)
    settings_notes = notes(results)
    harness.publish(
        replace(options, plot=None),
        settings={
            **{f"{image}_bytes": stored.bytes for image, stored in images.items()},
            **{f"{image}_files": len(stored.safetensors) for image, stored in images.items()},
            "minutes": round((time.monotonic() - began) / 60, 1),
            **settings_notes,
        },
        rows=[row(result) for result in results if result.runs],
        figures=figures(results),
        plot=("contender", "GB/s"),
    )
    for name, value in settings_notes.items():
        print(f"{name}: {value}")
    if options.plot:
        plot(options.plot, results)


def parse(arguments: Sequence[str] | None = None) -> tuple[harness.Options, list[Part], bool]:
    """Parse the common benchmark options, the images and media to run, and whether to run every contender."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False)
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="run only if IMAGE/MEDIUM contains this: dense/cold, small/, s3"
    )
    parser.add_argument("--all", action="store_true", help="every contender and destination: takes hours")
    chosen, rest = parser.parse_known_args(arguments)
    options = harness.options("storage", f"{__doc__}\n{parser.format_help()}", rest, rounds=ROUNDS)
    parts: list[Part] = [
        (image, medium)
        for image in SHARDS
        for medium in MEDIA
        if chosen.only in f"{image}/{medium}" and (chosen.only or not options.quick or (image, medium) != SLOW)
    ]
    if not parts:
        raise RforkError(f"nothing matches {chosen.only!r}: images are {', '.join(SHARDS)}, media {', '.join(MEDIA)}")
    return options, parts, chosen.all


if __name__ == "__main__":
    try:
        main()
    except (RforkError, SeaweedError) as error:
        raise SystemExit(f"{error}\n{getattr(error, 'hint', '')}".rstrip()) from None
