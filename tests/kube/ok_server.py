"""A server without rfork: ``python ok_server.py PORT`` returns 200 for every request."""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


class OkHandler(BaseHTTPRequestHandler):
    """Returns 200 for every request."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


if __name__ == "__main__":
    HTTPServer(("0.0.0.0", int(sys.argv[1])), OkHandler).serve_forever()
