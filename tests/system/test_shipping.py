"""What a program ships while files grow beside it: counts of archives, bytes, and warnings."""

from __future__ import annotations

from pathlib import Path

from tests.scripts import Script

CALLS, WORKERS, LARGE = 24, 4, 3_000_000

SEARCH = f"""
import asyncio, csv, json, os, pathlib, random, sys
import kinetic

@kinetic.run(backend="local", accelerator="cpu")
def trial(number):
    rows = pathlib.Path("results.csv").read_text().split()
    return (
        str(number) in rows,
        json.loads(pathlib.Path(f"outputs/{{number}}/config.json").read_text()),
        pathlib.Path(f"pending.{{number - 1}}").exists(),
        len(pathlib.Path("data.bin").read_bytes()),
    )

async def work(client, numbers):
    for number in numbers:
        with open("results.csv", "a") as results:
            results.write(f"{{number}}\\n")
        with open("study.journal", "a") as journal:
            journal.write(json.dumps({{"number": number, "state": "x" * 200}}) + "\\n")
        run = pathlib.Path(f"outputs/{{number}}")
        run.mkdir(parents=True)
        (run / "config.json").write_text(json.dumps(number))
        pathlib.Path(f"pending.{{number}}").touch()
        found = await client.run(trial, number)
        assert found == (True, number, False, {LARGE}), found
        os.remove(f"pending.{{number}}")

async def main():
    numbers = iter(range(1, {2 * CALLS}, 2))
    async with kinetic.aio.Client(backend="local") as client, asyncio.TaskGroup() as group:
        for _ in range({WORKERS}):
            group.create_task(work(client, numbers))

if __name__ == "__main__":
    pathlib.Path("data.bin").write_bytes(random.Random(0).randbytes({LARGE}))
    asyncio.run(main())
"""


def sizes(folder: Path, pattern: str) -> list[int]:
    return [path.stat().st_size for path in folder.glob(pattern) if path.is_file()]


def test_files_that_grow_beside_a_search_ship_alone(home: Path, tmp_path: Path) -> None:
    with Script(SEARCH, folder=tmp_path) as search:
        status, _, errors = search.end()
    assert status == 0, errors
    warnings = [line for line in errors.splitlines() if line]
    assert len(warnings) <= 2, "at most that the two files changed while they were packed"
    (archive,) = sizes(home / "store" / "code", "*.zip")
    overlays = sizes(home / "store" / "code", "*.overlay")
    assert LARGE < archive < 1.1 * LARGE
    assert 1 <= len(overlays) <= CALLS
    assert sum(overlays) < 0.2 * LARGE
    assert len(sizes(home / "cache" / "pack", "*")) == 1
    assert len([*(home / "cache" / "code").iterdir()]) == 1, "it is unpacked once"
