"""Fine-tune a language model of the Hugging Face Hub with LoRA, at several learning rates.

    python examples/llm_finetuning.py                 a tiny stand-in on this machine
    python examples/llm_finetuning.py Qwen/Qwen3-0.6B the real model, from the Hub

Each learning rate is an item of a batch. Each job saves its adapter with its output files. For a
model that needs a login, set HF_TOKEN in the environment.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import kinetic

ACCELERATOR = "cpu"  # or "gpu-l4", "gpu-a100"
STAND_IN = "stand-in"
TEXTS = [f"{a} plus {b} is {a + b}." for a in range(5) for b in range(5)]


def load_model(name: str) -> tuple[Any, Any]:
    """Return model and tokenizer; the stand-in reads bytes, and has random weights."""
    import transformers

    if name != STAND_IN:
        model = transformers.AutoModelForCausalLM.from_pretrained(name)
        return model, transformers.AutoTokenizer.from_pretrained(name)
    tokenizer = transformers.ByT5Tokenizer()
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": len(tokenizer)}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, **heads)), tokenizer


@kinetic.run(accelerator=ACCELERATOR, capture_env_vars=["HF_TOKEN"])
def finetune(name: str, rate: float, epochs: int) -> dict[str, float]:
    """Train the adapter of one learning rate; return its first and last mean loss."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_model(name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(model, lora).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    tokens = tokenizer(TEXTS, padding=True, return_tensors="pt").to(device)
    labels = tokens["input_ids"].masked_fill(tokens["attention_mask"] == 0, -100)

    losses: list[float] = []
    for epoch in range(epochs):
        loss = model(**tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(f"rate {rate}, epoch {epoch}: loss {losses[-1]:.4f}")
    model.save_pretrained(Path(os.environ["KINETIC_OUTPUT_PATH"], "adapter"))
    return {"first": losses[0], "last": losses[-1]}


def main(name: str = STAND_IN) -> None:
    calls = [{"name": name, "rate": rate, "epochs": 10} for rate in (1e-3, 1e-2)]
    with finetune.run_async_map(calls, name="llm", retries=1) as batch:
        for index, call, outcome in batch.outcomes(ordered=True):
            losses = outcome.unwrap()
            print(f"rate {call['rate']}: loss {losses['first']:.4f} -> {losses['last']:.4f}")
            print("saved", *batch.job(index).outputs())


if __name__ == "__main__":
    main(*sys.argv[1:])
