"""A decoding step captured as one CUDA graph, so that its time is the GPU's and not that of launching.

Owns warm-up, capture and replay. The captured function must work on buffers that outlive the graph, have one shape and
never read a value back to the host. Its result lies in the graph's memory and is overwritten by the next replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

_WARM_UP = 3


class CapturedStep:
    """A function of no arguments on `device`, captured; calling it replays the graph and gives the same tensor.

    `state` are the tensors that the function moves on: they are put back after warm-up, as if it had never run.
    Raises RuntimeError where the function does something that a graph can't hold.
    """

    def __init__(
        self, function: Callable[[], torch.Tensor], device: torch.device, state: Sequence[torch.Tensor]
    ) -> None:
        before = [tensor.clone() for tensor in state]
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                function()
        torch.cuda.current_stream(device).wait_stream(stream)
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)
        torch.cuda.synchronize(device)
        self._function = function  # holds every buffer that the graph reads
        self._graph = torch.cuda.CUDAGraph()
        # The default capture stream belongs to the first device that ever captured: name our own.
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._result = function()

    def __call__(self) -> torch.Tensor:
        """Replay on the current stream; the result is overwritten by the next call."""
        self._graph.replay()
        return self._result
