"""Find the learning rate and the number of epochs with the lowest loss; each trial is a process.

    python examples/sweep.py

A trial fits a line to points in plain Python, so this example needs kinetic and nothing else.
Press Ctrl-C to stop the sweep: kinetic ends every running trial.
"""

import kinetic
from kinetic.sweeps import Choice, GridSearch


@kinetic.run(accelerator="cpu")  # on this machine, until you have a cluster
def loss(rate: float, epochs: int) -> float:
    points = [(n / 1000, n / 500 + n % 7 / 10) for n in range(1000)]
    slope = bias = 0.0
    for x, y in points * epochs:
        error = slope * x + bias - y
        slope, bias = slope - rate * error * x, bias - rate * error
    return round(sum((slope * x + bias - y) ** 2 for x, y in points) / len(points), 7)


space = {"rate": Choice([0.001, 0.01, 0.1]), "epochs": Choice([1, 10, 100, 1000])}
with loss.sweep(GridSearch(space), trials=None) as sweep:  # one job per trial
    for trial in sweep:  # each trial when it ends
        print(trial.value, trial.params)
print("best:", sweep.best.params)
