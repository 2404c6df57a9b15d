"""A client packs a project once, and later only what changed: no file is stale without notice."""

from __future__ import annotations

import contextlib
import os
import random
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kinetic._packing import archive
from kinetic._runner.job import workspace
from kinetic._runner.protocol import overlay

from .conftest import Make, settle

Ship = Callable[..., archive.Packed]

LARGE = archive.SMALL_BYTES + 1


class Shipper:
    """One client's packer, and the files that a job of its latest call sees."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.root = folder / "project"
        self.packer = archive.Packer()
        self.whole = set[Path]()
        """The archives of the whole project."""

    def __call__(self, *exclude: Path, **options: Any) -> archive.Packed:
        packed = self.packer.pack(
            self.root,
            exclude=exclude,
            cache=self._folder / "cache",
            environ={"HOME": str(self._folder)},
            **options,
        )
        self.whole.add(packed.archive.path)
        return packed

    def seen_by_a_job(self, *exclude: Path) -> dict[str, bytes]:
        """Ship the project, and return the files of a job's workspace."""
        packed = self(*exclude)
        target = self._folder / f"job-{len(list(self._folder.iterdir()))}"
        with zipfile.ZipFile(packed.archive.path) as file:
            file.extractall(target)
        target.mkdir(exist_ok=True)
        if packed.overlay is not None:
            assert isinstance(packed.overlay.content, bytes)
            workspace._apply(overlay.decode(packed.overlay.content), str(target))  # pyright: ignore[reportPrivateUsage]
        return files(target)


def files(root: Path) -> dict[str, bytes]:
    """Return the content of all files below *root*; a directory ends with ``/``."""
    return {
        f"{path.relative_to(root)}{'/' * path.is_dir()}": b""
        if path.is_dir()
        else path.read_bytes()
        for path in root.rglob("*")
    }


@pytest.fixture
def ship(tmp_path: Path) -> Iterator[Shipper]:
    with contextlib.closing(Shipper(tmp_path).packer) as packer:
        shipper = Shipper(tmp_path)
        shipper.packer = packer
        yield shipper


def test_files_that_grow_beside_the_code_ship_alone(
    make: Make, ship: Shipper, caplog: pytest.LogCaptureFixture
) -> None:
    make(ship.root, {"train.py": "", "data.bin": random.Random(0).randbytes(1_000_000)})
    sizes: list[int] = []
    for number in range(100):
        with (ship.root / "results.csv").open("a") as results:
            results.write(f"{number},{number / 7}\n")
        make(ship.root, {f"outputs/run-{number}/config.yaml": f"rate: {number}"})
        packed = ship()
        sizes.append(packed.overlay.size if packed.overlay is not None else 0)
    assert len(ship.whole) == 1
    assert 0 < sum(sizes) < 1_000_000
    assert ship.seen_by_a_job() == files(ship.root)
    assert not caplog.records


def test_nothing_ships_if_nothing_changed(make: Make, ship: Shipper) -> None:
    make(ship.root, {"m.py": "1", "log": ""})
    settle(ship.root)
    assert ship().overlay is None
    (ship.root / "log").write_text("line")
    settle(ship.root)
    changed = ship().overlay
    assert changed is not None
    assert ship().overlay is changed, "it isn't read again"
    assert len(ship.whole) == 1


OPERATION = st.tuples(
    st.sampled_from(["write", "append", "remove", "replace", "make folder", "chmod", "touch"]),
    st.sampled_from(["a", "b.py", "c/d", "c/e/f", "c", "g/h.txt"]),
    st.integers(0, 9),
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(rounds=st.lists(st.lists(OPERATION, max_size=4), min_size=2, max_size=4))
def test_a_job_sees_the_project_as_it_is(
    rounds: list[list[tuple[str, str, int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    ship = Shipper(tmp_path_factory.mktemp("overlay"))
    ship.root.mkdir()
    with contextlib.closing(ship.packer):
        for operations in rounds:
            for operation, name, number in operations:
                with contextlib.suppress(OSError):
                    change(operation, ship.root / name, number)
            assert ship.seen_by_a_job() == files(ship.root)
            assert len(ship.whole) == 1


def change(operation: str, path: Path, number: int) -> None:
    """Change the project; raise `OSError` if *operation* isn't possible."""
    path.parent.mkdir(parents=True, exist_ok=True)
    match operation:
        case "append":
            with path.open("a") as file:
                file.write(str(number))
        case "remove":
            path.rmdir() if path.is_dir() else path.unlink()
        case "replace":  # a file becomes a folder
            path.unlink()
            path.mkdir()
        case "make folder":
            path.mkdir()
        case "chmod":
            path.chmod(0o700)
        case "touch":
            path.touch()
        case _:
            path.write_text(str(number))


def test_permissions_and_removed_folders_ship(make: Make, ship: Shipper) -> None:
    make(ship.root, {"m.py": "", "run.sh": "exit", "old/deep/x": "", "old/y": ""})
    ship()
    (ship.root / "run.sh").chmod(0o755)
    for name in ("old/deep/x", "old/y"):
        (ship.root / name).unlink()
    (ship.root / "old/deep").rmdir()
    (ship.root / "old").rmdir()
    packed = ship().overlay
    assert packed is not None and isinstance(packed.content, bytes)
    found = overlay.decode(packed.content)
    shipped = {name: change and change.mode for name, change in found.items()}
    assert shipped.pop("run.sh") == 0o755
    removed = [name for name, mode in shipped.items() if mode is None]
    assert removed == ["old/y", "old/deep/x", "old/deep/", "old/"]


def test_a_larger_file_that_changed_is_named_once(
    make: Make, ship: Shipper, caplog: pytest.LogCaptureFixture
) -> None:
    make(ship.root, {"m.py": "", "journal.log": bytes(LARGE), "other": bytes(LARGE)})
    settle(ship.root)
    ship()
    for number in range(3):
        with (ship.root / "journal.log").open("ab") as journal:
            journal.write(b"line")
        make(ship.root, {"results.csv": str(number)})
        seen = ship.seen_by_a_job()
        assert len(seen["journal.log"]) == LARGE and seen["results.csv"] == b"%d" % number
    make(ship.root, {"model.pt": bytes(LARGE)})
    assert "model.pt" not in ship.seen_by_a_job()
    ship()
    first, second = [record.getMessage() for record in caplog.records]
    assert "journal.log (1.0 MB)" in first and "Data" in first and ".kineticignore" in first
    assert "model.pt (1.0 MB)" in second and "journal.log" not in second
    assert len(ship.whole) == 1


@pytest.mark.parametrize("way", ["code", "rules", "client"])
def test_larger_files_ship_again_with_the_code_or_with_a_new_client(
    way: str, tmp_path: Path, make: Make, ship: Shipper
) -> None:
    make(ship.root, {"m.py": "1", "log": bytes(LARGE), ".kineticignore": "# nothing\n"})
    ship()
    make(ship.root, {"log": bytes(LARGE + 1)})
    assert len(ship.seen_by_a_job()["log"]) == LARGE
    if way == "client":
        ship.packer.close()
    else:
        make(ship.root, {"m.py" if way == "code" else ".kineticignore": "# changed"})
    assert ship.seen_by_a_job() == files(ship.root)
    assert len(ship.whole) == 2


def test_code_that_changes_alone_ships_as_an_overlay(make: Make, ship: Shipper) -> None:
    make(ship.root, {"m.py": "1", "data": bytes(LARGE)})
    ship()
    make(ship.root, {"m.py": "2", "new.py": "3"})
    assert ship.seen_by_a_job() == files(ship.root)
    assert len(ship.whole) == 1


def test_a_larger_file_that_was_removed_ships_no_more(make: Make, ship: Shipper) -> None:
    make(ship.root, {"m.py": "1", "data": bytes(LARGE)})
    ship()
    (ship.root / "data").unlink()
    with zipfile.ZipFile(ship().archive.path) as archive:
        assert archive.namelist() == ["m.py"]


def test_copies_of_code_that_tools_make_ship_no_larger_file_again(
    make: Make, ship: Shipper
) -> None:
    make(ship.root, {"m.py": "1", "log": bytes(LARGE)})
    for number in range(4):
        make(ship.root, {"log": bytes(LARGE + number), f"runs/{number}/code/m.py": "1"})
        ship()
    assert len(ship.whole) == 1


def test_a_larger_file_with_the_same_content_is_not_named(
    make: Make, ship: Shipper, caplog: pytest.LogCaptureFixture
) -> None:
    make(ship.root, {"data": bytes(LARGE)})
    ship()  # at once: the file may still change without another stamp
    ship()
    os.utime(ship.root / "data", (1, 1))
    ship()
    assert not caplog.records
    with (ship.root / "data").open("r+b") as data:
        data.write(b"x")
    ship()
    assert "data (1.0 MB)" in caplog.text


def test_a_file_that_becomes_a_credential_leaves_the_workspace(
    make: Make, ship: Shipper, caplog: pytest.LogCaptureFixture
) -> None:
    make(ship.root, {"tls.key": "not yet", "m.py": ""})
    ship()
    caplog.clear()
    make(ship.root, {"tls.key": "-----BEGIN RSA " + "PRIVATE KEY-----\nMIIE\n", ".env": "x"})
    for _ in range(2):
        make(ship.root, {"log": os.urandom(4)})
        assert {*ship.seen_by_a_job()} == {"m.py", "log"}
    (message,) = (record.getMessage() for record in caplog.records)
    assert ".env, tls.key" in message


def test_data_inside_the_project_leaves_the_workspace(make: Make, ship: Shipper) -> None:
    make(ship.root, {"m.py": "", "data/x": "1"})
    assert {*ship.seen_by_a_job()} == {"m.py", "data/", "data/x"}
    assert {*ship.seen_by_a_job(ship.root / "data")} == {"m.py"}
    assert {*ship.seen_by_a_job()} == {"m.py", "data/", "data/x"}
    assert {*ship.seen_by_a_job(ship.root.parent / "elsewhere")} == {"m.py", "data/", "data/x"}
    assert len(ship.whole) == 2


def test_many_changes_make_another_archive(make: Make, ship: Shipper) -> None:
    content = bytes(archive.SMALL_BYTES)
    make(ship.root, {"m.py": ""})
    ship()
    count = archive.MAX_CHANGED_BYTES // archive.SMALL_BYTES
    make(ship.root, {f"out/{number}": content for number in range(count - 1)})
    assert ship().overlay is not None
    make(ship.root, {"out/last": content, "out/another": content})
    assert ship().overlay is None
    assert len(ship.whole) == 2


def test_an_archive_that_the_cache_has_lost_is_made_again(make: Make, ship: Shipper) -> None:
    make(ship.root, {"m.py": ""})
    ship().archive.path.unlink()
    assert ship().archive.path.exists()


@pytest.mark.parametrize("content", [b"", b"x", overlay.encode({})[:-1]])
def test_a_garbled_overlay_is_an_error(content: bytes) -> None:
    with pytest.raises(ValueError, match="garbled"):
        overlay.decode(content)
    assert overlay.decode(overlay.encode({})) == {}
