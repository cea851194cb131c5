"""Decoding the real small target: the same tokens as its own `generate`, plainly and with any drafter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftmill.config import DrafterConfig
from draftmill.drafter.network import Drafter
from draftmill.drafter.shape import shape_for
from draftmill.evaluate.decode import Decoder
from draftmill.evaluate.prompts import from_turns
from draftmill.evaluate.run import evaluate
from draftmill.target.generate import stop_tokens
from draftmill.target.generate_sampling import Sampling
from draftmill.target.load import load_target

NUM_TOKENS = 16


@pytest.mark.smollm2
def test_plain_and_speculative_output_are_the_model_s_own(smollm2_folder: Path) -> None:
    torch.set_num_threads(1)
    target = load_target(str(smollm2_folder), dtype="float32")
    prompt = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Name three rivers."}], tokenize=False, add_generation_prompt=True
    )
    ids = target.tokenizer(prompt, add_special_tokens=False).input_ids
    own = target.model.generate(torch.tensor([ids]), max_new_tokens=NUM_TOKENS, do_sample=False)[0, len(ids) :].tolist()
    torch.manual_seed(0)
    drafter = Drafter(shape_for(target.config, DrafterConfig(num_layers=1, num_taps=3, block_size=4), 17)).eval()
    decoder = Decoder(target, drafter)
    stop = stop_tokens(target.model, target.tokenizer)
    for num_drafts in (0, 3):
        response = decoder.generate(ids, num_drafts=num_drafts, sampling=Sampling(max_new_tokens=NUM_TOKENS), stop=stop)
        assert response.tokens == own

    question = from_turns("rivers", "s", "c", ["Name three rivers."])
    found = evaluate(drafter, target, [question], sampling=Sampling(max_new_tokens=4), draft_tokens=[2])
    [trial] = found.trials
    assert trial.num_prompt_tokens == len(ids)
    assert trial.plain.tokens == trial.drafted[2].tokens == own[:4]
