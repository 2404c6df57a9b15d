"""Generate text with vLLM: one job for each part of the prompts.

    python examples/vllm_inference.py

vLLM needs an accelerator and a large installation. Give this script a folder with a
requirements.txt that names vllm, so that only its image contains it.
"""

from __future__ import annotations

import kinetic

ACCELERATOR = "gpu-l4"  # "tpu-v6e-1" with vllm-tpu
MODEL = "Qwen/Qwen3-0.6B"
PROMPTS = [f"Write one sentence about the number {number}." for number in range(1000)]
PROMPTS_PER_JOB = 250


@kinetic.run(accelerator=ACCELERATOR, capture_env_vars=["HF_TOKEN"], timeout=3600)
def generate(prompts: list[str]) -> list[str]:
    """Load the model once, and answer all prompts; vLLM batches them."""
    from vllm import LLM, SamplingParams

    model = LLM(MODEL, max_model_len=2048)
    answers = model.generate(prompts, SamplingParams(temperature=0.7, max_tokens=64))
    return [answer.outputs[0].text.strip() for answer in answers]


def main() -> None:
    starts = range(0, len(PROMPTS), PROMPTS_PER_JOB)
    parts = [PROMPTS[start : start + PROMPTS_PER_JOB] for start in starts]
    # input_mode="single": each list is one argument.
    with generate.run_async_map(parts, input_mode="single", retries=1, name="vllm") as batch:
        for _, prompts, outcome in batch.outcomes(ordered=True):
            for prompt, answer in zip(prompts, outcome.unwrap(), strict=True):
                print(f"{prompt} {answer}")


if __name__ == "__main__":
    main()
