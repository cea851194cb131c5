"""A frozen target model: its decoder layers found, cut after the last tapped one, and run for its features.

Owns the Hugging Face model of one replica. Never trains it, never runs its LM head for features, and states one
convention: the feature of layer id i is the output of decoder layer i, Hugging Face's hidden_states[i + 1]. The last
hidden state, where a loss wants it, is the decoder's output, which is normed already.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from draftmill.errors import InputError
from draftmill.target.head import TargetHead, embedding_scale, logit_scale

OUTPUT = -1
"""In place of a layer id: the decoder's own output, its last hidden state after the final norm."""


class Taps:
    """The outputs of the tapped layers in the latest forward, in the order of their ids."""

    def __init__(self, layer_ids: Sequence[int]) -> None:
        self.layer_ids = tuple(layer_ids)
        self.outputs: dict[int, torch.Tensor] = {}

    def concatenated(self) -> torch.Tensor:
        """The features of the latest forward, [B, S, L*H]."""
        return torch.cat([self.outputs[layer] for layer in self.layer_ids], dim=-1)


class Target:
    """One replica of the target: the model, whole or cut, on its device, in evaluation mode, without gradients."""

    def __init__(self, model: Any, tokenizer: Any = None, layers_path: str | None = None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.config = model.config
        _cap_scores(model)
        model.eval().requires_grad_(False)
        self.decoder = find_decoder(model)
        self.layers_path = layers_path or find_decoder_layers(model)
        self.layers: nn.ModuleList = self.decoder.get_submodule(self.layers_path)
        self.num_layers = len(self.layers)

    @property
    def device(self) -> torch.device:
        """Where the inputs go: the device of the embedding."""
        return self.model.get_input_embeddings().weight.device

    @property
    def output_device(self) -> torch.device:
        """The device of the last layer, where features are gathered; another than `device` only in a group."""
        return next(self.layers[-1].parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The type of its activations, which is that of its embedding, also where its layers are quantized."""
        return self.model.get_input_embeddings().weight.dtype

    @property
    def text_config(self) -> Any:
        """The language model's own configuration, also where it is nested in a multimodal one."""
        return self.config.get_text_config()

    def head(self) -> TargetHead:
        """The embedding and LM head of this replica, on its device, in its type; tied matrices are one tensor.

        Raises InputError where the model has no LM head (it was cut), a quantized one, or one with a bias.
        """
        embedding = self.model.get_input_embeddings().weight
        output = self.model.get_output_embeddings()
        name = type(self.model).__name__
        if output is None or not hasattr(output, "weight"):
            raise InputError(f"the target {name} has no LM head to train a drafter against")
        if getattr(output, "bias", None) is not None:
            raise InputError(f"the LM head of {name} has a bias, which no DFlash engine serves")
        for part, matrix in (("embedding", embedding), ("LM head", output.weight)):
            if matrix.dim() != 2 or matrix.dtype not in (torch.bfloat16, torch.float16, torch.float32):
                raise InputError(
                    f"the {part} of {name} is quantized ({matrix.dtype}, shape {tuple(matrix.shape)}); a drafter needs "
                    "it in bfloat16, float16 or float32"
                )
        text = self.text_config
        embedding_VH = embedding.data
        return TargetHead(
            embedding_VH,
            embedding_VH if output.weight is embedding else output.weight.data,
            embedding_scale(text, embedding_VH.dtype),
            logit_scale(text),
            getattr(text, "final_logit_softcapping", None),
        )

    def cut_after(self, layer: int) -> None:
        """Drop the layers after `layer`, and all that lies beside the decoder: LM head, vision tower, projectors.

        Features stay the same; logits are gone.
        """
        del self.layers[layer + 1 :]
        _keep_only(self.model, [self.decoder, self.model.get_input_embeddings()])

    def replica(self, device: torch.device | str) -> Target:
        """A copy on a device; weights go there directly, without a second copy on the host, and are shared if there."""
        return self.copied(lambda _tensor: torch.device(device))

    def copied(self, device_of: Any) -> Target:
        """A copy whose every parameter and buffer lies on the device that `device_of` gives for it."""
        memo: dict[int, Any] = {}
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            moved = tensor.data.to(device_of(tensor))
            memo[id(tensor)] = nn.Parameter(moved, requires_grad=False) if isinstance(tensor, nn.Parameter) else moved
        return Target(copy.deepcopy(self.model, memo), self.tokenizer, self.layers_path)

    @contextmanager
    def taps(self, layer_ids: Sequence[int]) -> Iterator[Taps]:
        """Collect the outputs of these layers, or of the decoder itself for OUTPUT, in every forward inside the `with`.

        What the decoder gives is normed: every family in transformers applies its final norm there and not in the head.
        """
        taps = Taps(layer_ids)

        def keep(layer: int) -> Any:
            def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
                taps.outputs[layer] = output if isinstance(output, torch.Tensor) else output[0]

            return hook

        modules = {layer: self.decoder if layer == OUTPUT else self.layers[layer] for layer in layer_ids}
        handles = [module.register_forward_hook(keep(layer)) for layer, module in modules.items()]
        try:
            yield taps
        finally:
            for handle in handles:
                handle.remove()
            taps.outputs.clear()

    @torch.no_grad()
    def forward_layers(self, tokens_BS: torch.Tensor, **inputs: Any) -> None:
        """Run the decoder layers on token ids [B, S], without cache and LM head; taps collect what is wanted.

        Right padding needs no attention mask: under a causal target no real token sees it.
        """
        self.decoder(input_ids=tokens_BS, use_cache=False, **inputs)


def _cap_scores(model: Any) -> None:
    """Away from an attention without the cap on scores (Gemma 2), which transformers 5.17 chooses for it."""
    text = model.config.get_text_config()
    if getattr(text, "attn_logit_softcapping", None) is not None and text._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")


def find_decoder(model: Any) -> Any:
    """The module that runs the decoder layers, without an LM head, also inside a multimodal model.

    Raises InputError, naming the architecture, where there is none.
    """
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise InputError(f"the target's architecture {name} has an encoder; a drafter needs a decoder-only target")
    try:
        decoder = model.get_decoder()
        # a language model with its own head may be nested in another
        while hasattr(decoder, "get_decoder") and (inner := decoder.get_decoder()) is not decoder:
            decoder = inner
    except AttributeError as error:
        raise InputError(f"the target's architecture {name} is not a causal language model: {error}") from None
    return decoder


def find_decoder_layers(model: Any) -> str:
    """Path of the decoder layers' ModuleList inside the model's decoder.

    Raises InputError, naming the architecture, where they can't be found.
    """
    name = type(model).__name__
    decoder = find_decoder(model)
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = [
        (path.count("."), -sum(parameter.numel() for parameter in module.parameters()), path)
        for path, module in decoder.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not lists:
        raise InputError(f"the decoder layers of the target's architecture {name} can't be found ({count} expected)")
    return min(lists)[2]  # the outermost, and the largest of several


def _keep_only(module: nn.Module, kept: Sequence[nn.Module]) -> None:
    """Replace every submodule that neither is one of `kept` nor holds one by an empty one."""
    for name, child in module.named_children():
        if any(child is one for one in kept):
            continue
        inside = set(child.modules())
        if any(one in inside for one in kept):
            _keep_only(child, kept)
        else:
            setattr(module, name, nn.Identity())
