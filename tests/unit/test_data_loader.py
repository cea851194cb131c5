"""The loader: batches in order with the right contents, bounded, and nobody left waiting."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftmill.data.anchors import draw_anchors
from draftmill.data.build import write_store
from draftmill.data.loader import Loader
from draftmill.data.plan import BatchPlan, split_heldout
from draftmill.data.store import Store
from draftmill.records import BatchKind, HostBatch, WorkItem

SIZES: dict[str, Any] = {"anchor_slots": 48, "block_size": 8, "anchor_draws": 2, "seed": 11, "pin": False}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    random = np.random.default_rng(0)
    lengths = random.integers(2, 129, 300)
    samples = [(random.integers(1, 900, n).astype(np.int32), random.random(n) < 0.8) for n in lengths]
    folder = tmp_path_factory.mktemp("data") / "store"
    write_store(folder, samples, vocab_size=900, max_length=128)
    return Store.open(folder)


def make_plans(store: Store, batching: Any = "bucketed") -> tuple[BatchPlan, BatchPlan]:
    settings: dict[str, Any] = {"max_length": 128, "token_budget": 512, "min_rows": 2, "max_rows": 16}
    settings |= {"num_buckets": 3, "bucket_edges": None, "round_to": 16, "seed": 3, "batching": batching}
    train, heldout = split_heldout(store.num_samples, 20, seed=0)
    return tuple(BatchPlan(store.lengths, **settings, sample_ids=ids) for ids in (train, heldout))  # type: ignore[return-value]


def make_loader(store: Store, items: Any, batching: Any = "bucketed", **changed: Any) -> Loader:
    plan, heldout = make_plans(store, batching)
    slots = max(plan.context_slots, heldout.context_slots)
    options = {**SIZES, "context_slots": slots, "read_ahead": 2, "buffers": 3, **changed}
    return Loader(store, plan, heldout, items, **options)


def train_items(count: int, epoch: int = 0) -> list[WorkItem]:
    return [WorkItem(index, BatchKind.TRAIN, epoch, index) for index in range(count)]


def assert_right(batch: HostBatch, store: Store, plan: BatchPlan, short_share: float = 0.0) -> None:
    samples = store.read(plan.sample_ids(batch.epoch, batch.index))
    ids = np.concatenate([ids for ids, _ in samples])
    mask = np.concatenate([mask for _, mask in samples])
    lengths = np.array([len(each) for each, _ in samples])
    assert batch.num_tokens == len(ids)
    tokens = batch.tokens_BS.flatten()
    assert tokens[batch.source_T].tolist() == ids.tolist()
    assert int(tokens.sum()) == int(ids.sum())  # the rest is zero
    positions = np.concatenate([np.arange(n) for n in lengths])
    for draw, block in enumerate(batch.blocks):
        assert block.tokens_T[: len(ids)].tolist() == ids.tolist()
        assert block.positions_T[: len(ids)].tolist() == positions.tolist()
        assert not block.tokens_T[len(ids) :].any()
        assert not block.positions_T[len(ids) :].any()
        numbers = {"seed": 11, "epoch": batch.epoch, "index": batch.index, "draw": draw}
        anchors = draw_anchors(mask, lengths, num_slots=48, block_size=8, short_share=short_share, **numbers)
        assert block.anchors_A.tolist() == anchors.anchors_A.tolist()
        assert block.starts_A.tolist() == anchors.starts_A.tolist()
        assert block.slots_A.tolist() == anchors.slots_A.tolist()
        assert block.absent_A.tolist() == anchors.absent_A.tolist()
        assert batch.num_rows_scored[draw] == int(block.slots_A.sum())


@pytest.mark.parametrize("batching", ["bucketed", "packed"])
def test_an_epoch_in_order_with_all_its_tokens(store: Store, batching: str) -> None:
    plan, _ = make_plans(store, batching)
    count = plan.num_batches(2)
    with make_loader(store, train_items(count, epoch=2), batching) as loader:
        seen = []
        for sequence in range(count):
            batch = loader.next()
            assert batch is not None
            assert (batch.sequence, batch.kind, batch.epoch, batch.index) == (sequence, BatchKind.TRAIN, 2, sequence)
            assert batch.bucket == plan.bucket(2, sequence)
            assert_right(batch, store, plan)
            seen += batch.sample_ids_B.tolist()
            loader.release(batch)
        assert loader.next() is None
        assert loader.next() is None
    train, _ = split_heldout(store.num_samples, 20, seed=0)
    assert sorted(seen) == train.tolist()


def test_rows_of_a_bucketed_batch_are_its_samples(store: Store) -> None:
    with make_loader(store, train_items(3)) as loader:
        for _ in range(3):
            batch = loader.next()
            assert batch is not None
            assert batch.positions_BS is None
            assert batch.documents_BS is None
            assert batch.tokens_BS.dtype == torch.int64
            assert batch.tokens_BS.shape[1] % 16 == 0
            for row, (ids, _) in zip(batch.tokens_BS, store.read(batch.sample_ids_B), strict=True):
                assert row.tolist() == ids.tolist() + [0] * (len(row) - len(ids))
            loader.release(batch)


def test_packed_rows_say_where_each_document_lies(store: Store) -> None:
    with make_loader(store, train_items(3), "packed") as loader:
        for _ in range(3):
            batch = loader.next()
            assert batch is not None
            assert batch.tokens_BS.shape == (4, 128)
            assert batch.positions_BS is not None
            assert batch.documents_BS is not None
            found = {}
            for row in range(4):
                for document in range(int(batch.documents_BS[row].max()) + 1):
                    places = (batch.documents_BS[row] == document).nonzero().flatten()
                    assert batch.positions_BS[row][places].tolist() == list(range(len(places)))
                    assert places.tolist() == list(range(int(places[0]), int(places[0]) + len(places)))
                    found[tuple(batch.tokens_BS[row][places].tolist())] = True
            assert list(found) == [tuple(ids.tolist()) for ids, _ in store.read(batch.sample_ids_B)]
            assert int((batch.documents_BS >= 0).sum()) == batch.num_tokens
            assert not batch.tokens_BS[batch.documents_BS < 0].any()
            loader.release(batch)


def test_heldout_batches_have_the_same_anchors_whenever_they_are_read(store: Store) -> None:
    held = [
        WorkItem(0, BatchKind.HELDOUT, 0, 0),
        WorkItem(1, BatchKind.TRAIN, 4, 1),
        WorkItem(2, BatchKind.HELDOUT, 0, 0),
    ]
    with make_loader(store, held) as loader:
        first, _, again = (loader.next() for _ in range(3))
        assert first is not None
        assert again is not None
        assert first.sample_ids_B.tolist() == again.sample_ids_B.tolist()
        assert first.blocks[0].anchors_A.tolist() == again.blocks[0].anchors_A.tolist()
        assert first.blocks[0].anchors_A.any()
        assert_right(first, store, make_plans(store)[1])


def test_short_blocks_are_for_training_alone(store: Store) -> None:
    items = [*train_items(1), WorkItem(1, BatchKind.HELDOUT, 0, 0)]
    plan, heldout = make_plans(store)
    with make_loader(store, items, buffers=1, short_blocks=0.7) as loader:
        train = loader.next()
        assert train is not None
        assert_right(train, store, plan, short_share=0.7)
        assert train.blocks[0].absent_A.any()
        loader.release(train)
        held = loader.next()  # in the same buffers
        assert held is not None
        assert_right(held, store, heldout)
        assert not held.blocks[0].absent_A.any()


def test_an_empty_batch_has_no_token_and_no_block(store: Store) -> None:
    items = [*train_items(1), WorkItem(1, BatchKind.EMPTY, 0, 0)]
    with make_loader(store, items, buffers=1, short_blocks=1.0) as loader:
        full = loader.next()
        assert full is not None
        loader.release(full)
        batch = loader.next()  # in the same buffers
        assert batch is not None
        assert (batch.num_tokens, tuple(batch.tokens_BS.shape), batch.num_rows_scored) == (0, (0, 0), (0, 0))
        for block in batch.blocks:
            assert not any(getattr(block, field.name).any() for field in fields(block))


def wait_for(condition: Any) -> bool:
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return bool(condition())


def test_it_reads_no_further_ahead_than_told_and_never_beyond_its_buffers(store: Store) -> None:
    taken: list[int] = []

    def items() -> Iterator[WorkItem]:
        for item in train_items(12):
            taken.append(item.sequence)
            yield item

    with make_loader(store, items(), read_ahead=2, buffers=4) as loader:
        assert wait_for(lambda: len(taken) == 3)  # two ready, and the next one is waiting for room
        time.sleep(0.05)
        assert len(taken) == 3
        held = [loader.next() for _ in range(4)]
        time.sleep(0.05)
        assert len(taken) == 5  # every buffer is out
        assert held[0] is not None
        loader.release(held[0])
        assert wait_for(lambda: len(taken) == 6)


def test_buffers_are_used_again_and_a_second_release_is_an_error(store: Store) -> None:
    with make_loader(store, train_items(9), buffers=2, read_ahead=1) as loader:
        places = set()
        for _ in range(9):
            batch = loader.next()
            assert batch is not None
            places.add(batch.blocks[0].tokens_T.data_ptr())
            loader.release(batch)
        assert len(places) <= 2
        with pytest.raises(RuntimeError, match="released twice"):
            loader.release(batch)


def test_the_readers_error_comes_after_what_was_read_before_it(store: Store) -> None:
    def items() -> Iterator[WorkItem]:
        yield from train_items(2)
        raise ValueError("the list broke")

    with make_loader(store, items(), buffers=4) as loader:
        assert [loader.next().sequence for _ in range(2)] == [0, 1]  # type: ignore[union-attr]
        for _ in range(2):
            with pytest.raises(ValueError, match="the list broke"):
                loader.next()


def test_an_item_that_does_not_exist_is_an_error(store: Store) -> None:
    with make_loader(store, [WorkItem(0, BatchKind.TRAIN, 0, 10**6)]) as loader, pytest.raises(IndexError):
        loader.next()


def test_close_unblocks_everybody_and_can_be_called_twice(store: Store) -> None:
    entered = threading.Event()

    def endless() -> Iterator[WorkItem]:
        yield from train_items(2)
        entered.wait(5)

    loader = make_loader(store, endless(), buffers=2)
    results: list[HostBatch | None] = []
    threads = [threading.Thread(target=lambda: results.append(loader.next())) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert wait_for(lambda: len(results) == 2)
    entered.set()
    loader.close()
    loader.close()
    for thread in threads:
        thread.join(5)
    assert [batch is None for batch in results].count(True) == 2
    assert loader.next() is None


def test_several_threads_take_each_batch_once(store: Store) -> None:
    count = make_plans(store)[0].num_batches(0)
    taken: list[int] = []
    with make_loader(store, train_items(count), buffers=5) as loader:

        def work() -> None:
            while (batch := loader.next()) is not None:
                taken.append(batch.sequence)
                loader.release(batch)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert sorted(taken) == list(range(count))


def test_how_much_the_anchors_cover_is_counted(store: Store) -> None:
    plan, _ = make_plans(store)
    with make_loader(store, train_items(4), anchor_draws=1, buffers=4) as loader:
        batches = [loader.next() for _ in range(4)]
        coverage = loader.coverage()
    candidates = 0
    for index in range(4):
        for _, mask in store.read(plan.sample_ids(0, index)):
            candidates += int((mask[:-1] & mask[1:]).sum())
    assert coverage.num_candidates == candidates
    assert coverage.num_anchors == sum(int((batch.blocks[0].slots_A > 0).sum()) for batch in batches if batch)
    assert coverage.num_documents == sum(len(batch.sample_ids_B) for batch in batches if batch)
    assert coverage.num_starved == 0
    assert coverage.share == coverage.num_anchors / candidates


def test_too_few_context_slots_are_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="context_slots must be at least"):
        make_loader(store, [], context_slots=100)


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1])


def test_memory_stays_flat_over_many_batches(store: Store) -> None:
    plan, _ = make_plans(store)
    per_epoch = plan.num_batches(0)
    items = (WorkItem(n, BatchKind.TRAIN, *plan.locate(n)) for n in range(8 * per_epoch))
    with make_loader(store, items) as loader:
        for sequence in range(8 * per_epoch):
            if sequence == 2 * per_epoch:
                gc.collect()
                early = anonymous_bytes()
            batch = loader.next()
            assert batch is not None
            loader.release(batch)
        gc.collect()
        assert anonymous_bytes() - early < 2 << 20
