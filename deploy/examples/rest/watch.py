"""Who forks from whom, as it happens: the planner's REST interface with httpx alone.

    python watch.py --planner http://127.0.0.1:8700
    python watch.py --planner http://127.0.0.1:8700 --until-ended 3

Lists the models and the forks that there are, then follows the stream of events: a line for each fork that
begins, goes on or ends. Needs: pip install httpx. Where the planner asks for tokens, RFORK_TOKEN is one of
the role reader.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import httpx

Json = dict[str, Any]


def pages(client: httpx.Client, path: str) -> Iterator[Json]:
    """All items of a list that comes in pages."""
    after: str | None = None
    while True:
        page = client.get(path, params={"after": after} if after else None).raise_for_status().json()
        yield from page["items"]
        after = page.get("next")
        if after is None:
            return


def events(client: httpx.Client) -> Iterator[Json]:
    """Every change of every fork, from now on. The planner says something at least every 5 s."""
    with client.stream("GET", "/v1/events", timeout=httpx.Timeout(10)) as stream:
        stream.raise_for_status()
        print("following", flush=True)
        for line in stream.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


def line_of(fork: Json) -> str:
    """A fork on one line."""
    if (finish := fork.get("finish")) is not None:
        return f"{fork['fork_id'][:8]} {fork['model']} {finish['outcome']} in {finish['seconds']:.2f} s"
    verified = sum(end - begin for begin, end in (fork.get("progress") or {}).get("verified", []))
    share = verified / fork["chunk_count"] if fork.get("chunk_count") else 0
    sources = ", ".join(each["source_id"][:12] for each in fork.get("plan", [])) or "nobody"
    return f"{fork['fork_id'][:8]} {fork['model']} {fork['state']} {share:.0%} from {sources}"


def watch(client: httpx.Client, until_ended: int | None) -> None:
    """Lists first, then events, until so many forks have ended."""
    for model in client.get("/v1/models").raise_for_status().json():
        print(f"model {model['model']}: {model['seeds']} seeds, {model['relays']} relays")
    for fork in pages(client, "/v1/forks"):
        print(line_of(fork))
    ended = 0
    for event in events(client):
        print(f"{event['kind']}: {line_of(event['fork'])}", flush=True)
        ended += event["kind"] == "ended"
        if ended == until_ended:
            return


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--planner", default=os.environ.get("RFORK_PLANNER", "http://127.0.0.1:8700"))
    parser.add_argument("--until-ended", type=int, help="end once so many forks have ended")
    options = parser.parse_args()
    token = os.environ.get("RFORK_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else None
    try:
        with httpx.Client(base_url=options.planner, headers=headers) as client:
            watch(client, options.until_ended)
    except httpx.HTTPStatusError as error:  # a problem document says what is wrong
        sys.exit(error.response.read().decode())
    except httpx.HTTPError as error:
        sys.exit(f"planner {options.planner}: {error}")
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    main()
