"""Client that requests the first token of a server that may not listen yet. Uses the standard library only.

``python -S -m benchmarks.ready.first_token URL '{"first": {…}, "more": {…}}'`` sends the first body until the server
answers it, then the second once, and prints ``{"listening": …, "first_token": …, "response": …}``: when the request
that succeeded was sent and when its response had arrived, as `time.monotonic`, and the second response.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from typing import Any
from urllib.parse import urlsplit

POLL_INTERVAL_S = 0.05
REQUEST_TIMEOUT_S = 120.0


def main() -> None:
    """Run the requests of the command line."""
    url, bodies = sys.argv[1], json.loads(sys.argv[2])
    while True:
        listening = time.monotonic()
        if post(url, bodies["first"]) is not None:
            break
        time.sleep(POLL_INTERVAL_S)
    times = {"listening": listening, "first_token": time.monotonic()}
    print(json.dumps({**times, "response": post(url, bodies["more"])}), flush=True)


def post(url: str, body: dict[str, Any]) -> Any:
    """Return the response to a request; None if the server does not listen or is not ready."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=REQUEST_TIMEOUT_S)
    try:
        connection.request("POST", parts.path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return json.loads(content) if response.status == 200 else None


if __name__ == "__main__":
    main()
