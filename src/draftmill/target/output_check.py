"""Whether the target's predictions can be made again from its last hidden state, found out on the target itself.

A loss that compares with the target has only the decoder's output and the frozen head. Were the final norm missing
there or applied twice, or did the model do something to its logits that the head does not know of, the drafter would
learn another model's predictions, and its loss would look as good.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from draftmill.errors import InputError
from draftmill.target.head import TargetHead
from draftmill.target.model import OUTPUT, Target

EXACT = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Largest relative difference of a token's logits, by type: the same product, rounded at other places."""
NUM_TOKENS = 16


@torch.no_grad()
def check_output(target: Target, head: TargetHead) -> None:
    """Raise InputError, naming the architecture, unless the head makes the model's own logits of the decoder's output.

    target: whole, with its LM head. One layer of it is run: what follows the layers is what is checked.
    """
    text = target.text_config
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(text.vocab_size, (1, NUM_TOKENS), generator=generator).to(target.device)
    with _one_layer(target), target.taps([OUTPUT]) as taps:
        expected = target.model(input_ids=tokens, use_cache=False).logits.float()
        found = head.logits(taps.outputs[OUTPUT].to(head.head_VH)).float().to(expected.device)
    difference = float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
    if not difference <= EXACT.get(target.dtype, 3e-2):
        raise InputError(
            f"the logits of {type(target.model).__name__} are not what its LM head makes of its last hidden state "
            f"(they differ by {difference:.1e}), so a drafter can't be compared with them; use train.loss="
            "cross_entropy and train.labels=data"
        )


@contextmanager
def _one_layer(target: Target) -> Iterator[None]:
    """The target with its first layer only, inside the `with`."""
    rest = list(target.layers)[1:]
    del target.layers[1:]
    try:
        yield
    finally:
        target.layers.extend(rest)
