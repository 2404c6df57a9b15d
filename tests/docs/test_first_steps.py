"""Whoever types README's commands in order ends with a value; the cluster's part isn't run here."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from tests import programs

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_commands_of_readme_run_its_program(tmp_path: Path, home: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README.partition("## Try it")[0], re.S)
    (commands,) = re.findall(
        r"four\ncommands:\n\n```\n(.*?)```|four commands:\n\n```\n(.*?)```", README, re.S
    )
    last = "".join(commands).strip().splitlines()[-1].split()
    (tmp_path / "train.py").write_text(program)
    at = last.index("--accelerator")
    here = [*last[1:at], *last[at + 2 :]]  # this machine has no TPU
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = programs.run(sys.executable, "-m", "kinetic", *here, cwd=tmp_path, env=environ)
    assert (ran.returncode, ran.stdout) == (0, f"{0.9**5!r}\n"), ran.stderr
    ran = programs.run(sys.executable, "train.py", cwd=tmp_path, env=environ)
    assert ran.returncode == 0 and ran.stdout.count("->") == 3, ran.stderr
