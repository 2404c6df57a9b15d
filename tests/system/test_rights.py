"""Only the user can read what kinetic keeps; kinetic rejects what others could have written."""

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

    The files of a workspace have the modes that the project gives them; the folder around it is
    closed.
    """
    kept = [one for one in (top, *top.rglob("*")) if "workspace" not in one.parts]
    return [str(one) for one in kept if one.lstat().st_mode & OTHERS]


def test_whatever_the_umask_nobody_else_may_look_into_what_is_kept(
    home: Path, tmp_path: Path
) -> None:
    fresh = home / "not" / "there" / "yet"
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environ = {**os.environ, "KINETIC_HOME": str(fresh), "KINETIC_PACKAGE_ROOT": str(tmp_path)}
    programs.python(script, env=environ)
    for one in (fresh.parent.parent, fresh.parent, fresh):
        assert not one.stat().st_mode & OTHERS
    for kept in ("key", "store", "local"):
        folders = [one for one in open_to_others(fresh / kept) if not one.endswith("/socket")]
        assert not folders


def give_away(path: Path) -> None:
    os.chown(path, NOBODY, NOBODY)


@pytest.mark.parametrize(
    ("name", "spoil", "words"),
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
async def test_what_others_may_change_is_refused_and_left_as_it_is(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    spoil: Callable[[Path], None],
    words: str,
) -> None:
    if spoil is give_away and os.geteuid() != 0:
        pytest.skip("only root can give files away")
    place = tmp_path / "home"
    (place / "store").mkdir(parents=True)
    (place / "local" / "v1").mkdir(parents=True)
    (place / "key").write_bytes(bytes(32))
    for one in (place, place / "store", place / "local" / "v1", place / "key"):
        one.chmod(0o700 if one.is_dir() else 0o600)
    spoil(place / name)
    before = sorted(place.rglob("*"))
    monkeypatch.setenv("KINETIC_HOME", str(place))
    async with aio.Client(backend="local") as client:
        with pytest.raises(errors.AuthError, match=words):
            await client.submit(len, b"")
    assert sorted(place.rglob("*")) == before
