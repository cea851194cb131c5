"""How long does a decoding step take, plain and with n drafted tokens, launched and as a captured graph?

Random weights of a real shape: the time of a step does not depend on what is accepted, so `break_even_tau` (a step's
time over a plain step's) says what acceptance length a drafter must pass to be worth it. Each kind of step is warmed
up by one whole answer; then all kinds are timed in turn, round after round, in this process. On CUDA the captured
steps must give the tokens that the launched ones give.

    python bench/decode.py --shape qwen3-8b             on a GPU, about two minutes
    python bench/decode.py --shape tiny --device cpu    anywhere, seconds
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from draftmill.config import DrafterConfig
from draftmill.drafter.network import Drafter
from draftmill.drafter.rope import Rotary
from draftmill.drafter.shape import shape_for
from draftmill.evaluate.decode import Decoder
from draftmill.evaluate.run import default_draft_tokens
from draftmill.target.generate_sampling import Sampling
from draftmill.target.model import Target

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 1000,
    },
    "qwen3-1.7b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
}


def build(shape: str, device: str, dtype: torch.dtype, block_size: int) -> tuple[Target, Drafter]:
    """A random target of this shape and a random drafter of five layers and five taps (tiny: two and two)."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", max_position_embeddings=40960, **SHAPES[shape])
    few = shape == "tiny"
    settings = DrafterConfig(num_layers=2 if few else 5, num_taps=2 if few else 5, block_size=block_size)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        drafter = Drafter(shape_for(config, settings, mask_token_id=SHAPES[shape]["vocab_size"] - 1)).to(dtype)
    drafter.rotary = Rotary(drafter.shape).to(device)
    return Target(model), drafter.eval().requires_grad_(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()

    cuda = torch.device(arguments.device).type == "cuda"
    target, drafter = build(arguments.shape, arguments.device, getattr(torch, arguments.dtype), arguments.block_size)
    vocabulary = SHAPES[arguments.shape]["vocab_size"]
    prompt = [(7919 * index + 11) % (vocabulary - 1) for index in range(arguments.prompt_tokens)]
    sampling = Sampling(max_new_tokens=arguments.new_tokens, temperature=arguments.temperature)
    counts = (0, *default_draft_tokens(arguments.block_size))
    decoders = {"launched": Decoder(target, drafter, graphs="off")}
    if cuda:
        decoders["captured"] = Decoder(target, drafter, graphs="on")

    kinds = [(how, count) for count in counts for how in decoders]
    tokens: dict[tuple[str, int], list[int]] = {}
    times: dict[tuple[str, int], list[float]] = {kind: [] for kind in kinds}
    for how, count in kinds:
        tokens[how, count] = decoders[how].generate(prompt, num_drafts=count, sampling=sampling).tokens
        print(f"warmed up: {how}, {count} drafted", flush=True)
    for _ in range(arguments.rounds):
        for how, count in kinds:
            response = decoders[how].generate(prompt, num_drafts=count, sampling=sampling)
            times[how, count].append(1000.0 * response.decode_s / len(response.steps))

    rows = []
    for how, count in kinds:
        step_ms, plain_ms = statistics.median(times[how, count]), statistics.median(times[how, 0])
        rows.append(
            {
                "steps": how,
                "drafted": count,
                "step_ms": round(step_ms, 3),
                "least_ms": round(min(times[how, count]), 3),
                "most_ms": round(max(times[how, count]), 3),
                "break_even_tau": round(step_ms / plain_ms, 3),
            }
        )
        print(f"{how:9} {count:3} drafted: {step_ms:8.3f} ms a step, worth it above tau {step_ms / plain_ms:.2f}")
    result = {
        "bench": "decode",
        "shape": arguments.shape,
        "dtype": arguments.dtype,
        "block_size": arguments.block_size,
        "prompt_tokens": arguments.prompt_tokens,
        "new_tokens": arguments.new_tokens,
        "temperature": arguments.temperature,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
        "captured_equals_launched": [tokens["captured", n] == tokens["launched", n] for n in counts] if cuda else None,
        "drafted_equals_plain": [tokens["launched", n] == tokens["launched", 0] for n in counts[1:]],
        "rows": rows,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
