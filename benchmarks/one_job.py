"""One job without a library: a pickled call in, a pickled result renamed into place.

``python one_job.py CALL RESULT`` is the fresh interpreter per job; the bare
fork server calls `run` in a fork. The call holds the function as bytes that
cloudpickle made, with its code, because any tool for arbitrary functions needs that.
"""

from __future__ import annotations

import os
import pickle
import sys


def run(call: str, result: str) -> None:
    """Carry out the call in one file and leave its value in another."""
    with open(call, "rb") as file:
        function, arguments = pickle.load(file)
    value = pickle.loads(function)(*arguments)
    with open(result + ".tmp", "wb") as file:
        pickle.dump(value, file)
    os.rename(result + ".tmp", result)


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2])
