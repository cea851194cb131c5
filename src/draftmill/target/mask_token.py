"""The mask token: an id the target's embedding already has and the data never uses.

Never a new row: serving uses the target's own embedding, so a row added in training would be missing there.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from draftmill.errors import InputError

_RESERVED = re.compile(r"reserved|unused|extra_id|empty_output|fim_pad|repo_name|reponame|gh_stars|placeholder", re.I)


def resolve_mask_token(
    tokenizer: Any, num_embeddings: int, explicit: int | None = None, used: Collection[int] | None = None
) -> int:
    """Choose the mask token's id: the explicit one, the tokenizer's own, a row past its vocabulary, a reserved one.

    num_embeddings: rows of the target's embedding. used: token ids that the data holds, where known.
    Raises InputError for an explicit id that can't serve, and, naming the choices, where none is found.
    """
    special = {getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id", "bos_token_id")} - {None}
    used = used if used is not None else ()
    if explicit is not None:
        if not 0 <= explicit < num_embeddings:
            raise InputError(
                f"drafter.mask_token_id {explicit} lies outside the target's {num_embeddings} embeddings; choose an id "
                "below that which the data never uses"
            )
        if explicit in special or explicit in used:
            what = "a pad, eos or bos token" if explicit in special else "a token that the data holds"
            raise InputError(f"drafter.mask_token_id {explicit} is {what}; choose an id that never occurs")
        return explicit
    mask = getattr(tokenizer, "mask_token_id", None)
    if mask is not None and mask < num_embeddings and mask not in special and mask not in used:
        return mask
    spare = next((index for index in range(len(tokenizer), num_embeddings) if index not in used), None)
    if spare is not None:
        return spare
    added = {index: str(token) for index, token in sorted(tokenizer.added_tokens_decoder.items())}
    for index, token in added.items():
        if _RESERVED.search(token) and index < num_embeddings and index not in special and index not in used:
            return index
    choices = ", ".join(f"{index} {token}" for index, token in list(added.items())[:12] if index not in special)
    raise InputError(
        f"the target's tokenizer has no mask token, no embedding row without a token and no reserved token; set "
        f"drafter.mask_token_id to an id that the data never uses (special tokens: {choices or 'none'})"
    )
