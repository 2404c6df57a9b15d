"""``kinetic package``: list what ships of a project."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from kinetic.cli import output
from kinetic.cli.client import FilePath, json_option

if TYPE_CHECKING:
    from pathlib import Path


@click.command(short_help="List what ships of a project, and why something doesn't.")
@click.argument("path", default=".", type=FilePath(exists=True))
@json_option
def package(path: Path, as_json: bool) -> None:
    """List the files that ship with the jobs of a project, the largest first.

    Below them, the command lists what doesn't ship, and why. PATH is a file or a folder of the
    project. Default: the working directory. A job's Data in the project don't ship with it, but
    the command lists them. It packs and sends nothing.
    """
    from kinetic import configuration
    from kinetic._messages import format_size
    from kinetic._packing import archive, discover

    folder = path if path.is_dir() else path.parent
    # A function without a file belongs to the project of the working directory.
    project = discover.find_project(len, environ=os.environ, cwd=folder)
    if (root := project.root) is None:
        raise click.UsageError(f"{folder.absolute()} can't be a project; name a folder below it")
    tree = archive.list_project(root, os.environ)
    entries = [entry for entry in tree.entries if not entry.is_directory]
    entries.sort(key=lambda entry: (-entry.stamp.size, entry.name))
    ship, origin = configuration.ship(root, os.environ)
    if as_json:
        fields = {
            "root": str(root),
            "ship": ship,
            "bytes": tree.size,
            "files": [{"file": entry.name, "bytes": entry.stamp.size} for entry in entries],
            "left_out": [{"file": out.name, "reason": out.reason} for out in tree.left_out],
        }
        output.json_line("package", fields, indent=2)
        return
    rows = [{"file": entry.name, "size": format_size(entry.stamp.size)} for entry in entries]
    output.table("package", ("file", "size"), rows, as_json=False, empty="no file ships")
    if tree.left_out:
        click.echo()
        rows = [{"not_shipped": out.name, "why": out.reason} for out in tree.left_out]
        output.table("package", ("not_shipped", "why"), rows, as_json=False)
    source = origin or "the default"
    output.note(
        f"{root}: {len(entries):,} files ship, {format_size(tree.size)} (ship={ship}, {source})"
    )
