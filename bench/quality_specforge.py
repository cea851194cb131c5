"""SpecForge 0.2.0's own training of one run against the clock, on the same data and GPU.

Its `OnlineDFlashModel` with flex attention, anchors, mask and loss as they are, its `BF16Optimizer`, and its DFlash
defaults: learning rate 6e-4, gamma 7, 512 anchors a row, warm-up 4 %, clip 1, cosine; batches of rows in random order,
padded to one length, the longest sample's. It has Qwen3 layers of our drafter's sizes and first weights N(0, 0.02).

Where it has it better here than in its own trainer: all samples lie on the GPU from the start, and the target's forward
is ours (the fastest way that equals the plain model), in place of a server that sends features through a store. As for
our own runs, the rate follows the time, which its scheduler would do by a number of steps given beforehand.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import nn

from draftmill.config import TrainConfig
from draftmill.data.store import Store
from draftmill.drafter.shape import DrafterShape
from draftmill.target.load import load_target
from draftmill.target.model import Target
from draftmill.target.step import build_forward
from quality_clock import Clock, Course, Kept, moments
from step_peers import qwen3_config

SETTINGS = TrainConfig(lr=6e-4, warmup_share=0.04, schedule="cosine", clip=1.0, gamma=7.0, num_anchors=512)
_ROUND_TO = 64
_WARM_UP_STEPS = 40  # its kernels are compiled anew for the first few widths that its batches come in


class Contender:
    """Runs of one process on one device, one after another."""

    def __init__(self, target_name: str, store: Store, shape: DrafterShape, device: str) -> None:
        self.shape, self.device = shape, torch.device(device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.target: Target = load_target(target_name, device=device, dtype=str(self.dtype).removeprefix("torch."))
        self.head = self.target.head()
        self.target.cut_after(shape.target_layer_ids[-1])
        self.tokens_NS, self.mask_NS = _padded(store, self.device)
        self.mean_length = float(store.lengths.mean())
        self._forward: Any = None
        self._forward_rows = 0
        self.report = ""

    def run(self, seed: int, rows: int, seconds: float, points: int) -> Course:
        """Train; the course holds weights at `points` moments."""
        started = time.perf_counter()
        rows = min(rows, len(self.tokens_NS))
        self._build_target(rows)
        torch._dynamo.config.error_on_recompile = False  # its shapes vary; what we compiled before has forbidden it
        warm = _Training(self, seed, Clock(seconds))
        for batch in self._batches(seed + 1000, rows, _WARM_UP_STEPS if self.device.type == "cuda" else 1):
            warm.step(batch)
        training = _Training(self, seed, Clock(seconds))
        course, due, losses = Course(notes=[self.report]), moments(points), deque[torch.Tensor](maxlen=20)
        self._wait()
        training.clock.start()
        course.build_s = time.perf_counter() - started
        print(f"  built and warm; {seconds:g} s of training begin", flush=True)
        took_s: list[float] = []
        now = 0.0
        for batch in self._batches(seed, rows, None):
            losses.append(training.step(batch))
            course.steps += 1
            before, now = now, training.clock.now()  # a count is read back in each step, so the host is not far ahead
            took_s.append(now - before)
            if now >= seconds:
                break
            if len(due) > 1 and now >= due[0] * seconds:
                self._wait()
                course.kept.append(training.kept(due.popleft(), course.steps))
        self._wait()
        course.seconds = training.clock.now()
        course.kept.append(training.kept(due.popleft(), course.steps))
        slowest = ", ".join(f"{one:.2f}" for one in sorted(took_s)[-5:])
        course.notes.append(f"step: median {1000 * statistics.median(took_s):.1f} ms, slowest {slowest} s")
        course.context_tokens = round(course.steps * rows * self.mean_length)
        course.loss = float(torch.stack(list(losses)).mean())
        return course

    def features(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """The target's features of right-padded rows, [B, S, L*H]."""
        return torch.cat(self._forward.run(tokens_BS, None), dim=-1)

    def _build_target(self, rows: int) -> None:
        if self._forward is None or rows > self._forward_rows:
            built = build_forward("auto", self.target, self.shape.target_layer_ids, self.tokens_NS[:rows], None)
            self._forward, self._forward_rows, self.report = built.forward, rows, f"target {built.report}"

    def _batches(self, seed: int, rows: int, count: int | None) -> Any:
        """Rows in random order, every sample once an epoch; the last few that make no whole batch are left out."""
        generator, made = torch.Generator().manual_seed(seed), 0
        while True:
            order = torch.randperm(len(self.tokens_NS), generator=generator).to(self.device)
            for batch in order[: len(order) // rows * rows].view(-1, rows):
                if count is not None and made == count:
                    return
                made += 1
                yield batch

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class _Training:
    """One run's model and optimizer."""

    def __init__(self, contender: Contender, seed: int, clock: Clock) -> None:
        from specforge.algorithms.common.dflash_family_model import DFlashDraftModel, OnlineDFlashModel
        from specforge.optimizer import BF16Optimizer

        self.contender, self.clock = contender, clock
        shape, device = contender.shape, contender.device
        backend = "flex_attention" if device.type == "cuda" else "sdpa"
        config = qwen3_config(shape, shape.num_layers)
        config.num_target_layers, config.block_size = shape.num_target_layers, shape.block_size
        config.dflash_config = {"mask_token_id": shape.mask_token_id, "target_layer_ids": list(shape.target_layer_ids)}
        config._attn_implementation = backend
        torch.manual_seed(seed)
        with torch.device(device):
            self.network = DFlashDraftModel(config)
        for parameter in self.network.parameters():  # not the rotary buffers, which stay float32
            parameter.data = parameter.data.to(contender.dtype)
        head = contender.head
        linear = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False, device="meta")
        linear.weight = nn.Parameter(head.head_VH, requires_grad=False)
        self.model = OnlineDFlashModel(
            draft_model=self.network,
            target_lm_head=linear,
            # with the factor that a Gemma puts on its embeddings, which SpecForge itself would leave out
            target_embed_tokens=nn.Embedding.from_pretrained(head.embedding_VH * head.embedding_scale, freeze=True),
            mask_token_id=shape.mask_token_id,
            block_size=shape.block_size,
            attention_backend=backend,
            num_anchors=SETTINGS.num_anchors,
            loss_decay_gamma=SETTINGS.gamma,
        ).train()
        self.optimizer = BF16Optimizer(
            self.network, lr=SETTINGS.lr, max_grad_norm=SETTINGS.clip, total_steps=1000, warmup_ratio=0.04
        )
        self.optimizer.scheduler = _ByTime(self.optimizer.optimizer, clock)

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        """Forward, backward and update; the loss, on the device."""
        contender = self.contender
        tokens_BS = contender.tokens_NS[batch]
        with torch.no_grad():
            features = contender.features(tokens_BS)
        loss, _, _ = self.model(tokens_BS, features, contender.mask_NS[batch])
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def kept(self, share: float, step: int) -> Kept:
        """The float32 masters by name."""
        names = [name for name, parameter in self.network.named_parameters() if parameter.requires_grad]
        masters = dict(zip(names, self.optimizer.fp32_params, strict=True))
        tensors = {name: master.detach().clone() for name, master in masters.items()}
        return Kept(share, self.clock.now(), step, tensors)


class _ByTime:
    """In place of its scheduler: the same warm-up and cosine, over the run's time."""

    def __init__(self, optimizer: torch.optim.Optimizer, clock: Clock) -> None:
        self._optimizer, self._clock = optimizer, clock
        self.step()

    def step(self) -> None:
        """Set the rate of the next update."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._clock.rate(SETTINGS)


def _padded(store: Store, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """All samples as rows of one length, token ids int64 and loss mask float32 [N, S], on the device."""
    length = -(-int(store.lengths.max()) // _ROUND_TO) * _ROUND_TO
    tokens = np.zeros((store.num_samples, length), dtype=np.int64)
    mask = np.zeros((store.num_samples, length), dtype=np.float32)
    for row, (ids, supervised) in enumerate(store.read(np.arange(store.num_samples))):
        tokens[row, : len(ids)] = ids
        mask[row, : len(ids)] = supervised
    return torch.from_numpy(tokens).to(device), torch.from_numpy(mask).to(device)
