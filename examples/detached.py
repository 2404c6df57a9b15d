"""Submit a job, end the script, and collect the result from another process.

python examples/detached.py                 both steps, the second in a new process
python examples/detached.py submit          prints a job ID and ends
python examples/detached.py collect JOB_ID  later, from any terminal
"""

from __future__ import annotations

import subprocess
import sys

import kinetic


@kinetic.run(backend="local", accelerator="cpu")
def count_primes(limit: int) -> int:
    """Sieve the numbers below *limit*. The job continues while nothing waits for it."""
    sieve = bytearray([1]) * limit
    sieve[:2] = b"\0\0"
    for n in range(2, int(limit**0.5) + 1):
        sieve[n * n :: n] = bytes(len(range(n * n, limit, n)))
    print(f"sieved {limit:,} numbers")
    return sum(sieve)


def submit() -> str:
    return count_primes.run_async(5_000_000).job_id


def collect(job_id: str) -> None:
    job = kinetic.attach(job_id)
    print(f"{job_id} is {job.status().value}")
    print(f"{job.result(cleanup=False):,} primes; the end of its log:")
    print(job.tail())
    job.cleanup()


def main() -> None:
    match sys.argv[1:]:
        case []:
            job_id = submit()
            print(f"submitted {job_id}; a new process collects it")
            subprocess.run([sys.executable, __file__, "collect", job_id], check=True)
        case ["submit"]:
            print(submit())
        case ["collect", job_id]:
            collect(job_id)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
