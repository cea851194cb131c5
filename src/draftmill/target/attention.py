"""Attention over documents that share a row: none sees another.

Owns the attention function that is registered with transformers under `DOCUMENTS`, and where documents lie in a packed
batch (`Packing`). Rows are flattened, so documents are runs of tokens, and what a row's end is does not matter. On CUDA
the variable-length flash attention of torch runs; elsewhere, and for what that lacks, the reference goes document by
document. Padding is a document of its own, whose output nobody reads.

N query heads, M key/value heads, D head size, T tokens of all rows.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812

DOCUMENTS = "draftmill_documents"
"""Name under which transformers finds the attention function."""
FLASH_HEAD_DIM = 256
"""Largest head that flash attention takes."""


_varlen: Any = None
"""torch.nn.attention.varlen, once it is needed."""
_groups: dict[str, Any] = {}
"""How its attention is told of groups of heads; not at all before torch 2.12."""


def _load_kernels() -> None:
    """Import the kernels, the first time: that takes a second or more, which no CPU should pay for."""
    global _varlen, _groups
    if _varlen is None:
        from torch.nn.attention import varlen

        takes_groups = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters
        _varlen, _groups = varlen, {"enable_gqa": True} if takes_groups else {}


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the documents of a packed batch lie.

    positions_BS  int64, position of each token inside its document, on the target's device
    bounds        int32 [documents + 1], first token of each document in the flattened rows, and the end, there too
    longest       tokens of the longest run that may occur: the row length
    """

    positions_BS: torch.Tensor
    bounds: torch.Tensor
    longest: int

    def inputs(self, by_document: bool) -> dict[str, Any]:
        """Keyword arguments of a decoder's forward, in transformers' own names.

        by_document: whether `DOCUMENTS` is the target's attention; else transformers makes masks from the positions.
        """
        if not by_document:
            return {"position_ids": self.positions_BS}
        return {
            "position_ids": self.positions_BS,
            "cu_seq_lens_q": self.bounds,
            "cu_seq_lens_k": self.bounds,
            "max_length_q": self.longest,
            "max_length_k": self.longest,
        }


def document_bounds(documents_BS: torch.Tensor) -> np.ndarray:
    """Starts of the runs of equal documents in the flattened rows, and the end; int32, on the host.

    documents_BS: int32 on the host, -1 for padding. Runs end at row ends.
    """
    documents = documents_BS.numpy()
    begins = np.ones(documents.shape, dtype=bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return np.append(np.flatnonzero(begins), documents.size).astype(np.int32)


def packing_of(
    positions_BS: torch.Tensor | None, documents_BS: torch.Tensor | None, device: torch.device
) -> Packing | None:
    """The packing of rows, given as in HostBatch, on the device; None where every row is one document."""
    if positions_BS is None or documents_BS is None:
        return None
    return Packing(
        positions_BS.to(device, torch.int64, non_blocking=True),
        torch.from_numpy(document_bounds(documents_BS)).to(device, non_blocking=True),
        positions_BS.shape[1],
    )


def register() -> None:
    """Make `DOCUMENTS` known to transformers; can be called twice.

    It has no mask function on purpose: transformers then builds no mask, and the function's own rule holds alone.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(DOCUMENTS, document_attention)
    if torch.cuda.is_available():
        _load_kernels()  # before anything that calls them is compiled


_seen = threading.local()


@contextmanager
def observed_windows() -> Iterator[dict[int, int | None]]:
    """Collects, by layer, the sliding window with which this thread's forwards call the attention function."""
    windows: dict[int, int | None] = {}
    _seen.windows = windows
    try:
        yield windows
    finally:
        del _seen.windows


def document_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    position_bias: torch.Tensor | None = None,
    **_others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each document; transformers' signature of an attention function.

    query [B, N, S, D], key and value [B, M, S, D] -> [B, S, N, D]. s_aux: one sink logit a head, which takes part in
    the softmax and gives no value. Raises RuntimeError for a mask, a bias, or a forward that does not hand on where
    the documents lie.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        raise RuntimeError("document attention was called without the documents' bounds")
    if attention_mask is not None or position_bias is not None:
        raise RuntimeError("document attention takes neither a mask nor a bias")
    if not torch.compiler.is_compiling() and getattr(_seen, "windows", None) is not None:
        _seen.windows[getattr(module, "layer_idx", len(_seen.windows))] = sliding_window
    batch, _, length, _ = query.shape
    q, k, v = (x.transpose(1, 2).reshape(batch * length, x.shape[1], x.shape[3]) for x in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if uses_flash(q, v, softcap):
        out = _flash(q, k, v, cu_seq_lens_q, max_length_q, scale, sliding_window, s_aux)
    else:
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"attention by document is captured for bfloat16 and float16 heads of at most {FLASH_HEAD_DIM} without "
                f"capped scores, got {str(q.dtype).removeprefix('torch.')} heads of {max(q.shape[-1], v.shape[-1])}"
                f"{'' if softcap is None else ', capped'}; use target.step=eager or auto"
            )
        out = reference_attention(q, k, v, cu_seq_lens_q.tolist(), scale, sliding_window, softcap, s_aux)
    return out.view(batch, length, out.shape[1], out.shape[2]), None


def uses_flash(q: torch.Tensor, v: torch.Tensor, softcap: float | None) -> bool:
    """Whether torch's variable-length flash attention takes these queries [T, N, D] and values."""
    fits = max(q.shape[-1], v.shape[-1]) <= FLASH_HEAD_DIM
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and softcap is None and fits


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: list[int],
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Document by document. q [T, N, D], k and v [T, M, D or another] -> [T, N, D of v]."""
    parts = []
    for first, last in pairwise(bounds):
        if first == last:
            continue
        queries, keys, values = (x[first:last].transpose(0, 1)[None] for x in (q, k, v))
        seen = None if window is None or window >= last - first else _near(last - first, window, q.device)
        if softcap is None and sinks is None:
            out = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=seen, is_causal=seen is None, scale=scale, enable_gqa=True
            )
        else:
            seen = _near(last - first, last - first, q.device) if seen is None else seen
            out = _written_out(queries, keys, values, seen, scale, softcap, sinks)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def _near(size: int, window: int, device: torch.device) -> torch.Tensor:
    """[size, size] boolean: a query sees itself and the window - 1 tokens before it."""
    places = torch.arange(size, device=device)
    back = places[:, None] - places
    return (back >= 0) & (back < window)


def _written_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with a bound on its scores or with sinks; [1, N, S, D] and [1, M, S, D] -> [1, N, S, D of v]."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = (q @ k.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is None:
        return torch.softmax(scores, dim=-1).to(v.dtype) @ v
    column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1].to(v.dtype) @ v


def _flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Torch's variable-length flash attention; the arguments of `reference_attention`."""
    _load_kernels()
    width, heads = v.shape[-1], q.shape[1]
    if width != q.shape[-1]:  # the kernel wants one head size
        v = F.pad(v, (0, q.shape[-1] - width))
    options: dict[str, Any] = {}
    if k.shape[1] != heads:
        options = _groups
        if not options:
            k, v = (x.repeat_interleave(heads // k.shape[1], dim=1) for x in (k, v))
    reach = (-1, 0) if window is None else (window - 1, 0)
    if sinks is None:
        out = _varlen.varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=reach, **options)
        assert isinstance(out, torch.Tensor)
        return out[..., :width]
    out, log_sums = _varlen.varlen_attn(
        q,
        k,
        v,
        bounds,
        bounds,
        longest,
        longest,
        scale=scale,
        window_size=reach,
        return_aux=_varlen.AuxRequest(lse=True),
        **options,
    )
    # a sink adds exp(sink) to the softmax's denominator: exp(lse) / (exp(lse) + exp(sink)) of the output stays
    share = torch.sigmoid(log_sums[:, : q.shape[0]] - sinks.float()[:, None])
    return (out * share.t()[..., None].to(out.dtype))[..., :width]
