"""A server that has nothing to do with rfork: ``python answers.py PORT`` answers 200 to everything."""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


class OkHandler(BaseHTTPRequestHandler):
    """200, whatever is asked for."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


if __name__ == "__main__":
    HTTPServer(("0.0.0.0", int(sys.argv[1])), OkHandler).serve_forever()
