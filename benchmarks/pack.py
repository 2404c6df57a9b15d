"""How long does it take to pack a project of 2,000 files and 200 MB?

Seconds of wall time, and the ratio to the standard library's `zipfile` with
deflate at its default level on the same tree, in the same run. Targets: cold
at most 0.4, unchanged at most 0.02; more is a regression.
"""

from __future__ import annotations

import random
import resource
import statistics
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from benchmarks import figures
from kinetic._packing import archive

MB = 1_000_000


def make_tree(root: Path) -> tuple[int, int]:
    """Write sources, machine code, pictures, tables, and weights; return the files and bytes."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlu_", k=rng.randint(2, 11))) for _ in range(4000)]
    count = 0

    def add(name: str, content: bytes) -> None:
        nonlocal count
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        count += 1

    for number in range(1860):
        line = "    " + " = ".join(rng.choices(words, k=4)) + f"({number})\n"
        lines = [
            line if row % 9 else " ".join(rng.choices(words, k=9)) + "\n" for row in range(240)
        ]
        add(f"package{number % 40:02}/module{number:04}.py", "".join(lines).encode()[:12_900])
    for number in range(20):
        code = b"".join(
            rng.randbytes(6) + words[rng.randrange(4000)].encode() + bytes(rng.randrange(9))
            for _ in range(75_000)
        )
        add(f"native/library{number}.so", code[: int(1.2 * MB)])
    for number in range(80):
        add(f"pictures/{number:03}.png", rng.randbytes(int(0.6 * MB)))
    for number in range(20):
        rows = [f"{row},{rng.random():.6f},{rng.choice(words)}\n" for row in range(56_000)]
        add(f"tables/{number:02}.csv", "".join(rows).encode()[: int(1.5 * MB)])
    for number in range(20):
        add(f"weights/{number:02}.f32", weights(rng, int(3.7 * MB)))
    size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    return count, size


def weights(rng: random.Random, size: int) -> bytes:
    """Return bytes like those of float32 numbers around zero: three of four are noise."""
    noise = bytearray(rng.randbytes(size))
    noise[3::4] = bytes(rng.choices((0x3C, 0x3D, 0xBC, 0xBD), k=len(noise[3::4])))
    return bytes(noise)


def pack_by_zipfile(root: Path, target: Path) -> int:
    """Pack by the standard library, for comparison."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive_file:
        for path in sorted(root.rglob("*")):
            archive_file.write(path, path.relative_to(root))
    return target.stat().st_size


def measure(work: Callable[[], int]) -> tuple[float, float, int]:
    """Return the wall seconds, the processor seconds, and the value of *work*."""
    wall, cpu = time.perf_counter(), time.process_time()
    size = work()
    return time.perf_counter() - wall, time.process_time() - cpu, size


def main() -> None:
    """Print the table."""
    rounds = figures.effort(__doc__, full=3, quick=1).rounds
    with tempfile.TemporaryDirectory(prefix="kinetic-bench-") as scratch:
        root = Path(scratch, "project")
        files, size = make_tree(root)
        measurements: dict[str, list[tuple[float, float, int]]] = {}
        for number in range(rounds):
            cache = Path(scratch, f"cache{number}")

            def pack_project(cache: Path = cache) -> int:
                return archive.pack(
                    root, exclude=(), cache=cache, environ={"KINETIC_CONTEXT_SIZE_WARN_MB": "1000"}
                ).size

            target = Path(scratch, f"{number}.zip")
            for name, work in {
                "zipfile, deflate 6": lambda target=target: pack_by_zipfile(root, target),
                "kinetic, cold": pack_project,
                "kinetic, unchanged": pack_project,
            }.items():
                measurements.setdefault(name, []).append(measure(work))
    figures.caption(f"{files} files, {size / MB:.0f} MB, {rounds} rounds")
    figures.head("", "median s", "min s", "cpu s", "MB", "x zipfile")
    base = statistics.median(wall for wall, _, _ in measurements["zipfile, deflate 6"])
    for name, runs in measurements.items():
        wall = [run[0] for run in runs]
        median = statistics.median(wall)
        cpu = statistics.median(run[1] for run in runs)
        cells = [f"{median:.3f}", f"{min(wall):.3f}", f"{cpu:.2f}", f"{runs[0][2] / MB:.1f}"]
        figures.row(name, *cells, f"{median / base:.3f}")
    unit = 1024 if sys.platform != "darwin" else 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    print(f"peak memory of the process: {peak / MB:.0f} MB")


if __name__ == "__main__":
    main()
