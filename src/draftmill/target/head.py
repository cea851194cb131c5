"""The target's embedding and LM head, as the drafter uses them: frozen, never trained, never shipped."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812


@dataclass(frozen=True)
class TargetHead:
    """The target's two vocabulary matrices on one device, and what the target does around them.

    embedding_VH, head_VH  [V, H], the compute type; the same tensor where the target ties them
    embedding_scale        factor on embeddings (Gemma: sqrt(H))
    logit_scale, logit_softcap  factor on logits, then softcap * tanh(logits / softcap)
    """

    embedding_VH: torch.Tensor
    head_VH: torch.Tensor
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids [...] -> embeddings [..., H]."""
        embeddings = F.embedding(ids, self.embedding_VH)
        return embeddings if self.embedding_scale == 1.0 else embeddings * self.embedding_scale

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normed hidden states [..., H] -> logits [..., V], the compute type."""
        return shape_logits(hidden @ self.head_VH.t(), self.logit_scale, self.logit_softcap)

    def drafted_logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """As `logits`, of a drafter's hidden states [R, H] that are being trained -> [R, V]."""
        return self.logits(hidden_RH)

    def back(self, slope_RV: torch.Tensor) -> torch.Tensor:
        """Slope to raw head outputs [R, V] -> times the head, [R, H], the compute type."""
        return slope_RV.to(self.head_VH.dtype) @ self.head_VH

    def to(self, device: torch.device | str, dtype: torch.dtype) -> TargetHead:
        """The same head on a device in a type; tied matrices stay one tensor."""
        embedding = self.embedding_VH.to(device, dtype)
        head = embedding if self.head_VH is self.embedding_VH else self.head_VH.to(device, dtype)
        return TargetHead(embedding, head, self.embedding_scale, self.logit_scale, self.logit_softcap)


def shape_logits(logits: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
    """Raw head outputs -> the target's logits."""
    if scale != 1.0:
        logits = logits * scale
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def embedding_scale(text: Any, dtype: torch.dtype = torch.float64) -> float:
    """What a target of this text configuration multiplies its embeddings, of this type, by.

    sqrt(H) in the Gemma family, rounded to that type as these models do; a configured factor in Granite; 1 elsewhere.
    """
    if str(getattr(text, "model_type", "")).startswith("gemma"):
        return float(torch.tensor(math.sqrt(text.hidden_size), dtype=dtype))
    return float(getattr(text, "embedding_multiplier", None) or 1.0)


def logit_scale(text: Any) -> float:
    """What a target of this text configuration multiplies its logits by: Cohere multiplies, Granite divides."""
    if (divisor := getattr(text, "logits_scaling", None)) is not None:
        return 1.0 / float(divisor)
    return float(getattr(text, "logit_scale", None) or 1.0)
