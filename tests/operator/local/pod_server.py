"""Stands for a container in the tests of the local runner: answers probes, and does on request what pods do wrong.

pod_server.py HOST PORT [--ready-after-file PATH] [--grandchild] [--ignore-term]
"""

import argparse
import http.server
import os
import signal
import subprocess
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("--ready-when", default="", help="ready once this file exists")
    parser.add_argument("--grandchild", action="store_true")
    parser.add_argument("--ignore-term", action="store_true")
    options = parser.parse_args()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            ready = not options.ready_when or Path(options.ready_when).exists()
            self.send_response(503 if self.path == "/ready" and not ready else 200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            return

    if options.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if options.grandchild:
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        print(f"grandchild {child.pid}", flush=True)
    print(f"env {os.environ.get('WHO', '')}", flush=True)
    with http.server.ThreadingHTTPServer((options.host, options.port), Handler) as server:
        print("listening", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
