"""The store: what goes in comes out, nobody sees a half-written one, and a broken-off build goes on."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest

from draftmill.data import build as build_module
from draftmill.data.build import StoreBuild, write_shard, write_store
from draftmill.data.store import Store
from draftmill.errors import InputError

VOCAB = 1000
FINGERPRINT = "0123456789abcdef" * 2
META = {"max_length": 256, "vocab_size": VOCAB}


def draw_samples(count: int, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 257, count)
    return [(random.integers(0, VOCAB, n).astype(np.int32), random.random(n) < 0.5) for n in lengths]


def assert_holds(store: Store, samples: list[tuple[np.ndarray, np.ndarray]]) -> None:
    read = store.read(np.arange(len(samples)))
    assert store.num_samples == len(read) == len(samples)
    for (ids, mask), (expected_ids, expected_mask) in zip(read, samples, strict=True):
        assert ids.dtype == np.int32
        assert mask.dtype == np.bool_
        assert ids.tolist() == expected_ids.tolist()
        assert mask.tolist() == expected_mask.tolist()
    assert store.lengths.tolist() == [len(ids) for ids, _ in samples]
    assert store.num_supervised.tolist() == [int(mask.sum()) for _, mask in samples]


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    samples = draw_samples(300)
    write_store(tmp_path / "store", samples, vocab_size=VOCAB, max_length=256)
    store = Store.open(tmp_path / "store", max_length=256)
    assert_holds(store, samples)
    order = np.array([7, 7, 299, 0])
    assert [ids.tolist() for ids, _ in store.read(order)] == [samples[i][0].tolist() for i in order]
    assert store.meta["num_tokens"] == sum(len(ids) for ids, _ in samples)
    with pytest.raises(IndexError, match=r"0\.\.299, got 0\.\.300"):
        store.read(np.array([0, 300]))


def test_a_sample_is_a_view_of_the_mapped_file(tmp_path: Path) -> None:
    write_store(tmp_path / "store", draw_samples(5), vocab_size=VOCAB, max_length=256)
    ids, _ = Store.open(tmp_path / "store").read(np.array([2]))[0]
    assert not ids.flags.owndata
    assert not ids.flags.writeable


def test_datasets_opens_the_data_itself(tmp_path: Path) -> None:
    samples = draw_samples(20)
    meta = write_store(tmp_path / "store", samples, vocab_size=VOCAB, max_length=256)
    loaded = datasets.load_from_disk(str(tmp_path / "store" / meta["folder"]))
    assert loaded["input_ids"][3] == samples[3][0].tolist()
    assert loaded["loss_mask"][3] == samples[3][1].tolist()
    assert loaded.features["input_ids"] == datasets.List(datasets.Value("int32"))


def test_how_often_an_id_occurs(tmp_path: Path) -> None:
    samples = draw_samples(50)
    write_store(tmp_path / "store", samples, vocab_size=VOCAB, max_length=256)
    store = Store.open(tmp_path / "store")
    every = np.concatenate([ids for ids, _ in samples])
    assert [store.count(token) for token in range(VOCAB)] == np.bincount(every, minlength=VOCAB).tolist()
    assert store.count(VOCAB + 5) == store.count(-1) == 0


def test_a_long_shard_is_several_record_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "_TOKENS_PER_RECORD_BATCH", 500)
    samples = draw_samples(40)
    write_store(tmp_path / "store", samples, vocab_size=VOCAB, max_length=256)
    store = Store.open(tmp_path / "store")
    assert len(store._chunks) > 5
    assert_holds(store, samples)


def build_shards(
    output: Path, parts: list[list[tuple[np.ndarray, np.ndarray]]], fingerprint: str = FINGERPRINT
) -> None:
    with StoreBuild(output, fingerprint) as build:
        done = build.start()
        for index, part in enumerate(parts):
            if index not in done:
                write_shard(build.folder, index, part, {"index": index}, VOCAB)
        build.finish(len(parts), META, {}, VOCAB)


def test_shards_may_be_dropped_from_and_may_be_empty(tmp_path: Path) -> None:
    samples = draw_samples(30)
    kept = np.ones(10, dtype=np.bool_)
    kept[[0, 4, 9]] = False
    with StoreBuild(tmp_path / "store", FINGERPRINT) as build:
        build.start()
        for index, part in enumerate([samples[:10], [], samples[10:20], samples[20:]]):
            write_shard(build.folder, index, part, {}, VOCAB)
        masks = {0: kept, 3: np.zeros(10, dtype=np.bool_)}
        build.finish(4, META, {}, VOCAB, masks.get)
    store = Store.open(tmp_path / "store")
    left = [sample for index, sample in enumerate(samples[:20]) if index >= 10 or kept[index]]
    assert_holds(store, left)
    assert store.token_counts.sum() == sum(len(ids) for ids, _ in left)


PLACES = ["fsync:1", *(f"rename:{number}" for number in (2, 3, 5, 8, 12, 14, 15))]
BUILD_AND_DIE = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_data_store as tests

def dies_at(place):
    name, number = place.split(":")
    owner = os if name == "fsync" else Path
    original, left = getattr(owner, name), [int(number)]
    def counted(*arguments):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)
    setattr(owner, name, counted)

samples = tests.draw_samples(40)
for place in tests.PLACES:
    child = os.fork()
    if child == 0:
        dies_at(place)
        tests.build_shards(Path(sys.argv[1]) / place, [samples[:20], samples[20:]])
        os._exit(0)
    print(place, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture(scope="module")
def broken_off(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds of two shards, each killed with SIGKILL at another place."""
    folder = tmp_path_factory.mktemp("killed")
    command = [sys.executable, "-c", BUILD_AND_DIE, str(folder), str(Path(__file__).parent)]
    codes = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert codes.splitlines() == [f"{place} {-signal.SIGKILL}" for place in PLACES]
    return folder


@pytest.mark.parametrize("place", PLACES)
def test_killed_anywhere_it_is_unseen_and_goes_on(broken_off: Path, place: str) -> None:
    output = broken_off / place
    samples = draw_samples(40)
    with pytest.raises(InputError, match=r"unfinished|holds no store"):
        Store.open(output)
    done = len(list(output.glob("*/shard-*.json")))
    written: list[int] = []
    with StoreBuild(output, FINGERPRINT) as build:
        ready = build.start()
        assert len(ready) == done
        for index, part in enumerate([samples[:20], samples[20:]]):
            if index not in ready:
                written.append(index)
                write_shard(build.folder, index, part, {}, VOCAB)
        build.finish(2, META, {}, VOCAB)
    assert len(written) == 2 - done
    assert_holds(Store.open(output), samples)
    assert sorted(path.name for path in output.iterdir()) == ["data-0123456789abcdef", "lock", "store.json"]
    assert not list(output.glob("*/shard-*")) + list(output.glob("*/.*"))


def test_the_earlier_store_stays_readable_until_the_new_one_is_whole(tmp_path: Path) -> None:
    output = tmp_path / "store"
    old, new = draw_samples(10, seed=1), draw_samples(12, seed=2)
    build_shards(output, [old])
    opened = Store.open(output)
    with StoreBuild(output, "f" * 32) as build:
        build.start()
        write_shard(build.folder, 0, new, {}, VOCAB)
        assert_holds(Store.open(output), old)
        build.finish(1, META, {}, VOCAB)
    assert_holds(opened, old)  # mapped files outlive their names
    assert_holds(Store.open(output), new)
    assert not (output / "data-0123456789abcdef").exists()


def test_a_second_writer_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    output = tmp_path / "store"
    first = StoreBuild(output, FINGERPRINT)
    with pytest.raises(InputError, match=f"another process \\(pid {os.getpid()}\\) is writing the store"):
        StoreBuild(output, FINGERPRINT)
    first.close()
    first.close()
    StoreBuild(output, FINGERPRINT).close()


def test_a_full_disk_leaves_what_was_written_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "store"
    samples = draw_samples(20)
    with StoreBuild(output, FINGERPRINT) as build:
        build.start()
        write_shard(build.folder, 0, samples[:10], {}, VOCAB)

        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(OSError, match="No space left") as failure:
                write_shard(build.folder, 1, samples[10:], {}, VOCAB)
        assert build_module.is_disk_full(failure.value)
        assert sorted(path.name for path in build.folder.iterdir()) == [
            "shard-000000.arrow",
            "shard-000000.json",
            "shard-000000.npz",
        ]
    with StoreBuild(output, FINGERPRINT) as build:
        assert build.start() == {0}
        write_shard(build.folder, 1, samples[10:], {}, VOCAB)
        build.finish(2, META, {}, VOCAB)
    assert_holds(Store.open(output), samples)


def test_a_disk_that_fills_up_at_the_end_is_known_as_full(tmp_path: Path) -> None:
    """NumPy, told to write into a file, says how much it could not write and nothing else."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with StoreBuild(tmp_path / "store", FINGERPRINT) as build:
        build.start()
        write_shard(build.folder, 0, draw_samples(10), {}, VOCAB)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
        try:
            with pytest.raises(OSError, match="File too large") as failure:
                build.finish(1, META, {}, 2**18)  # counts of 2 MiB
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert build_module.is_disk_full(failure.value)


def test_a_folder_with_something_else_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match=r"already holds something else \(thesis.tex\)"):
        StoreBuild(tmp_path / "mine", FINGERPRINT)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="is a file"):
        StoreBuild(tmp_path / "file", FINGERPRINT)
    with pytest.raises(InputError, match="can't write in"):
        StoreBuild(tmp_path / "file" / "below", FINGERPRINT)


def test_discarding_leaves_nothing(tmp_path: Path) -> None:
    with StoreBuild(tmp_path / "new", FINGERPRINT) as build:
        build.start()
        write_shard(build.folder, 0, draw_samples(3), {}, VOCAB)
        build.discard()
    assert not (tmp_path / "new").exists()


def test_what_is_no_store_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no store at"):
        Store.open(tmp_path / "nothing")
    with pytest.raises(InputError, match="holds no store"):
        Store.open(tmp_path)
    output = tmp_path / "store"
    build_shards(output, [draw_samples(5)])
    with pytest.raises(InputError, match="was cut at max_length 256, the run asks for 512"):
        Store.open(output, max_length=512)
    data = output / "data-0123456789abcdef"
    lengths = np.load(data / "lengths.npy")
    np.save(data / "lengths.npy", lengths[:-1])
    with pytest.raises(InputError, match=r"is damaged .*one entry a sample"):
        Store.open(output)
    np.save(data / "lengths.npy", lengths)
    arrow = data / "data-00000-of-00001.arrow"
    arrow.write_bytes(arrow.read_bytes()[:100])
    with pytest.raises(InputError, match="is damaged"):
        Store.open(output)
    (output / "store.json").write_text("{")
    with pytest.raises(InputError, match="is damaged"):
        Store.open(output)
    (output / "store.json").write_text('{"kind": "something else"}')
    with pytest.raises(InputError, match="not written by draftmill prepare"):
        Store.open(output)


def test_reading_needs_no_torch() -> None:
    code = "import sys, draftmill.data, draftmill.data.store, draftmill.data.build; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
