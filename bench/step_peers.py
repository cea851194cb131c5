"""The peers' optimizer steps for bench/step.py, each as its own trainer runs it, on the inputs that all share.

SpecForge 0.2.0: bfloat16 weights, flex attention (its mask built uncompiled), its chunked, checkpointed loss, and its
`BF16Optimizer` with float32 masters. One row a document.

speculators 0.9.0: float32 weights under bfloat16 autocast, the whole forward compiled, cross entropy by
`losses.eager`, clipping by torch, AdamW (fused here, which its trainer leaves to torch). Documents packed into one row.
It takes labels from the target's logits, which it computes itself: the last hidden states given to it are such that
they are the batch's tokens.

Without CUDA both attend by scaled-dot-product attention, since flex attention has no backward there.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import nn
from transformers import Qwen3Config

from draftmill.drafter.shape import DrafterShape
from step_contender import Inputs

CLIP = 1.0


def qwen3_config(shape: DrafterShape, num_layers: int) -> Qwen3Config:
    """The shape as the Hugging Face configuration that both peers start from."""
    return Qwen3Config(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        vocab_size=shape.vocab_size,
        rope_parameters=dict(shape.rope),
        max_position_embeddings=shape.max_position_embeddings,
        tie_word_embeddings=False,
    )


def load_weights(network: nn.Module, inputs: Inputs) -> None:
    """The common weights into a peer's network; only what belongs to the target may be missing from them."""
    result = network.load_state_dict(inputs.drafter().state_dict(), strict=False)
    ours = [name for name in result.missing_keys if not name.startswith(("embed_tokens", "lm_head", "verifier_"))]
    if result.unexpected_keys or ours:
        raise RuntimeError(f"the weights do not fit: unexpected {result.unexpected_keys}, missing {ours}")


class SpecForge:
    """OnlineDFlashModel and BF16Optimizer."""

    strict = False

    def __init__(self, inputs: Inputs) -> None:
        from specforge.algorithms.common.dflash_family_model import DFlashDraftModel, OnlineDFlashModel
        from specforge.optimizer import BF16Optimizer

        shape, on_cuda = inputs.shape, inputs.device.type == "cuda"
        backend = "flex_attention" if on_cuda else "sdpa"
        config = qwen3_config(shape, shape.num_layers)
        config.num_target_layers, config.block_size = shape.num_target_layers, shape.block_size
        config.dflash_config = {"mask_token_id": shape.mask_token_id, "target_layer_ids": list(shape.target_layer_ids)}
        config._attn_implementation = backend
        with torch.device(inputs.device):
            network = DFlashDraftModel(config)
        load_weights(network, inputs)
        for parameter in network.parameters():  # not the rotary buffers, which stay float32
            parameter.data = parameter.data.to(inputs.dtype)
        head = inputs.head()
        linear = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False, device="meta")
        linear.weight = nn.Parameter(head.head_VH, requires_grad=False)
        self.model = OnlineDFlashModel(
            draft_model=network,
            target_lm_head=linear,
            target_embed_tokens=nn.Embedding.from_pretrained(head.embedding_VH, freeze=True),
            mask_token_id=shape.mask_token_id,
            block_size=shape.block_size,
            attention_backend=backend,
            num_anchors=inputs.work.anchors // inputs.work.documents,
            loss_decay_gamma=inputs.gamma,
        ).train()
        self.optimizer = BF16Optimizer(network, lr=0.0, max_grad_norm=CLIP, total_steps=1000, warmup_ratio=0.04)
        self.tokens = inputs.token_rows
        documents, length = self.tokens.shape
        self.features = inputs.features_TF.view(documents, length, -1)
        self.mask = torch.ones_like(self.tokens, dtype=torch.float32)
        anchors = inputs.anchor_places.view(documents, -1) % length
        keep = torch.ones_like(anchors, dtype=torch.bool)
        self.model._sample_anchor_positions = lambda *_arguments, **_named: (anchors, keep)
        self._loss = self._norm = torch.zeros(())

    def run(self) -> None:
        """One step."""
        loss, _, _ = self.model(self.tokens, self.features, self.mask)
        loss.backward()
        self._norm = self.optimizer.step()
        self._loss = loss.detach()

    def result(self) -> tuple[float, float]:
        """Loss and norm of its gradient."""
        return float(self._loss), float(self._norm)


class Speculators:
    """DFlashDraftModel.from_training_args under autocast."""

    strict = False

    def __init__(self, inputs: Inputs) -> None:
        from speculators.losses import eager

        self.inputs = inputs
        self.model = self._model(inputs)
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.0, weight_decay=0.0, fused=True)
        tokens = inputs.token_rows
        documents, length = tokens.shape
        places = torch.arange(documents * length, device=inputs.device)
        flat = tokens.view(1, -1)
        self.batch: dict[str, Any] = {
            "hidden_states": inputs.features_TF[None],
            "input_ids": flat,
            "loss_mask": torch.ones_like(flat, dtype=torch.bool),
            "verifier_last_hidden_states": self._hidden_of(flat.roll(-1, dims=1)),
            "document_ids": (places // length)[None],
            "position_ids": (places % length)[None],
            "loss_config": {"ce": (eager.ce_loss, 1.0)},
            "gamma": inputs.gamma,
            "max_anchors": inputs.work.anchors,
        }
        self._loss = self._norm = torch.zeros(())

    @staticmethod
    def _model(inputs: Inputs) -> Any:
        from speculators.models.dflash import core

        shape, work = inputs.shape, inputs.work
        anchors = inputs.anchor_places
        valid = torch.ones_like(anchors, dtype=torch.bool)
        core.select_anchors = lambda *_arguments, **_named: (anchors, valid)

        class WithoutFiles(core.DFlashDraftModel):
            def load_verifier_weights(self) -> None:
                """Random ones are put in below."""

        with tempfile.TemporaryDirectory() as folder, torch.device(inputs.device):
            qwen3_config(shape, shape.num_target_layers).save_pretrained(folder)
            model = WithoutFiles.from_training_args(
                qwen3_config(shape, shape.num_layers),
                verifier_name_or_path=folder,
                target_layer_ids=[index + 1 for index in shape.target_layer_ids],
                draft_vocab_size=shape.vocab_size,
                block_size=shape.block_size,
                mask_token_id=shape.mask_token_id,
                draft_attn_impl="simple_flex_attention" if inputs.device.type == "cuda" else "sdpa",
            )
        load_weights(model, inputs)
        head = inputs.head()
        with torch.no_grad():
            model.embed_tokens.weight.copy_(head.embedding_VH)
            model.lm_head.weight.copy_(head.head_VH)
            model.verifier_lm_head.weight.copy_(head.head_VH)
            model.verifier_norm.weight.fill_(1.0)
        assert work.anchors == len(anchors)
        return model.train()

    def _hidden_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states whose largest logit is the given token: its own row of the head."""
        rows: torch.Tensor = self.model.verifier_lm_head.weight[tokens]
        return rows.detach().to(self.inputs.dtype)

    def run(self) -> None:
        """One step, in the order of its trainer."""
        with torch.autocast(self.inputs.device.type, torch.bfloat16, enabled=self.inputs.dtype == torch.bfloat16):
            _, loss, _ = self.model(**self.batch)
        self.optimizer.zero_grad()
        loss.backward()
        self._norm = torch.nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.optimizer.step()
        self._loss = loss.detach()

    def result(self) -> tuple[float, float]:
        """Loss and norm of its gradient, which it divides by the number of scored slots in place of their weights."""
        factor = (self.inputs.num_scored + 1e-5) / self.inputs.weight_sum
        return float(self._loss) * factor, float(self._norm) * factor
