"""Train a Keras model on JAX. A later attempt continues after the last finished epoch.

    python examples/keras_training.py [EPOCHS] [SAMPLES]

With ACCELERATOR = "cpu", the job runs on this machine. Change it to run on a cluster.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

import kinetic

ACCELERATOR = "cpu"  # or "gpu-l4", "tpu-v6e-1"


def draw_images(count: int, seed: int) -> tuple[Any, Any]:
    """Draw noisy images of squares (class 0), crosses (1), and stripes (2)."""
    rng = np.random.default_rng(seed)
    images = rng.normal(0, 0.3, (count, 28, 28, 1)).astype("float32")
    labels = rng.integers(0, 3, count)
    for image, label, (row, column) in zip(
        images, labels, rng.integers(2, 14, (count, 2)), strict=True
    ):
        patch = image[row : row + 12, column : column + 12]
        match label:
            case 0:
                patch[[0, -1], :], patch[:, [0, -1]] = 1, 1
            case 1:
                patch[5:7, :], patch[:, 5:7] = 1, 1
            case _:
                patch[::3, :] = 1
    return images, labels


@kinetic.run(accelerator=ACCELERATOR)
def train(epochs: int, samples: int) -> dict[str, object]:
    """Fit a small convolutional network, and save it with the job's output files."""
    import keras

    output = Path(os.environ["KINETIC_OUTPUT_PATH"])
    model = keras.Sequential(
        [
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.GlobalMaxPooling2D(),
            keras.layers.Dense(3),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.003), loss, metrics=["accuracy"])
    images, labels = draw_images(samples, seed=1)
    model.build(images.shape)
    backup = keras.callbacks.BackupAndRestore(output / "backup")
    model.fit(images, labels, epochs=epochs, callbacks=[backup], verbose=2)
    model.save(output / "model.keras")
    _, accuracy = model.evaluate(*draw_images(1000, seed=2), verbose=0)
    return {"backend": keras.backend.backend(), "accuracy": round(float(accuracy), 3)}


def main(epochs: int = 3, samples: int = 3000) -> None:
    job = train.run_async(epochs, samples)
    print(job.result(stream_logs=True))
    print("saved", *job.outputs(), "in", job.output_dir)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
