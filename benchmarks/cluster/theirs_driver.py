"""keras-kinetic as its guide shows it; run by the interpreter of a virtualenv that has it.

``theirs_driver.py WHAT NUMBER PROJECT ZONE CLUSTER NAMESPACE IMAGE KEY``, in a project with a
module ``finish``. The last line of the output is the answer, as JSON. It needs a token of
Google's, so a server that gives one is here, and KEY signs what it is asked with.
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
    """The place of Google's token server."""

    def do_POST(self) -> None:
        """A token for everybody."""
        self.rfile.read(int(self.headers["Content-Length"]))
        body = json.dumps({"access_token": "t", "expires_in": 3600, "token_type": "Bearer"})
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


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
    """When the submission of a batch began, after a job before it."""
    function.run_async(0)
    began, used = time.time(), time.process_time()
    function.run_async_map(range(jobs), max_concurrent=None)
    return {"began": began, "used": time.process_time() - used}


def complete(function: Any, jobs: int) -> Any:
    """A batch, with everything as by default but that it is cleaned up at the end."""
    began = time.time()
    batch = function.run_async_map(range(jobs))
    seen = []
    for job in batch.as_completed():
        ended = job.result(cleanup=False)
        seen.append((ended, time.time()))
    batch.cleanup()
    return {"began": began, "seen": seen, "removed": time.time()}


def one_by_one(function: Any, jobs: int) -> Any:
    """One job after the other."""
    found = []
    for number in range(jobs):
        called = time.time()
        job = function.run_async(number)
        submitted = time.time()
        ended = job.result(cleanup=False)
        found.append((called, submitted, ended, time.time()))
        job.cleanup()
    return {"found": found}


def main() -> None:
    """Do what the command line says."""
    what, number, project, zone, cluster, namespace, image, key = sys.argv[1:]
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
        ways = {"submit": submit, "complete": complete, "one_by_one": one_by_one}
        answer = ways[what](function, int(number))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
