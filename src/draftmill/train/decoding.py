"""Real speculative decoding while training, where it was asked for: a few held-out prompts after each checkpoint.

    writer thread  saved(checkpoint) ──► queue ──► main thread  take(): begins a process, looks whether it has ended

Owns the process that decodes. The targets of the run end at their last tap and can't generate, so the process loads a
whole target, and the checkpoint from the disk. Nothing in a run waits for it, but its very end for a minute, and
nothing that goes wrong with it ends the run.
"""

from __future__ import annotations

import contextlib
import json
import queue
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO, Any

import torch

from draftmill.checkpoint.background import Saved
from draftmill.config import Config, TrainConfig, cuda_index
from draftmill.errors import InputError
from draftmill.monitor.run import RunDirectory

WAIT_S = 60.0
"""Seconds that the run's end waits for a decoding under way."""
LOOK_EVERY_S = 0.5
KILL_S = 5.0
"""Seconds that a process which was killed has for ending."""
MAX_NEW_TOKENS = 256
"""Tokens of an answer at most; as many as `draftmill evaluate` decodes by default."""
PROGRAM = (sys.executable, "-m", "draftmill.evaluate.beside")


def check_decoding(settings: TrainConfig, devices: Iterable[torch.device]) -> None:
    """Raise InputError where the device for decoding is not there, or is one of those that the run uses."""
    name, index = settings.decode_device, cuda_index(settings.decode_device)
    if settings.decode_prompts == 0 or index is None:
        return
    if (count := torch.cuda.device_count()) <= index:
        raise InputError(f"train.decode_device is {name}; this machine has {count} CUDA devices")
    if torch.device(name) in set(devices):
        raise InputError(
            f"train.decode_device {name} is one that the run uses, whose memory a whole target beside it may take "
            "away; give cpu, or a GPU that target.devices and drafter.devices leave free"
        )


@dataclass(frozen=True)
class _Decoding:
    """A process under way, and the files that its output goes to."""

    checkpoint: Saved
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    errors: IO[bytes]


class Decodings:
    """The decodings of a run, one at a time. Used by the main thread, but for `saved`."""

    def __init__(self, config: Config, num_drafts: int, run: RunDirectory) -> None:
        """num_drafts: tokens drafted a step, the whole block's."""
        self.settings, self.trusts, self.run = config.train, config.target.trust_remote_code, run
        self.num_drafts = num_drafts
        self._saved: queue.SimpleQueue[Saved] = queue.SimpleQueue()
        self._under_way: _Decoding | None = None

    def saved(self, checkpoint: Saved) -> None:
        """A checkpoint is on the disk. Called in any thread; never waits."""
        if self.settings.decode_prompts:
            self._saved.put(checkpoint)

    def take(self) -> list[dict[str, Any]]:
        """Records of decodings that have ended, for metrics.jsonl; begins that of a checkpoint that was saved."""
        records, saved = self._ended(), []
        while not self._saved.empty():
            saved.append(self._saved.get())
        for checkpoint in saved[:-1]:
            self.run.log.info(f"no decoding with {checkpoint.folder.name}: a newer one is there")
        if saved:
            self._begin(saved[-1])
        return records

    def finish(self) -> list[dict[str, Any]]:
        """As `take`, and waits a minute for the decoding under way, or not at all where the run is asked to stop."""
        if self.run.stop_requested() != "no":
            records = self._ended()
            self.abandon()
            return records
        records, deadline = self.take(), time.monotonic() + WAIT_S
        if self._under_way is not None:
            name = self._under_way.checkpoint.folder.name
            self.run.log.info(f"waiting for the decoding with {name}, {WAIT_S:.0f} s at most")
        while self._under_way is not None and time.monotonic() < deadline and self.run.stop_requested() == "no":
            try:
                self._under_way.process.wait(LOOK_EVERY_S)
            except subprocess.TimeoutExpired:
                continue
            records += self._ended()
        self.abandon()
        return records

    def abandon(self) -> None:
        """End the decoding under way, if there is one, and say so."""
        if self._under_way is None:
            return
        self._under_way.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in a device or a disk is left behind
            self._under_way.process.wait(KILL_S)
        checkpoint, _, _ = self._close(self._under_way)
        self.run.log.info(
            f"the decoding with {checkpoint.folder.name} is ended with the run; {self._by_hand(checkpoint)}"
        )

    def _begin(self, checkpoint: Saved) -> None:
        name = checkpoint.folder.name
        if self._under_way is not None:
            self.run.log.info(
                f"no decoding with {name}: that with {self._under_way.checkpoint.folder.name} is still under way; "
                f"{self._by_hand(checkpoint)}"
            )
            return
        request = {
            "source": str(checkpoint.folder),
            "max_new_tokens": MAX_NEW_TOKENS,
            "limit": self.settings.decode_prompts,
            "draft_tokens": str(self.num_drafts),
            "device": self.settings.decode_device,
            "trust_remote_code": self.trusts,
            "record": False,
            "as_json": True,
        }
        try:
            output, errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - closed in _close
            process = subprocess.Popen(
                [*PROGRAM, json.dumps(request)], stdin=subprocess.PIPE, stdout=output, stderr=errors
            )
        except OSError as error:
            self.run.warn(f"the decoding with {name} can't begin: {error}")
            return
        self._under_way = _Decoding(checkpoint, process, output, errors)
        self.run.log.info(f"decoding with {name} on {self.settings.decode_device}, in process {process.pid}")

    def _ended(self) -> list[dict[str, Any]]:
        """The record of the decoding under way if it has ended well; logs what has not."""
        if self._under_way is None or (code := self._under_way.process.poll()) is None:
            return []
        checkpoint, output, errors = self._close(self._under_way)
        name = checkpoint.folder.name
        if code:
            said = (errors.strip().splitlines() or ["it said nothing"])[-1]
            self.run.warn(f"the decoding with {name} failed, exit code {code}: {said}; {self._by_hand(checkpoint)}")
            return []
        try:
            found = json.loads(output.splitlines()[-1])
            tau, answers = found["overall"][0]["tau_response_mean"], found["answers"]
        except (IndexError, KeyError, TypeError, ValueError) as error:
            self.run.warn(f"the decoding with {name} gave no result: {error!r}; {self._by_hand(checkpoint)}")
            return []
        self.run.log.info(f"decoded {answers} held-out prompts with {name}: tau {tau}")
        return [{"step": checkpoint.step, "decoded_tau": tau, "decoded_answers": answers}]

    def _close(self, decoding: _Decoding) -> tuple[Saved, str, str]:
        """Be done with a process that has ended; its checkpoint, output and errors."""
        texts = []
        for file in (decoding.output, decoding.errors):
            with file:
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        assert decoding.process.stdin is not None
        decoding.process.stdin.close()
        self._under_way = None
        return decoding.checkpoint, texts[0], texts[1]

    def _by_hand(self, checkpoint: Saved) -> str:
        return (
            f"by hand: draftmill evaluate {shlex.quote(str(checkpoint.folder))} --limit {self.settings.decode_prompts} "
            f"--draft-tokens {self.num_drafts}"
        )
