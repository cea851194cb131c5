"""Checkpoints from the loop's side: when, by whom, and with what state beside the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from draftmill import __version__
from draftmill.checkpoint.background import BackgroundSaver, Saved
from draftmill.checkpoint.schedule import SaveSchedule
from draftmill.compiling import BUILD_LOCK
from draftmill.monitor.phases import Phase
from draftmill.monitor.run import RunDirectory
from draftmill.pipeline.supervision import within
from draftmill.train.decoding import Decodings
from draftmill.train.replica import Replica
from draftmill.train.setup import Setup

LAST_SAVE_S = 30.0
"""Seconds that a save under way has after a failure; what it has written by then is no checkpoint yet."""


@dataclass(frozen=True)
class Heldout:
    """What an evaluation on the held-out samples measured; None where these weights were not evaluated.

    accept_length   tokens a block, teacher-forced, the target's own one counted
    accept_by_slot  chance that slot 1, 2, ... K-1 is kept, jointly with those before it
    """

    accept_length: float | None = None
    accept_by_slot: list[float] | None = None


class Saver:
    """The run's checkpoints; the first drafter of the first host writes them, in the background.

    Leaving its `with` statement waits for the last save and raises what it failed with, unless the run has failed
    itself: then the save has a little time left, and what becomes of it is logged.
    """

    def __init__(
        self, setup: Setup, run: RunDirectory, run_dir: Path, observe: Callable[[dict[str, Any]], None]
    ) -> None:
        """observe: gets the records that `report_decoded` adds to metrics.jsonl."""
        settings = setup.config.checkpoint
        self.setup, self.run, self.observe = setup, run, observe
        self.writes = setup.hosts.rank == 0
        self.writer: Replica | None = None
        self.schedule = SaveSchedule(settings.every_steps, settings.every_minutes)
        self.decodings = Decodings(setup.config, setup.shape.block_size - 1, run)
        self.background = BackgroundSaver(
            run_dir,
            keep_last=settings.keep_last,
            keep_best=settings.keep_best,
            on_saved=self._tell,
        )

    def prepare(self, writer: Replica) -> None:
        """Make the host buffers for the one replica whose weights are written; the others hold the same."""
        with BUILD_LOCK.beside():  # pinned memory is not allocated while another worker captures
            self.background.prepare(writer.weights(), writer.moments(), writer.average())
        self.writer = writer

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after `step` steps. Nobody waits for the host that writes, so only it asks."""
        return self.writes and self.schedule.due(step)

    def began(self) -> None:
        """A save was asked for: the minutes count from now."""
        self.run.phase(Phase.SAVING)
        self.schedule.saved()

    def request(self, step: int, finished: bool, heldout: Heldout) -> Callable[[Replica], Any]:
        """What a snapshot ticket asks of the replica: nothing but for the writer, which copies and goes on."""
        state = self.state(step, finished, heldout)

        def save(replica: Replica) -> Any:
            if replica is not self.writer:
                return None
            return self.background.save(step, replica.weights(), replica.moments(), state, replica.average())

        return save

    def state(self, step: int, finished: bool, heldout: Heldout) -> dict[str, Any]:
        """All that a resume or an export needs to know besides tensors."""
        setup = self.setup
        target = setup.config.target
        return {
            "draftmill": __version__,
            "target": {
                "model": target.model,
                "revision": target.revision or getattr(setup.target_config, "_commit_hash", None),
                "architectures": list(setup.target_config.architectures or []),
            },
            "epoch": setup.stream.epoch_of(step - 1),
            "total_steps": setup.stream.total_steps,
            "finished": finished,
            **asdict(heldout),
            "shape": setup.shape.to_dict(),
            "config": setup.config.model_dump(mode="json"),
            "data_fingerprint": setup.store.fingerprint,
            "batches_per_step": setup.stream.group,
            "training_length": setup.config.data.max_length,
        }

    def report_decoded(self) -> None:
        """Add to the metrics what was decoded with checkpoints since, and let it begin with one that was saved."""
        self._write(self.decodings.take())

    def _write(self, records: list[dict[str, Any]]) -> None:
        for record in records:
            self.run.metrics(record)
            self.observe(record)

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exception: BaseException | None, trace: TracebackType | None
    ) -> None:
        if exception is None:
            try:
                self.background.close()
                self._write(self.decodings.finish())
            finally:
                self.decodings.abandon()
            return
        self.decodings.abandon()
        if (error := within(LAST_SAVE_S, self.background.close, "the last save")) is not None:
            self.run.log.error(f"the last checkpoint was not written: {error}")

    def _tell(self, saved: Saved) -> None:
        self.run.log.info(f"saved {saved.folder.name} in {saved.write_s:.1f} s")
        self.decodings.saved(saved)
