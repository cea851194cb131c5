"""A world for the benchmarks of whole runs: a target's shape with random weights, a store of random tokens, no network.

Not a benchmark itself. The store's lengths resemble those of a real run (data_lengths.py) with its bucket edges, scaled
with the size. On disk lie a store, a tokenizer and the target's configuration; weights are drawn on the devices.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from data_lengths import EDGES, draw_lengths
from draftmill.config import Config, build_config
from draftmill.target.features import TapsReplica
from draftmill.target.float8 import quantize_layers
from draftmill.target.head import TargetHead
from draftmill.target.model import Target
from draftmill.train.loading import Loaded
from draftmill.train.setup import Setup

QWEN3_8B: dict[str, Any] = dict(
    model_type="qwen3",
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_position_embeddings=40960,
    rope_theta=1000000.0,
    tie_word_embeddings=False,
)
QWEN3_06B = dict(
    QWEN3_8B, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, vocab_size=151936
)
TINY = dict(
    QWEN3_8B,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=512,
)
SHARD_SAMPLES = 4096
POOL_TOKENS = 1 << 22
"""Random tokens that samples are cut out of."""


@dataclass(frozen=True)
class Size:
    """A target's shape and how its batches are cut.

    shrink       samples are that much shorter than the real run's, whose longest has 8192 tokens
    num_anchors  blocks of a drafter batch
    """

    name: str
    model: dict[str, Any]
    shrink: int
    token_budget: int
    num_anchors: int
    block_size: int = 16
    num_layers: int = 5
    num_taps: int = 5
    dtype: str = "bfloat16"

    @property
    def max_length(self) -> int:
        """Tokens of the longest sample."""
        return 8192 // self.shrink

    @property
    def edges(self) -> list[int]:
        """Upper edges of the length buckets."""
        return [*(edge // self.shrink for edge in EDGES[:-1]), self.max_length + 1]

    def shorter(self, shrink: int, token_budget: int, num_anchors: int) -> Size:
        """The same shape on smaller batches."""
        return Size(**{**vars(self), "shrink": shrink, "token_budget": token_budget, "num_anchors": num_anchors})


SIZES = {
    "full": Size("Qwen3-8B", QWEN3_8B, 1, 32768, 2048),
    "small": Size("Qwen3-0.6B", QWEN3_06B, 4, 8192, 512),
    "tiny": Size("tiny", TINY, 64, 512, 32, block_size=8, num_layers=2, num_taps=3, dtype="float32"),
}
LAUNCH_BOUND = {
    # Batches so small that a device waits for Python.
    "full": Size("Qwen3-0.6B, small batches", QWEN3_06B, 16, 2048, 64),
    "small": Size("Qwen3-0.6B, small batches", QWEN3_06B, 16, 2048, 64),
    "tiny": SIZES["tiny"],
}


def write_world(folder: Path, size: Size, num_samples: int, processes: int = 1) -> None:
    """Write the target's configuration, a tokenizer and the store into the folder."""
    from draftmill.data.build import StoreBuild
    from draftmill.data.encode import hash_tokenizer
    from draftmill.target.load import load_tokenizer

    model = folder / "target"
    model.mkdir(parents=True)
    AutoConfig.for_model(**size.model).save_pretrained(model)
    _tokenizer().save_pretrained(model)
    lengths = np.maximum(draw_lengths(num_samples) // size.shrink, 8)
    vocabulary = size.model["vocab_size"]
    with StoreBuild(folder / "store", "0" * 32) as build:
        build.start()
        starts = range(0, num_samples, SHARD_SAMPLES)
        jobs = [
            (build.folder, index, lengths[start : start + SHARD_SAMPLES], vocabulary)
            for index, start in enumerate(starts)
        ]
        if processes > 1:
            with multiprocessing.get_context("fork").Pool(processes) as pool:
                pool.map(_write_shard, jobs, chunksize=1)
        else:
            for job in jobs:
                _write_shard(job)
        meta = {
            "tokenizer_name": "random",
            "tokenizer_hash": hash_tokenizer(load_tokenizer(str(model))),
            "vocab_size": vocabulary,
            "max_length": size.max_length,
        }
        build.finish(len(jobs), meta, {}, vocabulary)


def _write_shard(job: tuple[Path, int, np.ndarray, int]) -> None:
    from draftmill.data.build import write_shard

    folder, index, lengths, vocabulary = job
    # the last id is the mask token, which no sample holds
    tokens = np.random.default_rng(1).integers(0, vocabulary - 1, POOL_TOKENS, dtype=np.int32)
    mask = np.ones(int(lengths.max()), dtype=np.bool_)
    mask[: max(2, int(lengths.max()) // 64)] = False
    begins = (np.arange(len(lengths)) * 1009 + index) % (POOL_TOKENS - int(lengths.max()))
    samples = [(tokens[b : b + n], mask[:n]) for b, n in zip(begins.tolist(), lengths.tolist(), strict=True)]
    write_shard(folder, index, samples, {}, vocabulary)


def _tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


def config_of(folder: Path, size: Size, targets: list[str], drafters: list[str], **changed: dict[str, Any]) -> Config:
    """The run's configuration on these devices; `changed` gives more by section."""
    sections: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder / "run")},
        "target": {"model": str(folder / "target"), "devices": targets, "dtype": size.dtype},
        "data": {
            "path": str(folder / "store"),
            "max_length": size.max_length,
            "token_budget": size.token_budget,
            "bucket_edges": size.edges,
            "round_to": 64 if size.shrink <= 16 else 8,
            "heldout": 0,
        },
        "drafter": {
            "devices": drafters,
            "num_layers": size.num_layers,
            "num_taps": size.num_taps,
            "block_size": size.block_size,
            "mask_token_id": size.model["vocab_size"] - 1,
            "dtype": size.dtype,
        },
        "train": {"epochs": 1, "num_anchors": size.num_anchors, "lr": 1e-4},
        "monitor": {"trackers": []},
    }
    for section, values in changed.items():
        sections.setdefault(section, {}).update(values)
    return build_config(sections)


def random_target(setup: Setup, device: torch.device, size: Size) -> tuple[Target, TargetHead]:
    """A target with random weights drawn on the device, cut after its last tap, and its head on the host."""
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[size.dtype]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(0)
        with device:
            model = AutoModelForCausalLM.from_config(setup.target_config)
    finally:
        torch.set_default_dtype(before)
    target = Target(model)
    head = target.head().to("cpu", dtype)
    target.cut_after(setup.last_layer)
    wait_for_all()
    return target, head


def wait_for_all() -> None:
    """Until all GPUs are done: weights are drawn and copied on streams that are no worker's."""
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)


def taps_replica(setup: Setup, target: Target, like: TapsReplica | None = None) -> TapsReplica:
    """The target as a worker uses it, run as the configuration says."""
    config = setup.config
    return TapsReplica(target, setup.taps, config.target.step, config.data.batching == "packed", like)


def random_loaded(setup: Setup, size: Size, told: Any = lambda index, device: None) -> Loaded:
    """What loading gives, drawn instead of read: one replica for each target of the placement, copied from the first.

    told: called before each replica, with its number and device.
    """
    replicas: list[TapsReplica] = []
    first: Target | None = None
    head: TargetHead | None = None
    for index, group in enumerate(setup.placement.targets):
        told(index, group[0])
        if first is None:
            first, head = random_target(setup, group[0], size)
            target = first
        else:
            target = first.replica(group[0])
            wait_for_all()
        replicas.append(taps_replica(setup, target, replicas[0] if replicas else None))
    if setup.config.target.quantize is not None:  # not before all are copied: what is rounded can't be
        for replica in replicas:
            quantize_layers(replica.target)
    assert head is not None
    return Loaded(replicas, head, None)
