"""Peak memory of a posterior over LoRA adapters, beside that of the frozen network and of a training step.

    python benchmarks/lora_memory.py [--width 768] [--layers 4]

Every row is a process of its own; its peak is `getrusage(RUSAGE_SELF).ru_maxrss`, less that of the imports.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys

STEPS = ("imports", "forward", "training step", "fit diag", "fit lowrank", "fit kron", "predict kron", "fit rank 32",
         "predict rank 32")  # fmt: skip
LENGTH, BATCH, EXAMPLES = 32, 8, 32


def peak() -> float:
    """Return the peak of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(step: str, width: int, layers: int) -> dict[str, float]:
    """Do one step, and return the peak of memory and what is kept, in MB."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2ForSequenceClassification

    from laplace import Laplace
    from laplace.structures import Kron

    torch.manual_seed(0)
    before, result = peak(), {}
    if step != "imports":
        config = GPT2Config(vocab_size=5000, n_positions=LENGTH, n_embd=width, n_layer=layers, n_head=4, pad_token_id=0)
        config.num_labels = 2
        base = GPT2ForSequenceClassification(config)
        adapters = LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True)
        model = get_peft_model(base, adapters).eval()
        result["network"] = sum(p.nbytes for p in model.parameters()) / 2**20
        result["adapters"] = sum(p.nbytes for p in model.parameters() if p.requires_grad) / 2**20
        ids = torch.randint(1, 5000, (EXAMPLES, LENGTH))
        data = [{"input_ids": x, "labels": torch.arange(BATCH) % 2} for x in ids.split(BATCH)]
        if step == "forward":
            with torch.no_grad():
                model(**data[0])
        elif step == "training step":
            model(**data[0]).loss.backward()
        else:
            structure = Kron(rank=32) if "rank" in step else step.split()[1]
            la = Laplace(model, "classification", "all", structure).fit(data)
            result["factors"] = sum(t.nbytes for t in la.posterior.fit.sums.values()) / 2**20
            if step.startswith("predict"):
                la(**data[0])
    return {"peak": peak() - before, **result}


def main(width: int, layers: int) -> None:
    print(
        f"GPT-2 of width {width}, {layers} layers; LoRA of rank 8 on c_attn; batches of {BATCH} x {LENGTH} tokens; MB\n"
    )
    print(f"{'':16} {'peak':>7} {'network':>8} {'adapters':>9} {'factors':>8}")
    for step in STEPS[1:]:
        command = [sys.executable, __file__, "--step", step, "--width", str(width), "--layers", str(layers)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        print(
            f"{step:16} {found['peak']:7.0f} {found['network']:8.0f} {found['adapters']:9.2f}"
            f" {found.get('factors', 0):8.1f}",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--step", choices=STEPS)
    options = parser.parse_args()
    if options.step:
        print(json.dumps(run(options.step, options.width, options.layers)))
    else:
        main(options.width, options.layers)
