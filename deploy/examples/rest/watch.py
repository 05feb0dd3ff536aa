"""Prints live which instance forks from which, with the planner's REST API and httpx only.

    python watch.py --planner http://127.0.0.1:8700
    python watch.py --planner http://127.0.0.1:8700 --until-ended 3

Lists models and forks, then follows the event stream: a line for each fork that starts, progresses or ends.
Needs: pip install httpx. If the planner requires tokens, set RFORK_TOKEN to a reader token.
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
    """Yield all items of a paginated list."""
    after: str | None = None
    while True:
        page = client.get(path, params={"after": after} if after else None).raise_for_status().json()
        yield from page["items"]
        after = page.get("next")
        if after is None:
            return


def events(client: httpx.Client) -> Iterator[Json]:
    """Yield every change of every fork from now on. The planner sends something at least every 5 s."""
    with client.stream("GET", "/v1/events", timeout=httpx.Timeout(10)) as stream:
        stream.raise_for_status()
        print("following", flush=True)
        for line in stream.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


def line_of(fork: Json) -> str:
    """Format a fork as one line."""
    if (finish := fork.get("finish")) is not None:
        return f"{fork['fork_id'][:8]} {fork['model']} {finish['outcome']} in {finish['seconds']:.2f} s"
    verified = sum(end - begin for begin, end in (fork.get("progress") or {}).get("verified", []))
    share = verified / fork["chunk_count"] if fork.get("chunk_count") else 0
    sources = ", ".join(each["source_id"][:12] for each in fork.get("plan", [])) or "no source"
    return f"{fork['fork_id'][:8]} {fork['model']} {fork['state']} {share:.0%} from {sources}"


def watch(client: httpx.Client, until_ended: int | None) -> None:
    """Print the lists, then events until this many forks have ended."""
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
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--planner", default=os.environ.get("RFORK_PLANNER", "http://127.0.0.1:8700"))
    parser.add_argument("--until-ended", type=int, help="exit after this many forks have ended")
    options = parser.parse_args()
    token = os.environ.get("RFORK_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else None
    try:
        with httpx.Client(base_url=options.planner, headers=headers) as client:
            watch(client, options.until_ended)
    except httpx.HTTPStatusError as error:  # a problem document with the reason
        sys.exit(error.response.read().decode())
    except httpx.HTTPError as error:
        sys.exit(f"planner {options.planner}: {error}")
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    main()
