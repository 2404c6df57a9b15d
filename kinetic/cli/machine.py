"""``kinetic gc``, ``package``, and ``local``: caches, what ships, and this machine's supervisor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kinetic.cli import output
from kinetic.cli.client import FilePath, Group, json_option, run_async, with_client

if TYPE_CHECKING:
    from pathlib import Path

    from kinetic import aio


@click.command(short_help="Remove unused content of the store and the caches.")
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Also remove what was used within a day, and the caches, but not what live jobs use.",
)
@json_option
@with_client
async def gc(client: aio.Client, everything: bool, as_json: bool) -> None:
    """Remove unused content from the store and from the caches of this machine.

    The store is a folder or a bucket. kinetic removes code, functions, requirements, and Data from
    it, but keeps what a job or a batch refers to, and what was used within a day. From the caches,
    it removes what exceeds their limits.

    With --all, only what a live job or a batch uses stays. A batch uses its content until you
    read its results or clean it up. Don't use --all while another process submits to a bucket.
    """
    collection = await client.collect(everything=everything)
    rows = [
        {"folder": folder, "files": content.files, "bytes": content.size}
        for folder, content in collection.freed.items()
    ]
    columns = ("folder", "files", "bytes")
    empty = "nothing to remove"
    if not everything:
        empty += "; --all also removes what was used within a day, and the caches"
    output.table("gc", columns, rows, as_json=as_json, empty=empty)


@click.command(short_help="List what ships of a project, and why something doesn't.")
@click.argument("path", default=".", type=FilePath(exists=True))
@json_option
def package(path: Path, as_json: bool) -> None:
    """List the files that ship with the jobs of a project, the largest first.

    Below them, the command lists what doesn't ship, and why. PATH is a file or a folder of the
    project. Default: the working directory. A job's Data in the project don't ship with it, but
    the command lists them. It packs and sends nothing.
    """
    import os

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


@click.group(cls=Group)
def local() -> None:
    """Show or stop the supervisor, which runs local jobs."""


@local.command("status")
@json_option
def _status(as_json: bool) -> None:
    """Show the supervisor, its jobs, and the sizes of folders."""
    import os

    from kinetic import _collector, configuration
    from kinetic._messages import format_size
    from kinetic.aio.local.supervisor import running

    home = configuration.home()
    supervisor = run_async(running(home))
    fields: dict[str, Any] = {"home": str(home), "running": supervisor is not None}
    if supervisor is not None:
        fields |= {"pid": supervisor.pid, "log": supervisor.log, "jobs": dict(supervisor.jobs)}
        fields["workers"] = dict(supervisor.workers)
    for folder, content in _collector.sizes(home, os.environ).items():
        if as_json:
            fields.setdefault("folders", {})[folder] = {
                "files": content.files,
                "bytes": content.size,
            }
        else:
            files = "1 file" if content.files == 1 else f"{content.files:,} files"
            fields[folder] = f"{format_size(content.size)} in {files}"
    output.fields("local.status", fields, as_json=as_json)


@local.command("stop")
@click.option("-y", "--yes", is_flag=True, help="Don't ask for confirmation, even if jobs run.")
@json_option
def _stop(yes: bool, as_json: bool) -> None:
    """Stop the supervisor and all local jobs."""
    from kinetic import configuration
    from kinetic.aio.local.supervisor import end, running

    supervisor = run_async(running(configuration.home()))
    job_count = 0
    if supervisor is not None:
        job_count = supervisor.jobs.get("running", 0) + supervisor.jobs.get("pending", 0)
        if job_count:
            output.confirm(f"Stop the supervisor and its {job_count} jobs?", yes=yes)
        run_async(end(supervisor))
    fields = {"was_running": supervisor is not None, "jobs": job_count}
    message = "the supervisor isn't running" if supervisor is None else "the supervisor has stopped"
    output.done("local.stop", fields, message, as_json=as_json)
