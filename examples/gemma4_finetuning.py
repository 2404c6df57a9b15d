"""Fine-tune Gemma 4 with LoRA, using KerasHub on JAX.

    python examples/gemma4_finetuning.py                       a tiny stand-in on this machine
    python examples/gemma4_finetuning.py gemma4_instruct_2b    the real weights, from Kaggle

The job saves only the LoRA weights. To fine-tune the real model, set ACCELERATOR, and set
KAGGLE_USERNAME and KAGGLE_KEY in the environment.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

import kinetic

ACCELERATOR = "cpu"  # or "tpu-v6e-8", "gpu-a100-80gb"
STAND_IN = "stand-in"
COLORS = {"grass": "green", "the sky": "blue", "snow": "white", "coal": "black", "blood": "red"}
QUESTIONS = [f"What color is {thing}?" for thing in COLORS]
ANSWERS = [f" It is {color}." for color in COLORS.values()]


def build_stand_in() -> Any:
    """Build a tiny Gemma 4 with random weights, and a vocabulary of the questions."""
    import sentencepiece
    from keras_hub import models

    pieces = {"pad_piece": "<pad>", "eos_piece": "<eos>", "bos_piece": "<bos>"}
    ids = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
    options = {"hard_vocab_limit": False, "minloglevel": 2, **pieces, **ids}
    texts, vocabulary = iter(QUESTIONS + ANSWERS), io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=texts, model_writer=vocabulary, **options
    )
    flags = {"has_vision_tokens": False, "has_video_tokens": False}
    tokenizer = models.Gemma4Tokenizer(vocabulary.getvalue(), **flags)
    size = {"num_layers": 2, "num_query_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    width = {"hidden_dim": 32, "intermediate_dim": 64, "image_size": 16}
    backbone = models.Gemma4Backbone(tokenizer.vocabulary_size(), **size, **width)
    return models.Gemma4CausalLM(models.Gemma4CausalLMPreprocessor(tokenizer), backbone)


@kinetic.run(accelerator=ACCELERATOR, capture_env_vars=["KAGGLE_USERNAME", "KAGGLE_KEY"])
def finetune(preset: str, epochs: int) -> dict[str, Any]:
    """Teach the model the answers, and save what it learned with the job's output files."""
    import keras
    from keras_hub.models import Gemma4CausalLM

    if preset == STAND_IN:
        model = build_stand_in()
    else:
        model = Gemma4CausalLM.from_preset(preset, dtype="bfloat16")
    model.preprocessor.sequence_length = 64
    model.backbone.enable_lora(rank=8)
    model.compile(
        optimizer=keras.optimizers.AdamW(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        sampler="greedy",
    )
    data = {"prompts": QUESTIONS, "responses": ANSWERS}
    losses = model.fit(data, batch_size=1, epochs=epochs, verbose=2).history["loss"]
    output = Path(os.environ["KINETIC_OUTPUT_PATH"])
    model.backbone.save_lora_weights(str(output / "gemma.lora.h5"))
    return {"losses": losses, "answer": model.generate(QUESTIONS[0], max_length=32)}


def main(preset: str = STAND_IN) -> None:
    job = finetune.run_async(preset, epochs=3)
    result = job.result(stream_logs=True)
    print(f"loss {result['losses'][0]:.3f} -> {result['losses'][-1]:.3f}: {result['answer']}")
    print("saved", *job.outputs(), "in", job.output_dir)


if __name__ == "__main__":
    main(*sys.argv[1:])
