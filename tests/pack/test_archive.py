"""Test the archive of a project: contents, reproducibility, cache, errors, and warnings."""

from __future__ import annotations

import contextlib
import json
import os
import random
import stat
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kinetic._packing import archive
from kinetic._packing.ignore import looks_private
from kinetic.errors import ConfigurationError
from tests import programs
from tests.scripts import Program, until

from .conftest import REPOSITORY, Make, Python, contents, last_line, names, settle

Pack = Callable[..., archive.Archive]

LARGE = 5 * 1024 * 1024


LONG_S = 31 * 24 * 3600.0
"""Longer than the cache keeps an archive that nothing uses."""

# The beginning of scripts that run in other processes.
PACK = """
import json, os, pathlib, resource, signal, sys
from kinetic._packing import archive
def pack(cache):
    project = pathlib.Path("project")
    cache = pathlib.Path(cache).absolute()
    return archive.pack(project, exclude=(), cache=cache, environ={"HOME": "/nowhere"})
"""


COLLECT_MESSAGES = """
import json, logging, os, pathlib
messages = []
class Keep(logging.Handler):
    def emit(self, record): messages.append(record.getMessage())
logging.getLogger().addHandler(Keep())
"""


def fail_if_packed(done: int, total: int) -> None:
    assert not total, "it was packed again"


def test_the_archive_has_the_tree(tmp_path: Path, make: Make, pack: Pack) -> None:
    files = {"m.py": b"print()\n" * 99, "a/b.bin": random.Random(0).randbytes(LARGE), "e/": b""}
    files |= {"a/zeros": bytes(LARGE + 7), "empty": b"", "ünï/ço de": b"x"}
    root = make(tmp_path / "project", files)
    (root / "run.sh").touch(mode=0o755)
    (root / "run.sh").chmod(0o4755)
    (root / "e").chmod(0o750)
    packed = pack(root)
    found = contents(packed)
    assert found == {name: body for name, body in files.items() if name != "e/"} | {"run.sh": b""}
    assert packed.files == len(found)
    assert packed.size == packed.path.stat().st_size
    with zipfile.ZipFile(packed.path) as opened:
        modes = {info.filename: info.external_attr >> 16 for info in opened.infolist()}
        methods = {info.filename: info.compress_type for info in opened.infolist()}
    assert modes["run.sh"] == stat.S_IFREG | 0o755  # without the set-id bit
    assert modes["e/"] == stat.S_IFDIR | 0o750
    assert methods["a/b.bin"] == zipfile.ZIP_STORED
    assert methods["a/zeros"] == methods["m.py"] == zipfile.ZIP_DEFLATED
    assert stat.S_IMODE(packed.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(packed.path.parent.stat().st_mode) == 0o700


BODY = (
    st.binary(max_size=40)
    | st.integers(0, 3).map(lambda n: bytes(n * 20_000))
    | st.just(random.Random(1).randbytes(70_000))
)
NAME = st.text("aAbä._- 1", min_size=1, max_size=3).filter(lambda name: name.strip(".") != "")


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    files=st.dictionaries(st.tuples(NAME, NAME).map("/x".join), BODY, max_size=6),
    order=st.randoms(use_true_random=False),
)
def test_the_same_tree_gives_the_same_bytes(files: dict[str, bytes], order: random.Random) -> None:
    """The time, the place, and the order of writing the files don't matter."""
    with tempfile.TemporaryDirectory(prefix="kinetic-same-") as scratch:
        digests = set()
        for number in range(2):
            root = Path(scratch, f"{number}" * (number + 1))
            root.mkdir()
            for name in order.sample(sorted(files), len(files)):
                (root / name).parent.mkdir(exist_ok=True)
                (root / name).write_bytes(files[name])
                mtime = order.randrange(2**31)
                os.utime(root / name, (mtime, mtime))
            cache = Path(scratch, f"cache{number}")
            packed = archive.pack(root, exclude=(), cache=cache, environ={"HOME": scratch})
            digests.add((packed.digest, packed.path.read_bytes()))
            assert contents(packed) == files
        assert len(digests) == 1


def test_an_unchanged_tree_is_not_read_again(tmp_path: Path, make: Make, pack: Pack) -> None:
    root = make(tmp_path / "project", {"a/m.py": "1", "b": "2"})
    settle(root)
    first = pack(root)
    assert pack(root, progress=fail_if_packed) == first
    (root / "a/m.py").write_text("3")
    changed = pack(root)
    assert contents(changed)["a/m.py"] == b"3"
    (root / "a/m.py").write_text("1")
    settle(root)
    assert pack(root).digest == first.digest


def test_a_change_within_the_same_tick_is_not_missed(
    tmp_path: Path, make: Make, pack: Pack
) -> None:
    """Timestamps of a file system advance only every few milliseconds."""
    root = make(tmp_path / "project", {"m.py": "0"})
    for number in range(200):
        (root / "m.py").write_text(f"{number % 10}")
        assert contents(pack(root)) == {"m.py": f"{number % 10}".encode()}


def test_progress_counts_bytes_and_may_stop_the_packing(
    tmp_path: Path, make: Make, pack: Pack
) -> None:
    root = make(tmp_path / "project", {"a": bytes(LARGE), "b": b"x" * 10, "c": b""})
    progress: list[tuple[int, int]] = []
    pack(root, progress=lambda done, total: progress.append((done, total)))
    assert progress == sorted(progress)
    assert progress[-1] == (LARGE + 10, LARGE + 10)
    assert len(progress) > 3

    def interrupt(done: int, total: int) -> None:
        if total >= least:
            raise KeyboardInterrupt

    for least in (1, 0):  # 0: during the scan
        with pytest.raises(KeyboardInterrupt):
            pack(root, cache=tmp_path / f"other-{least}", progress=interrupt)
    assert [*(tmp_path / "other-1").iterdir()] == []
    assert not (tmp_path / "other-0").exists()


def test_data_and_files_of_kinetic_are_not_packed(tmp_path: Path, make: Make, pack: Pack) -> None:
    root = make(tmp_path / "project", {"m.py": "", "data/x": "", ".kinetic/local/key": "secret"})
    make(root, {"store/jobs/1/outcome": ""})
    environ = {
        "HOME": str(tmp_path),
        "KINETIC_HOME": str(root / ".kinetic"),
        "KINETIC_STORE": str(root / "store"),
    }
    packed = pack(root, root / "data", cache=root / "cache", environ=environ)
    assert names(packed) == ["m.py"]
    settle(root)
    again = pack(root, root / "data", cache=root / "cache", environ=environ)
    assert again.digest == packed.digest


def test_the_home_of_an_earlier_run_is_not_packed(tmp_path: Path, make: Make, pack: Pack) -> None:
    home = {"key": "secret", "local/v1/supervisor.log": "", "store/jobs/1/outcome": ""}
    root = make(tmp_path / "project", {f"tools/home/{name}": text for name, text in home.items()})
    make(root, {"m.py": "", "other/key": "", "other/local/x": ""})
    environ = {"HOME": str(tmp_path), "KINETIC_HOME": str(tmp_path / "now")}
    packed = names(pack(root, environ=environ))
    assert packed == ["m.py", "other/", "other/key", "other/local/", "other/local/x", "tools/"]


# --- errors ------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_a_damaged_archive_is_packed_again(
    damage: str, tmp_path: Path, make: Make, pack: Pack
) -> None:
    root = make(tmp_path / "project", {"m.py": "x" * 100})
    settle(root)
    first = pack(root)
    before = contents(first)
    if damage == "truncate":
        os.truncate(first.path, first.size - 10)
    else:
        first.path.unlink()
    again = pack(root)
    assert again == first
    assert contents(again) == before
    assert pack(root, progress=fail_if_packed) == first


@pytest.mark.parametrize(
    "cache", ["file", "file/cache", "/proc/kinetic"]
)  # the last fails even for root
def test_packing_works_without_a_usable_cache(
    cache: str, tmp_path: Path, make: Make, pack: Pack, python: Python
) -> None:
    root = make(tmp_path / "project", {"m.py": "x"})
    make(tmp_path, {"file": "", "tmp/": ""})
    script = f"""{PACK}{COLLECT_MESSAGES}
packed = pack({cache!r})
assert packed.path.exists()
print(json.dumps([packed.digest, messages]))
"""
    digest, messages = last_line(python("-c", script, cwd=tmp_path, TMPDIR=str(tmp_path / "tmp")))
    assert digest == pack(root).digest
    assert any("packs the project again" in message for message in messages)
    assert list((tmp_path / "tmp").iterdir()) == []


NO_SPACE = f"""{PACK}
from kinetic.errors import PackError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
try:
    pack("cache")
except PackError as exc:
    print(json.dumps([str(exc), os.listdir("cache")]))
"""


@pytest.mark.parametrize("disk", ["large", "small"])
def test_a_full_disk_is_an_error_and_leaves_no_file(tmp_path: Path, make: Make, disk: str) -> None:
    make(tmp_path / "project", {"m": random.Random(0).randbytes(300_000)})
    (tmp_path / "cache").mkdir()
    in_namespace: list[str] = []
    if disk == "small":  # full before the file reaches the limit of its size
        if programs.run("unshare", "-rm", "true").returncode:
            pytest.skip("no private mounts here")
        mount = "mount -t tmpfs -o size=128k tmpfs cache"
        in_namespace = ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    printed = programs.output(
        *in_namespace, sys.executable, "-c", NO_SPACE, cwd=tmp_path, env=environ
    )
    message, left = last_line(printed)
    assert "No space is left" in message
    assert "KINETIC_HOME" in message
    assert left == []


UNREADABLE = f"""{COLLECT_MESSAGES}
import sys, zipfile
from kinetic._packing import archive
root, cache = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
def fail_if_packed(done, total): assert not total, "it was packed again"
for progress in (None, fail_if_packed):
    packed = archive.pack(
        root, exclude=(), cache=cache, environ={{"HOME": "/x"}}, progress=progress
    )
print(json.dumps([str(packed.path), messages]))
"""


def test_unreadable_files_are_named_and_left_out(make: Make, python: Python) -> None:
    with tempfile.TemporaryDirectory(prefix="kinetic-read-") as scratch:
        os.chmod(scratch, 0o755)
        root = make(Path(scratch, "project"), {"m.py": "x", "key": "y", "closed/x": "z"})
        (root / "key").chmod(0)
        settle(root)
        (root / "closed").chmod(0)
        Path(scratch, "cache").mkdir(mode=0o777)
        Path(scratch, "cache").chmod(0o777)
        try:
            printed = python(
                "-c", UNREADABLE, str(root), str(Path(scratch, "cache")), cwd=Path(scratch)
            )
        finally:
            (root / "closed").chmod(0o700)
        path, messages = last_line(printed)
        with zipfile.ZipFile(path) as opened:
            assert opened.namelist() == ["closed/", "m.py"]
    assert any("key (Permission denied)" in message for message in messages)
    assert any("closed/ cannot be read" in message for message in messages)


def test_files_that_change_while_packed_do_not_damage_the_archive(
    tmp_path: Path, make: Make, pack: Pack
) -> None:
    """Files may grow, shrink, and vanish while they are read."""
    root = make(
        tmp_path / "project", {f"d{n}/f{m}": bytes(3000) for n in range(8) for m in range(30)}
    )
    make(root, {"big": bytes(2 * LARGE), "log": b""})
    stop = threading.Event()

    def disturb() -> None:
        rng = random.Random(3)
        while not stop.is_set():
            path = root / f"d{rng.randrange(8)}/f{rng.randrange(30)}"
            with contextlib.suppress(OSError):
                match rng.randrange(4):
                    case 0:
                        path.write_bytes(b"y" * rng.randrange(9000))
                    case 1:
                        path.unlink()
                    case 2:
                        os.truncate(root / "big", rng.randrange(2 * LARGE))
                    case _:
                        with (root / "log").open("ab") as log:
                            log.write(b"line\n" * 1000)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for _ in range(15):
            packed = pack(root)
            contents(packed)
            assert archive.ArchiveCache(packed.path.parent).find("nothing") is None
    finally:
        stop.set()
        thread.join()


def test_an_archive_of_files_that_changed_is_not_reused(
    tmp_path: Path, make: Make, pack: Pack, caplog: pytest.LogCaptureFixture
) -> None:
    root = make(tmp_path / "project", {"a": bytes(LARGE), "b": b"old"})
    settle(root)
    written: list[int] = []

    def change_b(done: int, total: int) -> None:
        if not written:  # the scan has seen b, whether or not it was read
            written.append((root / "b").write_bytes(b"new!"))

    pack(root, progress=change_b)
    assert written
    settle(root)
    assert contents(pack(root))["b"] == b"new!"


@pytest.mark.full
def test_packing_a_large_file_takes_little_memory(
    tmp_path: Path, make: Make, python: Python
) -> None:
    root = make(tmp_path / "project", {"m.py": ""})
    with (root / "noise").open("wb") as file:
        block = random.Random(0).randbytes(1 << 20)
        for _ in range(200):
            file.write(block)
    os.truncate(root / "noise", 300 << 20)
    script = f"""{PACK}
pack("cache")
if sys.platform == "darwin":
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 20)
else:  # ru_maxrss would include the peak of the parent process
    print(int(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) >> 10)
"""
    assert last_line(python("-c", script, cwd=tmp_path)) < 90


# --- concurrent packing --------------------------------------------------------------------


PACKS = f"""{PACK}
sys.stdin.readline()
for _ in range(12):
    pathlib.Path("project/m.py").touch()
    packed = pack("cache")
    assert packed.path.stat().st_size == packed.size
print(json.dumps(packed.digest))
"""


def test_processes_may_pack_the_same_tree_at_once(tmp_path: Path, make: Make, pack: Pack) -> None:
    root = make(tmp_path / "project", {"m.py": "x", "b": random.Random(0).randbytes(300_000)})
    with contextlib.ExitStack() as stack:
        packers = [stack.enter_context(Program("-c", PACKS, cwd=tmp_path)) for _ in range(3)]
        for packer in packers:
            packer.write_line("")
        digests = {packer.line() for packer in packers}
    assert digests == {json.dumps(pack(root).digest)}
    assert not list((tmp_path / "cache").glob("*.new"))


def test_the_draft_of_a_killed_packer_is_ignored(tmp_path: Path, make: Make, pack: Pack) -> None:
    root = make(tmp_path / "project", {"b": random.Random(0).randbytes(2 * LARGE)})
    script = PACKS.replace("sys.stdin.readline()", "print(flush=True)")
    script = script.replace("for _ in range(12):", "while True:")
    with Program("-c", script, cwd=tmp_path) as packer:
        packer.line()
        until(lambda: [*(tmp_path / "cache").glob("*.new")])
    assert contents(pack(root)) == {path.name: path.read_bytes() for path in root.iterdir()}


# --- the cache ------------------------------------------------------------------------------


def test_archives_unused_for_long_are_deleted(tmp_path: Path, make: Make, pack: Pack) -> None:
    root = make(tmp_path / "project", {"m.py": "1"})
    settle(root)
    old = pack(root)
    draft = archive.ArchiveCache(old.path.parent).make_draft()  # like that of a killed process
    long_ago = time.time() - LONG_S
    for path in (old.path, draft):
        os.utime(path, (long_ago, long_ago))
    (root / "m.py").write_text("2")
    settle(root)
    fresh = pack(root)
    assert [*old.path.parent.iterdir()] == [fresh.path]


def test_using_an_archive_renews_its_age(tmp_path: Path, make: Make, pack: Pack) -> None:
    root = make(tmp_path / "project", {"m.py": "1"})
    settle(root)
    path = pack(root).path
    long_ago = time.time() - LONG_S
    os.utime(path, (long_ago, long_ago))
    pack(root, progress=fail_if_packed)
    assert path.stat().st_mtime > time.time() - 60


def test_the_limit_of_the_cache_holds_except_for_what_a_packer_uses(
    tmp_path: Path, make: Make, pack: Pack
) -> None:
    environ = {"HOME": str(tmp_path), "KINETIC_CACHE_SIZE_MB": "0.5"}
    options: dict[str, Any] = {
        "exclude": (),
        "cache": tmp_path / "cache",
        "environ": environ,
    }
    with contextlib.closing(archive.Packer()) as packer:
        root = make(tmp_path / "used", {"m": random.Random(0).randbytes(200_000)})
        used = packer.pack(root, **options).archive
        for number in range(1, 5):
            content = random.Random(number).randbytes(200_000)
            last = pack(make(tmp_path / f"p{number}", {"m": content}), environ=environ)
            left = {*(tmp_path / "cache").iterdir()}
            assert {used.path, last.path} <= left
            assert sum(path.stat().st_size for path in left) < 500_000 + used.size
    pack(make(tmp_path / "p5", {"m": random.Random(5).randbytes(200_000)}), environ=environ)
    assert not used.path.exists()


# --- warnings and credentials ----------------------------------------------------------------


def test_files_that_look_like_secrets_are_named_once(
    tmp_path: Path, make: Make, pack: Pack, caplog: pytest.LogCaptureFixture
) -> None:
    secret = ["a/.env.local", "server.pem", "tls.key", "credentials.json"]
    plain = [".env.example", "id_rsa.pub", "keys.py", "environment.yml", "monkey.txt"]
    root = make(tmp_path / "project", dict.fromkeys([*secret, *plain], ""))
    assert {*secret, *plain} <= set(names(pack(root)))
    messages = [record.getMessage() for record in caplog.records]
    (message,) = (message for message in messages if "secrets" in message)
    assert all(name in message for name in secret)
    assert not any(name in message for name in plain)
    assert ".kineticignore" in message


def test_no_file_of_this_repository_looks_like_a_secret() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is not a clone")
    names = listed.stdout.splitlines()
    private = [name for name in names if looks_private(name.rpartition("/")[2])]
    assert private == [], "the README's first command would warn about them"


PEM = "-----BEGIN RSA " + "PRIVATE KEY-----\nMIIE\n"
ACCOUNT = '{"type": "service_account",\n "private_key": "..."}'
CREDENTIALS = {
    **dict.fromkeys([".env", "a/.env", ".netrc", "k/id_rsa", "k/id_ed25519_work", "id_dsa"], ""),
    "id_ecdsa": "",
    ".aws/credentials": "",
    "a/.ssh/config": "",
    "server.pem": PEM,
    "a/tls.key": "-----BEGIN CERTIFICATE-----\n" * 99 + PEM,
    "a/key.json": ACCOUNT,
    "id_rsa_alias.pem": PEM,
}
HARMLESS = {
    "id_rsa.pub": "",
    "id_rsa_reader.py": "",
    ".env.example": "",
    "notes.txt": PEM + ACCOUNT,
    "ca.pem": "-----BEGIN CERTIFICATE-----\n",
    "a/data.json": '{"private_key": 1}',
}


def test_credentials_are_not_packed_and_one_warning_names_them(
    tmp_path: Path, make: Make, pack: Pack, caplog: pytest.LogCaptureFixture
) -> None:
    root = make(tmp_path / "project", CREDENTIALS | HARMLESS)
    (root / "settings").symlink_to(".env")
    (root / "ssh").symlink_to("a/.ssh")
    environ = {"HOME": str(tmp_path), "KINETIC_NO_DEFAULT_EXCLUDES": "1"}
    packed = pack(root, environ=environ)
    assert {name for name in names(packed) if not name.endswith("/")} == set(HARMLESS)
    assert packed.files == len(HARMLESS)
    messages = [record.getMessage() for record in caplog.records]
    (warning,) = (message for message in messages if "they are cred" in message)
    assert ".aws/, .env, .netrc, a/.env, a/.ssh/, a/key.json, a/tls.key" in warning
    assert "server.pem" not in "".join(message for message in messages if message is not warning)


def test_kineticignore_can_include_credentials(
    tmp_path: Path, make: Make, pack: Pack, caplog: pytest.LogCaptureFixture
) -> None:
    root = make(tmp_path / "project", CREDENTIALS)
    lines = [f"!{name}" for name in [*CREDENTIALS, ".aws", ".ssh"]]
    # The rules exclude their own file, so no packed file shows that they change.
    rules = root / ".kineticignore"
    rules.write_text(".kineticignore\n")
    assert names(pack(root)) == ["a/", "k/"]
    rules.write_text("\n".join([".kineticignore", *lines]))
    caplog.clear()
    assert set(CREDENTIALS) <= set(names(pack(root)))
    assert "they are cred" not in caplog.text
    rules.write_text("\n".join([".kineticignore", *(line for line in lines if "pem" not in line)]))
    assert "server.pem" not in names(pack(root))


def test_a_credential_that_kineticignore_lists_gives_no_warning(
    tmp_path: Path, make: Make, pack: Pack, caplog: pytest.LogCaptureFixture
) -> None:
    root = make(tmp_path / "project", {".env": "", "m.py": "", ".kineticignore": ".env\n"})
    assert names(pack(root)) == [".kineticignore", "m.py"]
    assert not caplog.records


def test_the_warning_of_a_large_project_names_its_largest_files(
    tmp_path: Path, make: Make, pack: Pack, caplog: pytest.LogCaptureFixture
) -> None:
    root = make(tmp_path / "project", {f"f{n}": bytes(100_000 * n) for n in range(1, 8)})
    environ = {"HOME": str(tmp_path), "KINETIC_CONTEXT_SIZE_WARN_MB": "2.7"}
    pack(root, environ=environ)
    (record,) = caplog.records
    message = record.getMessage()
    assert "2.8 MB" in message
    assert "Largest: f7 (700 kB), f6 (600 kB), f5 (500 kB), f4 (400 kB), f3 (300 kB)." in message
    caplog.clear()
    pack(root, cache=tmp_path / "c2", environ=environ | {"KINETIC_CONTEXT_SIZE_WARN_MB": "2.9"})
    assert not caplog.records
    with pytest.raises(ConfigurationError, match="KINETIC_CONTEXT_SIZE_WARN_MB"):
        bad = environ | {"KINETIC_CONTEXT_SIZE_WARN_MB": "many"}
        pack(root, cache=tmp_path / "c3", environ=bad)
