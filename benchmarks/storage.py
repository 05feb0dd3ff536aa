"""How fast do tensor files become tensors, beside every loader that people use, and what do the media allow?

Two images: "dense" has a Llama's shapes, 4 GB in four shards; "small" is 20,000 tensors in 1 GB. From a
disk of which nothing is in the page cache ("cold", seen by cachestat before each run), from the page cache
("warm"), and from S3: SeaweedFS on this machine, over loopback, its own files in the page cache as far as
that has room.

What is counted. Each run is a process of its own. Imports, tensors that exist and the module come before
the clock; headers, connections, clients and the allocation of new tensors under it. Everybody loads all
tensors, and the clock stops when one byte of each page of each was read, so that nobody is timed for what
is only mapped. Then every byte is checked. Contenders run interleaved, every second round backwards. Between
runs as much memory as the image takes is held, and freed right before the clock: a virtual machine that
gives free memory back to its host gets it again at a tenth of its speed, and nobody is to pay for that by
chance.

Where the tensors go. "fresh": new ones in memory of the process's own; "existing": a model's that are there
already, one allocation each; "mapped": they are the files' pages in the page cache, which costs no copy and
holds for as long as nobody truncates the file. Who only maps is cloned, or copied, for the other two.

Who runs. "rfork" is `rfork.load` and its like at the default settings; "direct=always", "=never": past the
page cache, or through it, where the default chooses by what it measures. "rfork snapshot" checks every chunk
against its digest, as "tensorizer, hashes" checks every tensor: these two are compared with each other, in
`storage_verified_vs_best_peer`; nothing else here checks anything. Peers run at the best settings that
were found (`benchmarks/storage_other_loaders.py`), with huge pages for new tensors (THP_MEM_ALLOC_ENABLE), which
rfork is not given. "limit": fio and a reader of our own, both with O_DIRECT, of which the faster one is the
limit (cold), preadv by two threads (warm), range requests over eight bare sockets (S3). Who could not run
is named below the table.

What the columns say. "GB/s" are 1e9 bytes of tensors a second, over the median of the runs; "CPU s" user and
system time of the process and its children; "+MiB" the most memory (VmHWM) that the process had in any run,
beside what it had before and the tensors themselves; "spread" the slowest run's time less the fastest's,
over the median; "runs" how many there were: three at most from S3, of what is only mapped, and of who is far
behind.

What a reader may object to. SeaweedFS shares the processors with who reads it, so that S3 rows are about
processor time as much as about the network. Loaders made for GPUs run on a CPU here. Files are new, and of
random bytes; the disk is a virtual machine's, and its host may cache too. Who reads a checkpoint into tensors
that exist goes through a library's own call where it has one, and through `copy_` where not.

`storage_vs_best_peer` is the worst row of ours: the best peer's time over ours, of the same image and
medium, into the same kind of memory. `storage_cold_vs_medium` is the worse of fresh and existing over the
disk's limit, of the dense image; `storage_small_vs_dense` is GB/s of small tensors over dense, the worse of
both, cold. `storage_peak_rss_over` is the most of "+MiB" in any row of rfork.
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
from benchmarks.storage_bench import StorageBench, estimate_s, formats_by_image, minutes, written_bytes
from benchmarks.storage_cases import MEDIA, Part
from benchmarks.storage_images import SHARDS, SMALL, check_free_space, write_image
from benchmarks.storage_plot import plot
from benchmarks.storage_rfork import write_snapshot
from benchmarks.storage_s3 import serving
from benchmarks.storage_table import figures, notes, row
from rfork import logs
from rfork.errors import RforkError

SLOW: Part = (SMALL, "s3")
"""Left out of --quick, but where it is asked for."""


def main() -> None:
    """Measure, print, and write what was asked for."""
    options, parts = parse()
    logs.configure(json=False, level="warning")
    harness.exit_on_sigterm()
    in_s3 = [part for part in parts if part[1] == "s3"]
    if in_s3 and (missing := unavailable_reason()):
        raise RforkError(missing)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rfork-storage-") as name:
        folder = Path(name)
        check_free_space(folder, sum(written_bytes(parts, options.quick)))
        print(f"{options.rounds} rounds, about {minutes(estimate_s(parts, options))}", file=sys.stderr)
        read = formats_by_image(parts, options.quick)
        images = {image: write_image(image, options.quick, folder / image, read[image]) for image in read}
        for image, stored in images.items():
            if "snapshot" in read[image]:
                write_snapshot(stored)
        bench = StorageBench(images, options)
        bench.run([part for part in parts if part not in in_s3], {})
        # The server comes last: until then its files would take the memory of the page cache.
        if in_s3:
            with serving(images, formats_by_image(in_s3, options.quick), folder) as buckets:
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


def parse(arguments: Sequence[str] | None = None) -> tuple[harness.Options, list[Part]]:
    """The options of all benchmarks, and which images and media are run."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False)
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="run where IMAGE/MEDIUM has it: dense/cold, small/, s3"
    )
    chosen, rest = parser.parse_known_args(arguments)
    options = harness.options("storage", f"{__doc__}\n{parser.format_help()}", rest)
    parts: list[Part] = [
        (image, medium)
        for image in SHARDS
        for medium in MEDIA
        if chosen.only in f"{image}/{medium}" and (chosen.only or not options.quick or (image, medium) != SLOW)
    ]
    if not parts:
        raise RforkError(f"nothing matches {chosen.only!r}: images are {', '.join(SHARDS)}, media {', '.join(MEDIA)}")
    return options, parts


if __name__ == "__main__":
    try:
        main()
    except (RforkError, SeaweedError) as error:
        raise SystemExit(f"{error}\n{getattr(error, 'hint', '')}".rstrip()) from None
