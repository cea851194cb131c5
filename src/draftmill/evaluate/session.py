"""One sequence being decoded on fixed buffers: prefill, and the step that plain and speculative decoding share.

Owns what a step computes and the order of it. A step drafts n tokens (none in plain decoding), runs the target over
the last token and the drafts, keeps the leading ones that the target agrees with, adds the target's own next token,
and hands the features of what it verified to the drafter. All of it stays on the device, in tensors of fixed shape;
the caller reads one small tensor a step. The same code runs eagerly and captured (`graphs.py`). Never counts,
stops or keeps time; that is `decode.py`.

Source: arXiv 2602.06036, section on inference; z-lab/dflash@44947fb dflash/model.py, dflash_generate. Shape letters as
in records.py; N drafted tokens, P = N + 1 verified ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from draftmill.drafter.network import Drafter
from draftmill.evaluate.caches import FixedDrafterCache, TargetCache, forward_options
from draftmill.evaluate.graphs import CapturedStep
from draftmill.evaluate.sampling import draw, judge_greedy, judge_sampled, num_uniforms, probabilities
from draftmill.target.generate_sampling import Sampling
from draftmill.target.model import Taps, Target


class Session:
    """Buffers and caches for sequences of at most `capacity` tokens, one after another.

    Without a drafter it decodes plainly only. A target with recurrent layers serves one sequence for each session.
    """

    def __init__(self, target: Target, drafter: Drafter | None, capacity: int, sampling: Sampling) -> None:
        self.target, self.drafter, self.capacity, self.sampling = target, drafter, capacity, sampling
        self.device = target.device
        self.length = torch.zeros((), dtype=torch.int64, device=self.device)
        self.last = torch.zeros(1, dtype=torch.int64, device=self.device)
        text = target.config.get_text_config()
        self.position_limit: int | None = getattr(text, "max_position_embeddings", None)
        self.cache = TargetCache(text, capacity, self.length)
        self._forward_options = forward_options(target.model, self.cache.layers)
        largest = 0
        if drafter is not None:
            self.head = target.head()
            self._dtype = drafter.fc.weight.dtype
            self.drafter_cache = FixedDrafterCache(drafter.shape, capacity, self.device, self._dtype, self.length)
            largest = drafter.shape.block_size - 1
        self.uniforms = torch.zeros(2 * largest + 1, dtype=torch.float64, device=self.device)
        self._captured: dict[int, CapturedStep] = {}

    def taps(self, num_drafts: int) -> AbstractContextManager[Taps | None]:
        """The collector of features that steps with this many drafts need: none in plain decoding."""
        if num_drafts == 0 or self.drafter is None:
            return nullcontext()
        return self.target.taps(self.drafter.shape.target_layer_ids)

    def set_uniforms(self, numbers: torch.Tensor) -> None:
        """Give the next prefill or step its random numbers, float64 in [0, 1) on the CPU."""
        self.uniforms[: numbers.shape[0]].copy_(numbers)

    def prefill(self, prompt: Sequence[int]) -> torch.Tensor:
        """Run the prompt through the target from an empty cache; the first new token, int64 [1]."""
        self.length.zero_()
        tokens_S = torch.tensor(prompt, dtype=torch.int64, device=self.device)
        logits_V = self._logits(tokens_S, only_last=True)
        _, token = self._judge(self.last[:0], None, logits_V)
        self.last.copy_(token)
        return self.last

    def take_prompt(self, num_tokens: int, taps: Taps | None) -> None:
        """Count the prompt just prefilled as held, and give its features to the drafter where taps collected them."""
        if taps is not None:
            self._extend(taps, torch.arange(num_tokens, device=self.device))
        self.length.fill_(num_tokens)

    def step(self, num_drafts: int, taps: Taps | None) -> torch.Tensor:
        """One step: int64 [N + 2], how many drafts were kept, the target's token after them, and the drafts.

        The result is overwritten by the next step of the same kind. A captured step runs where `capture` made one.
        """
        captured = self._captured.get(num_drafts)
        return captured() if captured is not None else self.step_eagerly(num_drafts, taps)

    def step_eagerly(self, num_drafts: int, taps: Taps | None) -> torch.Tensor:
        """The step itself, launched operation by operation."""
        positions_P = self.length + torch.arange(num_drafts + 1, device=self.device)
        drafts_N, drafted_NV = self._draft(num_drafts, positions_P)
        block_P = torch.cat([self.last, drafts_N])
        snapshot = self.cache.snapshot() if num_drafts else []
        logits_PV = self._logits(block_P)
        accepted, token = self._judge(drafts_N, drafted_NV, logits_PV)
        if taps is not None:
            self._extend(taps, positions_P)
        if self.cache.recurrent and (kept := int(accepted) + 1) <= num_drafts:
            self.cache.restore(snapshot)
            self._logits(block_P[:kept])  # the state moves over what was kept, and nothing else
        self.length.add_(accepted[0] + 1)
        self.last.copy_(token)
        return torch.cat([accepted, token, drafts_N])

    def capture(self, num_drafts: int) -> None:
        """Capture the step with this many drafts as a CUDA graph, once.

        Raises RuntimeError where the target's forward or the drafter's block can't be captured.
        """
        if num_drafts in self._captured:
            return
        if self.cache.recurrent:
            raise RuntimeError("a step over recurrent layers reads how much was accepted, and can't be captured")
        self.prefill([0])  # allocates the cache: its buffers must be there before the graph is
        with self.taps(num_drafts) as taps:
            self._captured[num_drafts] = CapturedStep(
                lambda: self.step_eagerly(num_drafts, taps), self.device, [self.length, self.last]
            )

    def drop_captures(self) -> None:
        """Launch every kind of step from now on."""
        self._captured.clear()

    def _draft(self, num_drafts: int, positions_P: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """N drafted tokens and, when sampling, the distributions [N, V] that they were drawn from."""
        if num_drafts == 0 or self.drafter is None:
            return self.last[:0], None
        masks = self.last.new_full((num_drafts,), self.drafter.shape.mask_token_id)
        embeddings_PH = self.head.embed(torch.cat([self.last, masks])).to(self._dtype)
        hidden_PH = self.drafter.draft(self.drafter_cache, embeddings_PH, positions_P)
        logits_NV = self.head.logits(hidden_PH[1:].to(self.head.head_VH.dtype))
        if self.sampling.temperature == 0.0:
            return logits_NV.argmax(dim=-1), None
        drafted_NV = probabilities(logits_NV, self.sampling)
        return draw(drafted_NV, self.uniforms[:num_drafts]), drafted_NV

    def _logits(self, tokens_S: torch.Tensor, *, only_last: bool = False) -> torch.Tensor:
        """Run the target over tokens at the slots from `length` on; its logits [S, V], or [1, V] for the last only."""
        positions_S = self.length + torch.arange(tokens_S.shape[0], device=self.device)
        if self.position_limit is not None:
            # A step may look past the last position there is; those tokens are never kept.
            positions_S = positions_S.clamp(max=self.position_limit - 1)
        options = dict(self._forward_options)
        if "position_ids" in options:
            options["position_ids"] = positions_S[None]
        if only_last and "logits_to_keep" in options:
            options["logits_to_keep"] = 1
        logits_SV = self.target.model(input_ids=tokens_S[None], **options).logits[0].to(self.device)
        return logits_SV[-1:] if only_last else logits_SV

    def _judge(
        self, drafts_N: torch.Tensor, drafted_NV: torch.Tensor | None, logits_PV: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.sampling.temperature == 0.0:
            return judge_greedy(drafts_N, logits_PV)
        wanted_PV = probabilities(logits_PV, self.sampling)
        count = drafts_N.shape[0]
        used = self.uniforms[count : num_uniforms(self.sampling, count)]
        return judge_sampled(drafts_N, wanted_PV[:0] if drafted_NV is None else drafted_NV, wanted_PV, used)

    def _extend(self, taps: Taps, positions_N: torch.Tensor) -> None:
        assert self.drafter is not None
        features_NF = taps.concatenated()[0].to(self.device, self._dtype)
        self.drafter.extend(self.drafter_cache, features_NF, positions_N)
