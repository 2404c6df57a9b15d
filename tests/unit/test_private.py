"""Folders that only this user can access."""

import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from kinetic._runner.protocol import private


def test_another_thread_may_remove_an_empty_parent_at_any_time(tmp_path: Path) -> None:
    parent, stop = tmp_path / "outputs", threading.Event()

    def remove_parent() -> None:
        while not stop.is_set():
            with suppress(OSError):
                parent.rmdir()

    remover = threading.Thread(target=remove_parent)
    remover.start()
    try:
        for number in range(50):
            private.make_folder(parent / str(number))
            os.rmdir(parent / str(number))
    finally:
        stop.set()
        remover.join()


def test_a_dangling_link_in_a_path_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    with pytest.raises(FileExistsError):
        private.make_folder(tmp_path / "link" / "folder")
