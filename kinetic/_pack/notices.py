"""What a user should know about a tree before it leaves the machine; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kinetic._pack import credentials
from kinetic._pack.tree import Tree
from kinetic.errors import ConfigurationError

__all__ = ["about", "about_credentials", "amount", "listed", "megabytes"]

SIZE_VARIABLE = "KINETIC_CONTEXT_SIZE_WARN_MB"
MEGABYTE = 1_000_000


def about(tree: Tree, root: Path, environ: Mapping[str, str]) -> list[str]:
    """Sentences: what was left out, and what is large.

    Raises:
        ConfigurationError: `KINETIC_CONTEXT_SIZE_WARN_MB` is not a number.
    """
    said: list[str] = []
    if tree.left:
        said.append(listed(f"Not shipped from {root}:", tree.left))
    limit = megabytes(environ, SIZE_VARIABLE, 100)
    if tree.size > limit * MEGABYTE:
        files = [one for one in tree.entries if not one.is_directory]
        largest = sorted(files, key=lambda one: one.stamp.size, reverse=True)[:5]
        named = [f"{one.name} ({amount(one.stamp.size)})" for one in largest]
        said.append(
            f"The project {root} has {amount(tree.size)}, more than {SIZE_VARIABLE}={limit:g}. "
            f"Largest: {', '.join(named)}. Leave out with .kineticignore what the job does not "
            "need, or pass it as Data."
        )
    return said


def about_credentials(shipped: Iterable[str], private: Sequence[str], root: Path) -> list[str]:
    """Sentences: which credentials, *private*, stay here, and which files may be some and ship."""
    said: list[str] = []
    if private:
        said.append(
            listed(f"Not shipped from {root}, because they are credentials:", private)
            + " A line in .kineticignore with a ! before the name ships one; one without keeps it "
            "here unsaid."
        )
    if found := [one for one in shipped if credentials.look_private(one.rpartition("/")[2])]:
        what = f"These files of {root} look like secrets and are shipped with the code:"
        said.append(listed(what, found) + " List them in .kineticignore to keep them here.")
    return said


def listed(what: str, items: Sequence[str], most: int = 10) -> str:
    """*what*, then the first *most* of *items*, as one sentence."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return f"{what} {', '.join(items[:most])}{more}."


def megabytes(environ: Mapping[str, str], name: str, default: float) -> float:
    """A number of megabytes from the environment.

    Raises:
        ConfigurationError: It is not a number.
    """
    value = environ.get(name) or str(default)
    try:
        return float(value)
    except ValueError:
        raise ConfigurationError(f"{name}={value} is not a number of megabytes") from None


def amount(size: float) -> str:
    """Bytes for people."""
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit != "MB" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
