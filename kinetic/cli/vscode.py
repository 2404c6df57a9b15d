"""Put the entry that attaches to a job's debugger into VS Code's ``launch.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import click

ENTRY_NAME = "Attach to a kinetic job"
"""The name of the entry in VS Code: the same for each job, so that a new one replaces the old."""


def write_launch(launch: Mapping[str, Any]) -> Path:
    """Write *launch* into ``.vscode/launch.json`` of the current directory; return that file.

    Raises:
        click.ClickException: The file has comments, or other content that isn't plain JSON.
    """
    file = Path(".vscode", "launch.json").absolute()
    content: Any = {"version": "0.2.0"}
    others: list[Any] = []
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        entries = content.get("configurations", [])
        others = [entry for entry in entries if entry.get("name") != ENTRY_NAME]
    except FileNotFoundError:
        file.parent.mkdir(exist_ok=True)
    except (AttributeError, TypeError, ValueError) as exc:
        raise click.ClickException(
            f"can't change {file}: it isn't plain JSON ({exc}); leave out --vscode, and add the "
            "printed entry yourself"
        ) from exc
    entry = {**launch, "name": ENTRY_NAME}
    saved = {**cast("dict[str, Any]", content), "configurations": [*others, entry]}
    file.write_text(json.dumps(saved, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return file
