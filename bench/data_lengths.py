"""Lengths drawn to resemble the bucket table of a real run: 1,095,082 samples, edges [770, 1216, 1728, 2432, 3296,
8193], 2283 batches in the first bucket, 27883 in the last, 59823 in all (budget 32768, at most 64 rows).

Not a benchmark itself: the input of those that are.
"""

from __future__ import annotations

import numpy as np

NUM_SAMPLES = 1_095_082
EDGES = [770, 1216, 1728, 2432, 3296, 8193]


def draw_lengths(num_samples: int = NUM_SAMPLES, seed: int = 0) -> np.ndarray:
    """Tokens of each sample, int32: a tenth short, most in the middle and falling off, a sixth long."""
    random = np.random.default_rng(seed)
    short = random.uniform(64, EDGES[0], int(0.1191 * num_samples))
    long = np.exp(random.uniform(np.log(EDGES[4]), np.log(EDGES[5]), int(0.1418 * num_samples)))
    scale, room = 412.0, EDGES[4] - EDGES[0]
    share = random.random(num_samples - len(short) - len(long)) * (1.0 - np.exp(-room / scale))
    middle = EDGES[0] - scale * np.log1p(-share)
    lengths = np.concatenate([short, middle, long]).astype(np.int32)
    return random.permutation(lengths)
