"""Run jobs with keras-kinetic as its guide shows it, in a virtualenv that has the package.

``peer_driver.py ACTION NUMBER PROJECT ZONE CLUSTER NAMESPACE IMAGE KEY``, in a project with a
module ``finish``. The last line of the output is the answer, as JSON. The package needs an access
token, so this process has a token server. KEY is the file of the key that signs requests to it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Tokens(BaseHTTPRequestHandler):
    """Answers in place of Google's token server."""

    def do_POST(self) -> None:
        """Return a token without a check."""
        self.rfile.read(int(self.headers["Content-Length"]))
        body = json.dumps({"access_token": "t", "expires_in": 3600, "token_type": "Bearer"})
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def credentials(key: str, folder: Path) -> None:
    """Write application-default credentials of a service account; the server doesn't check them."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Tokens)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    account = {
        "type": "service_account",
        "project_id": "p",
        "private_key_id": "k",
        "private_key": Path(key).read_text(),
        "client_email": "a@p.iam.gserviceaccount.com",
        "client_id": "1",
        "token_uri": f"http://127.0.0.1:{server.server_port}/token",
    }
    (folder / "account.json").write_text(json.dumps(account))
    os.environ["GOOGLE_APPLICATION_CREDENTIALS"] = str(folder / "account.json")


def submit(function: Any, jobs: int) -> Any:
    """Submit a batch after another job; return when that started, and the processor seconds."""
    function.run_async(0)
    started_at, cpu_before = time.time(), time.process_time()
    function.run_async_map(range(jobs), max_concurrent=None)
    return {"started_at": started_at, "cpu_seconds": time.process_time() - cpu_before}


def complete(function: Any, jobs: int) -> Any:
    """Run a batch with default options, and clean up; return moments as `kinetic_client` does."""
    started_at = time.time()
    batch = function.run_async_map(range(jobs))
    moments = []
    for job in batch.as_completed():
        ended = job.result(cleanup=False)
        moments.append((ended, time.time()))
    batch.cleanup()
    return {"started_at": started_at, "moments": moments, "removed_at": time.time()}


def one_by_one(function: Any, jobs: int) -> Any:
    """Run one job after the other; return moments as `kinetic_client` does."""
    moments = []
    for number in range(jobs):
        called = time.time()
        job = function.run_async(number)
        submitted = time.time()
        ended = job.result(cleanup=False)
        moments.append((called, submitted, ended, time.time()))
        job.cleanup()
    return {"moments": moments}


def main() -> None:
    """Carry out the action of the command line, and print its answer."""
    action, number, project, zone, cluster, namespace, image, key = sys.argv[1:]
    sys.path[0] = os.getcwd()  # the project, and not the folder of this file
    with tempfile.TemporaryDirectory() as folder:
        credentials(key, Path(folder))
        import finish

        import kinetic

        function = kinetic.run(
            accelerator="cpu",
            container_image=image,
            project=project,
            zone=zone,
            cluster=cluster,
            namespace=namespace,
        )(finish.now)
        actions = {"submit": submit, "complete": complete, "one_by_one": one_by_one}
        answer = actions[action](function, int(number))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
