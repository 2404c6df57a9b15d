"""Run examples/web_sweep.py, start a sweep in Chromium, and take a picture of its page.

pip install -e '.[test]'; apt-get install chromium
python docs/record_web_sweep.py [FOLDER]    default: docs/examples/recorded
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from record_examples import RECORDED, ROOT, machine

sys.path.append(str(ROOT))
from tests.report.browser import Browser

WIDTH, THROWS, DEADLINE_S = 720, 200, 60.0


def record(target: Path) -> None:
    """Write the picture and its facts into the folder *target*."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as home:
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "KINETIC_HOME": home}
        command = [sys.executable, str(ROOT / "examples" / "web_sweep.py"), str(port)]
        server = subprocess.Popen(command, cwd=home, env=environ)
        try:
            wait_for(port)
            with Browser() as browser:
                size = {"width": WIDTH, "height": 800, "deviceScaleFactor": 1, "mobile": False}
                browser.call("Emulation.setDeviceMetricsOverride", **size)
                browser.call("Page.navigate", url=f"http://127.0.0.1:{port}/")
                browser.until("document.readyState === 'complete' && document.forms.length")
                began = time.monotonic()
                browser.ask(f"document.forms[0].throws.value = {THROWS}")
                browser.ask("document.forms[0].requestSubmit()")
                browser.until(f"status.textContent.includes('{THROWS} of {THROWS}')")
                took = time.monotonic() - began
                (target / "web_sweep.png").write_bytes(browser.screenshot())
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(DEADLINE_S)
            stop = [sys.executable, "-m", "kinetic", "local", "stop", "-y"]
            subprocess.run(stop, env=environ, check=True, capture_output=True)
    facts = machine(took, "fastapi").replace("Took", f"{THROWS} jobs took")
    (target / "web_sweep.txt").write_text(f"*{facts}*\n", encoding="utf-8")


def wait_for(port: int) -> None:
    """Wait until the server listens."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        time.sleep(0.1)
    sys.exit("the server doesn't listen")


if __name__ == "__main__":
    record(Path(sys.argv[1]) if len(sys.argv) > 1 else RECORDED)
