"""The zip writer, read back by others."""

from __future__ import annotations

import contextlib
import io
import shutil
import subprocess
import zipfile
import zlib
from pathlib import Path

import pytest

from kinetic._pack.zipped import DEFLATED, STORED, ZipWriter


def opened(sink: io.BytesIO) -> zipfile.ZipFile:
    return zipfile.ZipFile(io.BytesIO(sink.getvalue()))


def add(writer: ZipWriter, name: str, data: bytes, mode: int = 0o644) -> None:
    writer.file(name, mode, data, method=STORED, crc=zlib.crc32(data), size=len(data))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    sink = io.BytesIO()
    writer = ZipWriter(sink)
    writer.directory("empty/", 0o40750)
    add(writer, "naïve/näme.txt", "ä".encode(), 0o100755)
    squeezed = zlib.compressobj(1, zlib.DEFLATED, -15)
    writer.begin("big", 0o600, method=DEFLATED, size=6000)
    writer.block(squeezed.compress(b"abc" * 1000))
    writer.block(squeezed.compress(b"xyz" * 1000) + squeezed.flush())
    writer.end(crc=zlib.crc32(b"abc" * 1000 + b"xyz" * 1000), size=6000)
    writer.close()
    with opened(sink) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == ["empty/", "naïve/näme.txt", "big"]
        assert archive.read("big") == b"abc" * 1000 + b"xyz" * 1000
        modes = [oct(one.external_attr >> 16) for one in archive.infolist()]
        assert modes == ["0o40750", "0o100755", "0o100600"]
        assert {one.create_system for one in archive.infolist()} == {3}
        assert {one.date_time for one in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert archive.infolist()[0].is_dir()
    if (unzip := shutil.which("unzip")) is not None:
        (tmp_path / "x.zip").write_bytes(sink.getvalue())
        subprocess.run([unzip, "-tqq", str(tmp_path / "x.zip")], check=True)


@pytest.mark.parametrize("count", [0, 65_534, 65_535])
def test_any_number_of_files_fits(count: int) -> None:
    sink = io.BytesIO()
    writer = ZipWriter(sink)
    for number in range(count):
        add(writer, f"{number:x}", b"")
    writer.close()
    with opened(sink) as archive:
        assert len(archive.namelist()) == count


class Hole(bytes):
    """Five gigabytes of nothing."""

    def __len__(self) -> int:
        return 5 << 30


class Sparse:
    """A file in which holes take no space."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def write(self, data: bytes, /) -> None:
        if isinstance(data, Hole):
            self._file.seek(len(data), io.SEEK_CUR)
        else:
            self._file.write(data)

    def close(self) -> None:
        self._file.close()


def test_files_and_archives_of_more_than_four_gigabytes_are_read(tmp_path: Path) -> None:
    with contextlib.closing(Sparse(tmp_path / "x.zip")) as sink:
        writer = ZipWriter(sink)
        writer.begin("huge", 0o644, method=STORED, size=5 << 30)
        writer.block(Hole())
        writer.end(crc=7, size=5 << 30)
        add(writer, "after", b"x")
        writer.close()
    with zipfile.ZipFile(tmp_path / "x.zip") as archive:
        assert [one.file_size for one in archive.infolist()] == [5 << 30, 1]
        assert archive.read("after") == b"x"
        with archive.open("huge") as huge:
            assert huge.read(10) == bytes(10)
