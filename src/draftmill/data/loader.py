"""Reading ahead: from the store through plan and anchors into preallocated, pinned host buffers.

Owns the buffers and one reading thread. Never decides the order (plan.py) nor where the anchors lie (anchors.py).

    items ──► reading thread ──► ready batches, in order ──► next() ──► target workers
                   ▲                                                        │
                   └───────────── free buffers ◄──── release(batch) ◄───────┘

The reading thread waits for a free buffer and for room among the ready batches; it is unblocked by release(), next()
and close(). next() waits for a ready batch; it is unblocked by the reading thread and by close().
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

import numpy as np
import torch

from draftmill.data.anchors import Anchors, draw_anchors
from draftmill.data.plan import BatchPlan
from draftmill.data.store import Store
from draftmill.records import BatchKind, Blocks, HostBatch, WorkItem


@dataclass(frozen=True, slots=True)
class _Buffers:
    """What one batch lives in, sized for the largest batch of the run."""

    tokens: torch.Tensor
    positions: torch.Tensor | None
    documents: torch.Tensor | None
    source_T: torch.Tensor
    blocks: tuple[Blocks, ...]


@dataclass(frozen=True, slots=True)
class Coverage:
    """How many of the positions that could be anchors were, over the training batches read so far.

    num_starved counts documents that have candidates and got no anchor, once for each draw.
    """

    num_documents: int = 0
    num_candidates: int = 0
    num_anchors: int = 0
    num_starved: int = 0

    @property
    def share(self) -> float:
        """Anchors of candidates; 1 where there are none."""
        return self.num_anchors / self.num_candidates if self.num_candidates else 1.0

    def plus(self, anchors: Anchors) -> Coverage:
        """This, with one batch's draw counted in."""
        return Coverage(
            self.num_documents + len(anchors.candidates_D),
            self.num_candidates + anchors.num_candidates,
            self.num_anchors + anchors.num_anchors,
            self.num_starved + anchors.num_starved,
        )


class Loader:
    """The run's batches, read ahead in order by one thread. Every public function is thread-safe."""

    def __init__(
        self,
        store: Store,
        plan: BatchPlan,
        heldout_plan: BatchPlan | None,
        items: Iterable[WorkItem],
        *,
        context_slots: int,
        anchor_slots: int,
        block_size: int,
        anchor_draws: int,
        seed: int,
        pin: bool,
        read_ahead: int,
        buffers: int,
        short_blocks: float = 0.0,
    ) -> None:
        """Allocate the buffers and begin to read.

        Args:
            plan, heldout_plan: where items of kind TRAIN and HELDOUT look up their samples.
            items: the batches to read, in the order `next` gives them; every host passes its own.
            context_slots, anchor_slots: T and A of every Blocks.
            anchor_draws: Blocks of each batch; a held-out batch's are the same whenever it is read.
            pin: page-locked memory, for asynchronous copies to CUDA.
            read_ahead: batches ready at most.
            buffers: batches in existence at most, those held by workers included; more than the workers ever hold.
            short_blocks: share of the blocks of TRAIN items that are short ones (anchors.py).

        Raises:
            ValueError: context_slots is too small for the plans, or there is no buffer.
        """
        plans = [plan] if heldout_plan is None else [plan, heldout_plan]
        needed = max(each.context_slots for each in plans)
        if context_slots < needed:
            raise ValueError(f"context_slots must be at least {needed} for this plan, got {context_slots}")
        if buffers < 1 or read_ahead < 1:
            raise ValueError(f"at least one buffer and one batch of read-ahead are needed, got {buffers}, {read_ahead}")
        self._store, self._plan, self._heldout_plan = store, plan, heldout_plan
        self._items: Iterator[WorkItem] = iter(items)
        self._block_size, self._anchor_draws, self._seed = block_size, anchor_draws, seed
        self._read_ahead, self._short_blocks = read_ahead, short_blocks
        padded = max(each.padded_slots for each in plans)
        packed = any(each.batching == "packed" for each in plans)
        self._free = [_allocate(padded, packed, context_slots, anchor_slots, anchor_draws, pin) for _ in range(buffers)]
        self._held: dict[int, _Buffers] = {}
        self._ready: deque[HostBatch] = deque()
        self._ended = self._closed = False
        self._error: BaseException | None = None
        self._coverage = Coverage()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read_all, name="draftmill-loader", daemon=True)
        self._thread.start()

    def next(self) -> HostBatch | None:
        """The next batch in order; waits for it. None at the end and after `close`.

        Raises:
            Exception: whatever ended the reading thread, once the batches read before it are handed out.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended or self._closed)
            if self._closed:
                return None
            if self._ready:
                batch = self._ready.popleft()
                self._changed.notify_all()
                return batch
            if self._error is not None:
                raise self._error
            return None

    def release(self, batch: HostBatch) -> None:
        """Give a batch's buffers back: its tensors may be overwritten from now on.

        Raises:
            RuntimeError: the batch is not out.
        """
        with self._changed:
            buffers = self._held.pop(batch.sequence, None)
            if buffers is None:
                raise RuntimeError(f"batch {batch.sequence} was released twice, or is none of this loader's")
            self._free.append(buffers)
            self._changed.notify_all()

    def coverage(self) -> Coverage:
        """What the anchors of the training batches read so far cover."""
        return self._coverage

    def close(self) -> None:
        """Stop reading and unblock everybody; can be called twice. Batches that are out stay valid."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_all(self) -> None:
        try:
            for item in self._items:
                buffers = self._wait_for_buffers()
                if buffers is None:
                    return
                batch = self._fill(item, buffers)
                with self._changed:
                    if item.sequence in self._held:
                        raise RuntimeError(f"batch {item.sequence} is asked for while it is still out")
                    self._held[item.sequence] = buffers
                    self._ready.append(batch)
                    self._changed.notify_all()
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _wait_for_buffers(self) -> _Buffers | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._free and len(self._ready) < self._read_ahead))
            return None if self._closed else self._free.pop()

    def _fill(self, item: WorkItem, buffers: _Buffers) -> HostBatch:
        if item.kind is BatchKind.EMPTY:
            return self._fill_empty(item, buffers)
        plan = self._heldout_plan if item.kind is BatchKind.HELDOUT else self._plan
        if plan is None:
            raise RuntimeError(f"batch {item.sequence} is a held-out one, but no sample was held out")
        sample_ids = plan.sample_ids(item.epoch, item.index)
        rows = plan.rows(item.epoch, item.index)
        samples = self._store.read(sample_ids)
        lengths = np.array([len(ids) for ids, _ in samples], dtype=np.int64)
        num_rows, row_length = plan.shape(int(lengths.max()), len(samples))
        row_starts, offsets = _place(rows, lengths, row_length)
        num_tokens = int(lengths.sum())
        within = np.arange(num_tokens) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        source_T = buffers.source_T[:num_tokens]
        source_T.numpy()[:] = np.repeat(offsets, lengths) + within
        ids_T = np.concatenate([ids for ids, _ in samples])
        tokens_BS = buffers.tokens[: num_rows * row_length].view(num_rows, row_length)
        _scatter(tokens_BS, source_T, ids_T, 0)
        positions_BS = documents_BS = None
        if buffers.positions is not None and buffers.documents is not None and plan.batching == "packed":
            positions_BS = buffers.positions[: num_rows * row_length].view(num_rows, row_length)
            documents_BS = buffers.documents[: num_rows * row_length].view(num_rows, row_length)
            _scatter(positions_BS, source_T, within, 0)
            _scatter(documents_BS, source_T, np.repeat(np.arange(len(rows)) - row_starts, lengths), -1)
        mask_T = np.concatenate([mask for _, mask in samples])
        scored = self._fill_blocks(item, buffers.blocks, ids_T, within, mask_T, lengths)
        return HostBatch(
            sequence=item.sequence,
            kind=item.kind,
            epoch=item.epoch,
            index=item.index,
            bucket=plan.bucket(item.epoch, item.index),
            sample_ids_B=sample_ids,
            tokens_BS=tokens_BS,
            positions_BS=positions_BS,
            documents_BS=documents_BS,
            source_T=source_T,
            blocks=buffers.blocks,
            num_rows_scored=scored,
        )

    def _fill_blocks(
        self,
        item: WorkItem,
        blocks: tuple[Blocks, ...],
        ids_T: np.ndarray,
        positions_T: np.ndarray,
        mask_T: np.ndarray,
        lengths: np.ndarray,
    ) -> tuple[int, ...]:
        num_tokens, scored = len(ids_T), []
        for draw, block in enumerate(blocks):
            anchors = draw_anchors(
                mask_T,
                lengths,
                num_slots=len(block.anchors_A),
                block_size=self._block_size,
                seed=self._seed,
                epoch=item.epoch,
                index=item.index,
                draw=draw,
                short_share=self._short_blocks if item.kind is BatchKind.TRAIN else 0.0,
            )
            for target, values in ((block.tokens_T.numpy(), ids_T), (block.positions_T.numpy(), positions_T)):
                target[:num_tokens] = values
                target[num_tokens:] = 0
            block.anchors_A.numpy()[:] = anchors.anchors_A
            block.starts_A.numpy()[:] = anchors.starts_A
            block.slots_A.numpy()[:] = anchors.slots_A
            block.absent_A.numpy()[:] = anchors.absent_A
            scored.append(anchors.num_scored)
            if item.kind is BatchKind.TRAIN:
                self._coverage = self._coverage.plus(anchors)
        return tuple(scored)

    def _fill_empty(self, item: WorkItem, buffers: _Buffers) -> HostBatch:
        for block in buffers.blocks:
            for field in fields(block):
                getattr(block, field.name).zero_()
        return HostBatch(
            sequence=item.sequence,
            kind=item.kind,
            epoch=item.epoch,
            index=item.index,
            bucket=0,
            sample_ids_B=np.empty(0, dtype=np.int64),
            tokens_BS=buffers.tokens[:0].view(0, 0),
            positions_BS=None,
            documents_BS=None,
            source_T=buffers.source_T[:0],
            blocks=buffers.blocks,
            num_rows_scored=(0,) * len(buffers.blocks),
        )


def _allocate(
    padded_slots: int, packed: bool, context_slots: int, anchor_slots: int, anchor_draws: int, pin: bool
) -> _Buffers:
    def integers(size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, pin_memory=pin)

    return _Buffers(
        tokens=integers(padded_slots, torch.int64),
        positions=integers(padded_slots, torch.int32) if packed else None,
        documents=integers(padded_slots, torch.int32) if packed else None,
        source_T=integers(context_slots, torch.int64),
        blocks=tuple(Blocks.empty(context_slots, anchor_slots, pin=pin) for _ in range(anchor_draws)),
    )


def _place(rows: np.ndarray, lengths: np.ndarray, row_length: int) -> tuple[np.ndarray, np.ndarray]:
    """For each sample, the first sample of its row, and the flat index b*S + s of its own first token."""
    row_starts = np.searchsorted(rows, rows, side="left")
    ends = np.cumsum(lengths)
    before = ends - lengths  # tokens of all samples before this one
    return row_starts, rows.astype(np.int64) * row_length + before - before[row_starts]


def _scatter(target: torch.Tensor, source_T: torch.Tensor, values_T: np.ndarray, fill: int) -> None:
    flat = target.view(-1).numpy()
    flat.fill(fill)
    flat[source_T.numpy()] = values_T
