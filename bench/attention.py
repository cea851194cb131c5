"""Which tiling of flex attention's kernels is fastest under the drafter's mask, forward and backward?

One layer's attention at Qwen3-8B's shape on the workloads of bench/step.py. A contender is a set of kernel options;
`default` is the compiler's own choice. `repeated` gives every query head a key head of its own, which balances the
backward kernel's work at the price of a copy. Several processes may share the list (`--part 0/4`), so that one
compiles while another measures; the times are the smallest of `--repeats`.

    PYTHONPATH=src python bench/attention.py --size 1x3072 --part 0/1
    PYTHONPATH=src python bench/attention.py --tiny        (on a CPU: that the script works)
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from typing import Any

import torch
from torch.nn.attention.flex_attention import flex_attention

from draftmill.drafter.attention import dense_attention
from draftmill.drafter.mask import TileLists
from draftmill.records import Blocks
from draftmill.step.bench import on_own_stream, pick_device, wait_for
from draftmill.step.workload import random_blocks, slots_for
from step import QWEN3_8B, SIZES, TINY, TINY_SIZES

Options = dict[str, Any]


def contenders() -> list[tuple[str, bool, Options]]:
    """Name, whether key heads are repeated, and the kernel's options."""
    found: list[tuple[str, bool, Options]] = [("default", False, {}), ("default repeated", True, {})]
    tiles = [(64, 128, 128, 64), (64, 64, 64, 64), (32, 128, 128, 32), (32, 64, 64, 32), (128, 128, 128, 128)]
    for (m1, n1, m2, n2), warps, stages, repeated in itertools.product(tiles, (4, 8), (1, 2, 3), (False, True)):
        options = {"BLOCK_M1": m1, "BLOCK_N1": n1, "BLOCK_M2": m2, "BLOCK_N2": n2}
        options |= {"num_warps": warps, "num_stages": stages}
        name = f"{m1},{n1},{m2},{n2} w{warps} s{stages}" + (" repeated" if repeated else "")
        found.append((name, repeated, {f"bwd_{key}": value for key, value in options.items()}))
    for m, n, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3)):
        options = {"fwd_BLOCK_M": m, "fwd_BLOCK_N": n, "fwd_num_warps": warps, "fwd_num_stages": stages}
        found.append((f"forward {m},{n} w{warps} s{stages}", False, options))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--size", choices=("1x3072", "4x2048"), default="1x3072")
    parser.add_argument("--part", default="0/1", help="which share of the contenders this process takes")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    device = pick_device(options.device)
    shape, sizes = (TINY, TINY_SIZES) if options.tiny else (QWEN3_8B, SIZES)
    work = sizes[options.size].work
    slots = slots_for(work, shape.block_size, device)
    blocks = Blocks.empty(slots.context_slots, slots.anchor_slots, device)
    blocks.copy_(random_blocks(work, shape, slots))
    index, parts = map(int, options.part.split("/"))
    with on_own_stream(device):
        queries = slots.anchor_slots * shape.block_size
        keys = slots.context_slots + queries
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16

        def tensor(rows: int, heads: int) -> torch.Tensor:
            return torch.randn(rows, heads, shape.head_dim, device=device, dtype=dtype, requires_grad=True)

        q, k, v = tensor(queries, shape.num_heads), tensor(keys, shape.num_kv_heads), tensor(keys, shape.num_kv_heads)
        results: dict[str, Any] = {}
        if device.type == "cpu":
            out = dense_attention(shape, blocks)(0, q, k, v)
            out.backward(torch.randn_like(out))
            print(json.dumps({"bench": "attention", "dense": list(out.shape), "contenders": len(contenders())}))
            return
        tiles = TileLists(slots.context_slots, slots.anchor_slots, shape.block_size, device, short_blocks=False)
        mask = tiles.mask(blocks)
        slope = torch.randn(queries, shape.num_heads, shape.head_dim, device=device, dtype=dtype)
        for name, repeated, kernel_options in contenders()[index::parts]:
            torch._dynamo.reset()

            def attend(
                q: torch.Tensor,
                k: torch.Tensor,
                v: torch.Tensor,
                repeated: bool = repeated,
                kernel_options: Options = kernel_options,
            ) -> torch.Tensor:
                if repeated:
                    group = q.shape[1] // k.shape[1]
                    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
                out = flex_attention(
                    *(x.transpose(0, 1)[None] for x in (q, k, v)),
                    block_mask=mask,
                    enable_gqa=not repeated,
                    kernel_options=kernel_options or None,
                )
                assert isinstance(out, torch.Tensor)
                return out[0].transpose(0, 1)

            try:
                compiled = torch.compile(attend, dynamic=False)
                forward, both = [], []
                for _ in range(options.repeats):
                    wait_for(device)
                    started = time.perf_counter()
                    out = compiled(q, k, v)
                    wait_for(device)
                    middle = time.perf_counter()
                    torch.autograd.grad(out, (q, k, v), slope)
                    wait_for(device)
                    forward.append(middle - started)
                    both.append(time.perf_counter() - middle)
                results[name] = {"forward_ms": 1e3 * min(forward), "backward_ms": 1e3 * min(both)}
                print(f"{name:40} forward {1e3 * min(forward):7.3f} ms backward {1e3 * min(both):7.3f} ms", flush=True)
            except Exception as error:  # a tiling that does not fit is its result
                results[name] = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:120]}"}
                print(f"{name:40} {results[name]['error']}", flush=True)
    print(json.dumps({"bench": "attention", "size": options.size, "part": options.part, "results": results}))


if __name__ == "__main__":
    main()
