"""Only the user can access kinetic's files; files that others could have written are rejected."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from kinetic import aio, errors
from tests import programs

OTHERS = stat.S_IRWXG | stat.S_IRWXO
NOBODY = 65534
SCRIPT = """
import os
os.umask(0o002)
import kinetic

@kinetic.run(backend="local", accelerator="cpu")
def double(x):
    return 2 * x

if __name__ == "__main__":
    assert double(21) == 42
    with double.run_async_map([1, 2]) as batch:
        assert batch.results() == [2, 4]
"""


def open_to_others(top: Path) -> list[str]:
    """List what other users may read, write, or search in *top*.

    Skip the contents of workspaces: their modes are the project's, and the folder around them is
    closed.
    """
    paths = [path for path in (top, *top.rglob("*")) if "workspace" not in path.parts]
    return [str(path) for path in paths if path.lstat().st_mode & OTHERS]


def test_other_users_cannot_access_the_home_whatever_the_umask(home: Path, tmp_path: Path) -> None:
    fresh = home / "not" / "there" / "yet"
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environ = {**os.environ, "KINETIC_HOME": str(fresh), "KINETIC_PACKAGE_ROOT": str(tmp_path)}
    programs.python(script, env=environ)
    for folder in (fresh.parent.parent, fresh.parent, fresh):
        assert not folder.stat().st_mode & OTHERS
    for name in ("key", "store", "local"):
        exposed = open_to_others(fresh / name)
        assert not [path for path in exposed if not path.endswith("/socket")]


def give_away(path: Path) -> None:
    os.chown(path, NOBODY, NOBODY)


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        (".", lambda path: path.chmod(0o770), r"chmod go-w .*home`"),
        ("store", lambda path: path.chmod(0o707), r"chmod go-w .*home/store`"),
        ("local/v1", lambda path: path.chmod(0o720), r"chmod go-w .*home/local/v1`"),
        ("key", lambda path: path.chmod(0o640), r"chmod go-rwx .*home/key`"),
        (".", give_away, r"chown -R \d+ .*home`"),
        ("key", give_away, r"chown -R \d+ .*home/key`"),
    ],
    ids=["a home", "a store", "a socket's folder", "a key", "another's home", "another's key"],
)
async def test_files_that_others_may_change_are_refused_and_left_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    spoil: Callable[[Path], None],
    message: str,
) -> None:
    if spoil is give_away and os.geteuid() != 0:
        pytest.skip("only root can give files away")
    home = tmp_path / "home"
    (home / "store").mkdir(parents=True)
    (home / "local" / "v1").mkdir(parents=True)
    (home / "key").write_bytes(bytes(32))
    for path in (home, home / "store", home / "local" / "v1", home / "key"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    spoil(home / name)
    before = sorted(home.rglob("*"))
    monkeypatch.setenv("KINETIC_HOME", str(home))
    async with aio.Client(backend="local") as client:
        with pytest.raises(errors.AuthError, match=message):
            await client.submit(len, b"")
    assert sorted(home.rglob("*")) == before
