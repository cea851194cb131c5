"""Which id stands for a token to be drafted: a row the target has and the data never uses (case B10)."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftmill.errors import InputError
from draftmill.target.mask_token import resolve_mask_token
from tiny import save_tokenizer


class Fake:
    """A tokenizer's facts: its length, its special ids and its added tokens."""

    def __init__(self, length: int, added: dict[int, str] | None = None, mask: int | None = None) -> None:
        self.length = length
        self.added_tokens_decoder = dict(added or {})
        self.mask_token_id, self.pad_token_id, self.eos_token_id, self.bos_token_id = mask, 0, 2, 1

    def __len__(self) -> int:
        return self.length


def test_the_first_row_without_a_token_is_taken_as_qwen3_has_it() -> None:
    assert resolve_mask_token(Fake(151669), 151936) == 151669


def test_a_spare_row_that_the_data_uses_is_passed_over() -> None:
    assert resolve_mask_token(Fake(100), 128, used={100, 101}) == 102


def test_the_tokenizers_own_mask_token_comes_first() -> None:
    assert resolve_mask_token(Fake(100, mask=7), 128) == 7


def test_a_reserved_token_serves_where_no_row_is_spare(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    expected = tokenizer.convert_tokens_to_ids("<reserved_0>")
    assert resolve_mask_token(tokenizer, len(tokenizer)) == expected
    with pytest.raises(InputError, match=r"drafter\.mask_token_id"):
        resolve_mask_token(tokenizer, len(tokenizer), used={expected})


def test_none_found_names_the_choices() -> None:
    with pytest.raises(InputError, match=r"set drafter\.mask_token_id .* 5 <special>"):
        resolve_mask_token(Fake(100, added={0: "<pad>", 5: "<special>"}), 100)


@pytest.mark.parametrize(
    ("given", "why"), [(100, "outside"), (-1, "outside"), (2, "pad, eos or bos"), (9, "data holds")]
)
def test_an_explicit_id_that_can_not_serve_is_refused(given: int, why: str) -> None:
    with pytest.raises(InputError, match=why):
        resolve_mask_token(Fake(100), 100, explicit=given, used={9})


def test_an_explicit_id_is_kept() -> None:
    assert resolve_mask_token(Fake(100), 100, explicit=50, used={9}) == 50
