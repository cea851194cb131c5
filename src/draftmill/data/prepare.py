"""`draftmill prepare`: from chats on disk to a store, resumable, and reused where nothing has changed.

Owns the order of work: sources, tokenizer, fingerprint, shards, duplicates, verdict. The parts are its neighbours.

    read_chunks ──► workers: rows -> samples -> shard ──► records ──► duplicates dropped ──► store.json
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from draftmill import __version__
from draftmill.data.build import StoreBuild, is_disk_full, refuse_foreign
from draftmill.data.chats import NO_ANSWER, NO_CHAT
from draftmill.data.encode import Encoder, EncodeSettings, LossOn
from draftmill.data.report import PrepareReport, length_histogram
from draftmill.data.sources import Chunk, Source, content_hash, find_sources, read_chunks
from draftmill.data.store import Store
from draftmill.data.worker import WorkerDied, Workers, make_shard
from draftmill.errors import InputError

Progress = Callable[[int, int, int, int], None]
"""Called with bytes done, bytes in all, rows done, rows skipped."""

_ONE_PROCESS_BYTES = 32 << 20
_RULES = ("chats", "encode", "places", "render", "sources", "build", "store")
_DEFAULT_BAD_SHARE = 0.1


def prepare(
    target: str,
    inputs: list[str],
    output: str | os.PathLike[str],
    *,
    max_length: int = 8192,
    loss_on: LossOn = "all",
    max_bad_share: float = _DEFAULT_BAD_SHARE,
    num_processes: int | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    chat_template: str | os.PathLike[str] | None = None,
    template_arguments: dict[str, Any] | None = None,
    keep_duplicates: bool = False,
    progress: Progress | None = None,
) -> PrepareReport:
    """Make the store at `output` from the chats in `inputs`, or find that it is there already.

    Args:
        target: folder or hub id of the model; its tokenizer alone is loaded.
        inputs: files, globs, or ids of hub datasets (NAME or NAME:SPLIT).
        output: a new or empty folder, or an earlier store, which is replaced once the new one is whole.
        max_length: tokens at which samples are cut.
        loss_on: whether all of the target's turns are supervised or only a chat's last.
        max_bad_share: the largest share of refused rows that is put up with.
        num_processes: processes that tokenize; by default one for little input, else one a core.
        chat_template: a file with the template to use in place of the target's own.
        template_arguments: passed to the template, as in {"enable_thinking": False}.
        keep_duplicates: keep rows that give the same tokens and mask as an earlier one.
        progress: called after each shard.

    Raises:
        InputError: see the messages; what was in `output` before is as it was.
    """
    _check_values(max_length, loss_on, max_bad_share, num_processes)
    sources = find_sources(inputs)
    refuse_foreign(Path(output))
    settings = EncodeSettings(
        target=target,
        max_length=max_length,
        loss_on=loss_on,
        revision=revision,
        trust_remote_code=trust_remote_code,
        chat_template=_read_template(chat_template),
        template_arguments=template_arguments or {},
    )
    job = _Job(
        sources, Encoder(settings), keep_duplicates, max_bad_share, num_processes or _processes(sources), progress
    )
    meta = job.describe()
    fingerprint = hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()[:32]
    with StoreBuild(output, fingerprint) as build:
        if (found := _reusable(build, job.encoder)) is not None:
            return found
        verdict = _verdict(build.finished, meta)
        try:
            report = job.run(build, meta)
        except InputError:
            build.discard()
            raise
        except WorkerDied as error:
            raise InputError(f"{error}; what is done is kept: run again with fewer --processes") from error
        except OSError as error:
            raise _write_error(build, error) from error
        report.verdict = verdict
        report.sample = _decoded_sample(Store.open(output), job.encoder)
        return report


@dataclass(slots=True)
class _Job:
    """One build: all that it needs, and its steps."""

    sources: list[Source]
    encoder: Encoder
    keep_duplicates: bool
    max_bad_share: float
    num_processes: int
    progress: Progress | None

    def describe(self) -> dict[str, Any]:
        """All that the store's content depends on; goes into store.json and, hashed, decides reuse."""
        settings = self.encoder.settings
        return {
            "tokenizer_name": settings.target,
            "tokenizer_hash": self.encoder.tokenizer_hash,
            "vocab_size": self.encoder.vocab_size,
            "template_hash": self.encoder.template_hash,
            "template_arguments": settings.template_arguments,
            "max_length": settings.max_length,
            "loss_on": settings.loss_on,
            "keep_duplicates": self.keep_duplicates,
            "inputs": [content_hash(source) for source in self.sources],
            "version": __version__,
            "rules_hash": _rules_hash(),
        }

    def run(self, build: StoreBuild, meta: dict[str, Any]) -> PrepareReport:
        """Write the shards that are missing, then the store."""
        num_shards = 0
        live = PrepareReport(str(build.output))
        total_bytes = sum(source.size for source in self.sources)
        for done_bytes, record in self._records(build):
            num_shards += 1
            live.add(record)
            if self.progress is not None:
                self.progress(done_bytes, total_bytes, live.rows, live.num_skipped)
        report = PrepareReport(str(build.output))
        for index in range(num_shards):
            report.add(build.record(index))
        kept = self._kept(build, num_shards, report)
        self._judge(report)
        self._summarize(build, report, kept)
        build.finish(num_shards, meta, report.to_json(), self.encoder.vocab_size, lambda index: kept[index])
        return report

    def _records(self, build: StoreBuild) -> Iterator[tuple[int, dict[str, Any]]]:
        done = build.start()
        missing = self._missing(build, done, read_chunks(self.sources))
        if self.num_processes == 1:
            for chunk, record in missing:
                yield chunk.done_bytes, record or make_shard(self.encoder, chunk, build.folder)
            return
        with Workers(self.num_processes, self.encoder, build.folder) as workers:
            for chunk, record in missing:
                if record is not None:
                    yield chunk.done_bytes, record
                    continue
                yield from ((finished.done_bytes, made) for finished, made in workers.submit(chunk))
            yield from ((finished.done_bytes, made) for finished, made in workers.drain())

    @staticmethod
    def _missing(
        build: StoreBuild, done: set[int], chunks: Iterable[Chunk]
    ) -> Iterator[tuple[Chunk, dict[str, Any] | None]]:
        for chunk in chunks:
            yield chunk, build.record(chunk.index) if chunk.index in done else None

    def _kept(self, build: StoreBuild, num_shards: int, report: PrepareReport) -> list[np.ndarray | None]:
        """For each shard the samples that are the first with their tokens and mask; None for all of them."""
        if self.keep_duplicates:
            return [None] * num_shards
        digests = [build.array(index, "digests") for index in range(num_shards)]
        every = np.concatenate([np.empty((0, 2), np.uint64), *digests])
        _, firsts = np.unique(every, axis=0, return_index=True)
        is_first = np.zeros(len(every), dtype=np.bool_)
        is_first[firsts] = True
        kept = np.split(is_first, np.cumsum([len(each) for each in digests])[:-1])
        report.duplicates = int(np.count_nonzero(~is_first))
        for index, part in enumerate(kept):
            if not part.all():
                piece, row = build.array(index, "places")[np.argmin(part)]
                report.duplicate_example = f"{build.record(index)['sources'][piece]} {row}"
                break
        return list(kept)

    def _judge(self, report: PrepareReport) -> None:
        if report.rows == 0:
            raise InputError(f"{self.sources[0].name} holds no rows; give files with chats in them")
        if report.num_skipped == report.rows or report.bad_share > self.max_bad_share:
            limit = "" if report.num_skipped == report.rows else f", more than --max-bad-share {self.max_bad_share:g}"
            unanswered = set(report.skipped) & {NO_CHAT, NO_ANSWER}
            raise InputError(
                f"{report.num_skipped} of {report.rows} rows can't be used{limit}: {report.reasons()}; mend the rows"
                + (" or allow a larger share" if limit else "")
                + ("; draftmill regenerate answers prompts" if unanswered else "")
            )

    def _summarize(self, build: StoreBuild, report: PrepareReport, kept: list[np.ndarray | None]) -> None:
        lengths, supervised = [], []
        for index, part in enumerate(kept):
            rows = slice(None) if part is None else part
            lengths.append(build.array(index, "lengths")[rows])
            supervised.append(build.array(index, "num_supervised")[rows])
        every = np.concatenate(lengths)
        report.kept = len(every)
        report.num_tokens = int(every.sum(dtype=np.int64))
        report.num_supervised = int(np.concatenate(supervised).sum(dtype=np.int64))
        report.histogram = length_histogram(every)


def _processes(sources: list[Source]) -> int:
    if sum(source.size for source in sources) < _ONE_PROCESS_BYTES:
        return 1
    return len(os.sched_getaffinity(0))


def _check_values(max_length: int, loss_on: str, max_bad_share: float, num_processes: int | None) -> None:
    if max_length < 8:
        raise InputError(f"--max-length must be at least 8 tokens, got {max_length}")
    if loss_on not in ("all", "last-turn"):
        raise InputError(f"--loss-on must be all or last-turn, got {loss_on}")
    if not 0.0 <= max_bad_share <= 1.0:
        raise InputError(f"--max-bad-share must lie in 0..1, got {max_bad_share:g}")
    if num_processes is not None and not 1 <= num_processes <= 512:
        raise InputError(f"--processes must lie in 1..512, got {num_processes}")


def _read_template(path: str | os.PathLike[str] | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise InputError(f"the chat template {path} can't be read: {reason}; give a Jinja file") from None


def _rules_hash() -> str:
    """Of the code that decides what a sample is: a changed rule must not find an old store good."""
    digest = hashlib.sha256()
    for name in _RULES:
        digest.update((Path(__file__).parent / f"{name}.py").read_bytes())
    return digest.hexdigest()[:16]


def _reusable(build: StoreBuild, encoder: Encoder) -> PrepareReport | None:
    """The report of the store that is there, if it is the one asked for and whole."""
    if build.finished is None or build.finished["fingerprint"] != build.fingerprint:
        return None
    try:
        store = Store.open(build.output)
        saved = json.loads((build.output / store.meta["folder"] / "report.json").read_text(encoding="utf-8"))
    except (InputError, OSError, ValueError):
        return None  # damaged: made again
    verdict = f"the store is there, made from the same inputs and settings ({build.fingerprint[:16]})"
    report = PrepareReport(str(build.output), hit=True, verdict=verdict, **saved)
    report.sample = _decoded_sample(store, encoder)
    return report


def _decoded_sample(store: Store, encoder: Encoder) -> list[tuple[str, bool]]:
    """The text of one of the first samples, neither the shortest nor the longest, in runs of equal mask."""
    first = np.argsort(store.lengths[:15], kind="stable")
    ids, mask = store.read(first[[len(first) // 2]])[0]
    bounds = [0, *(np.flatnonzero(np.diff(mask.astype(np.int8))) + 1).tolist(), len(mask)]
    return [(encoder.decode(ids[a:b]), bool(mask[a])) for a, b in pairwise(bounds)]


def _verdict(finished: dict[str, Any] | None, meta: dict[str, Any]) -> str:
    if finished is None:
        return "no store there yet; made"
    names = {"rules_hash": "draftmill's rules", "tokenizer_hash": "tokenizer", "template_hash": "chat template"}
    changed = []
    for key, value in meta.items():
        if key in finished and finished[key] == value:
            continue
        if key in ("max_length", "loss_on", "template_arguments", "version", "keep_duplicates", "vocab_size"):
            changed.append(f"{key} {finished.get(key)} -> {value}")
        else:
            changed.append(names.get(key, key))
    return f"made anew, replacing a store with other settings ({', '.join(changed) or 'damaged files'})"


def _write_error(build: StoreBuild, error: OSError) -> InputError:
    done = len(list(build.folder.glob("shard-*.json")))
    if is_disk_full(error):
        return InputError(
            f"the disk is full at {build.output}; {done} shards are done and kept: free some space and run the same "
            "command again, which goes on from there"
        )
    return InputError(f"can't write the store at {build.output}: {error}; {done} shards are done and kept")
