"""What hosts tell one another, apart from the drafters' sums: who is ready, what the first host decided, when to stop,
whose run has ended.

Owns the main threads' side of the shared store. One host alone talks to nobody. Never part of a collective, so that a
host that loads or saves for long keeps no group waiting.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from draftmill.errors import InputError
from draftmill.pipeline.collective import HOSTS_S, Hosts, wait_for
from draftmill.pipeline.supervision import HostEnded, within

WATCH_EVERY_S = 1.0
"""How often a host that trains looks whether another's run has ended."""
LAST_WORD_S = 5.0
"""Seconds that a host whose run ends has for telling the others."""
_STOP, _ENDED = "stop", "ended"
T = TypeVar("T")
Tell = Callable[[str], None]
Wish = Callable[[], str]
"""Whether this host was asked to stop: "no", or how."""


def warn(line: str) -> None:
    """Where there is no log of a run yet."""
    logging.getLogger(__name__).warning(line)


class Meeting:
    """One host's end of it. Used by the main thread, but for `end`, which any may call."""

    def __init__(self, hosts: Hosts, store: dist.Store | None, *, lookahead: int, timeout_s: float = HOSTS_S) -> None:
        """lookahead: tickets that a main thread may be ahead of its drafters."""
        if hosts.count > 1 and store is None:
            raise RuntimeError(f"{hosts.count} hosts need a store to talk over")
        self.hosts, self.lookahead, self.timeout_s = hosts, lookahead, timeout_s
        self._store: dist.Store | None = None if store is None else store.clone()  # type: ignore[attr-defined]
        self._stop: tuple[int, str] | None = None
        self._left = False

    def exchange(self, what: str, value: Any, tell: Tell = warn, wish: Wish = lambda: "no") -> list[Any]:
        """Give every host a JSON value, and wait for theirs; returns all of them, by rank.

        what: the point the hosts come to, in the words of a message; every host comes to each once, in the same order.
        wish: a wish to stop ends the wait, and all hosts' with it.
        Raises HostEnded where a host ends or is asked to stop meanwhile; RuntimeError, naming host and point, where one
        does not come in time.
        """
        found = self._gather(what, value, tell, wish)
        if self._store is not None and (ended := self._ended(self._store)) is not None:
            raise ended  # of a host that had come here before
        return found

    def _gather(self, what: str, value: Any, tell: Tell, wish: Wish = lambda: "no") -> list[Any]:
        if self._store is None:
            return [value]
        self._store.set(f"{what}/{self.hosts.rank}", json.dumps(value))
        return [json.loads(self._wait(what, rank, tell, wish)) for rank in range(self.hosts.count)]

    def end(self, why: str, *, stopped: bool = False) -> None:
        """Tell the others, wherever they are, that this host's run ends early. The first such word of all holds.

        Nothing to tell where all of them have left together.
        """
        if self._store is None or self._left:
            return
        store, word = self._store, json.dumps({"rank": self.hosts.rank, "why": why, "stopped": stopped})

        def tell() -> None:  # by a client of its own: this may be another thread than the one that waits
            store.clone().compare_set(_ENDED, "", word)  # type: ignore[attr-defined]

        # The store may have gone with its host, and a new client then tries for minutes.
        if (error := within(LAST_WORD_S, tell, "telling the other hosts")) is not None:
            warn(f"the other hosts could not be told that this one has ended: {error}")

    @contextmanager
    def watched(self, fail: Callable[[HostEnded], None]) -> Iterator[None]:
        """While in it, call `fail` within seconds of the end of another host's run, from a thread of its own."""
        if self._store is None:
            yield
            return
        store, over = self._store.clone(), threading.Event()  # type: ignore[attr-defined]

        def watch() -> None:
            while not over.wait(WATCH_EVERY_S):
                try:
                    ended = self._ended(store)
                except RuntimeError as error:
                    ended = HostEnded(f"the store that the hosts share can't be reached: {error}", stopped=False)
                if ended is not None and not over.is_set():
                    fail(ended)
                    return

        thread = threading.Thread(target=watch, name="host-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(2 * WATCH_EVERY_S)

    def leave(self, tell: Tell = warn) -> None:
        """The last word, once all drafters are done. The first host, which may serve the store, waits for the others'.

        Raises HostEnded, or RuntimeError, as `exchange` does, as long as not all have come to it; after that, what
        becomes of another host is no longer this one's business.
        """
        self._gather("ending", None, tell)  # nobody leaves the group while another's drafters need it
        self._left = True
        if self._store is None:
            return
        if self.hosts.rank:
            self._store.set(f"leaving/{self.hosts.rank}", "null")
            return
        for rank in range(1, self.hosts.count):
            self._wait("leaving", rank, tell, lambda: "no", heeds=False)

    def compare(self, facts: dict[str, Any]) -> None:
        """Refuse hosts that are not set up alike. Raises InputError that names every fact in which one differs."""
        first, *others = self.exchange("comparing set-ups", facts)
        for rank, theirs in enumerate(others, start=1):
            unlike = [
                f"{name} is {theirs.get(name)}, not {first[name]}" for name in first if theirs.get(name) != first[name]
            ]
            if unlike:
                self.leave()
                raise InputError(f"host {rank} is not set up as host 0 is: {'; '.join(unlike)}; make them equal")

    def first_decides(
        self, what: str, decide: Callable[[], T], told: Callable[[T], Any], wish: Wish = lambda: "no"
    ) -> T | Any:
        """What the first host decides: there the value itself, on the others what it tells of it, a JSON value.

        Raises, on all of them, the InputError that deciding raised; otherwise as `exchange` does.
        """
        if self.hosts.rank:
            word = self.exchange(what, None, wish=wish)[0]
            if word["refused"] is None:
                return word["told"]
            self.leave()
            raise InputError(word["refused"])
        try:
            value = decide()
        except InputError as error:
            self.exchange(what, {"refused": str(error)})
            self.leave()
            raise
        self.exchange(what, {"refused": None, "told": told(value)})
        return value

    def stop_after(self, step: int, wish: str) -> str:
        """Whether all hosts stop after this step: "no", or how. Asked after each step was handed to the drafters.

        wish: "no", or how this host was asked to stop. The first host with a wish names a step for all that no main
        thread can have passed: drafters do each step together, so none is further ahead than its own tickets.
        """
        if self._store is None:
            return wish
        if self._stop is None:
            if wish != "no":
                self._store.compare_set(_STOP, "", f"{step + self.lookahead + 1} {wish}")
            if self._store.check([_STOP]):
                last, how = self._store.get(_STOP).decode().split()
                self._stop = int(last), how
        return self._stop[1] if self._stop is not None and step >= self._stop[0] else "no"

    def _ended(self, store: dist.Store) -> HostEnded | None:
        """Whether a host's run has ended early; this one's own does not count."""
        if not store.check([_ENDED]):
            return None
        word = json.loads(store.get(_ENDED))
        if word["rank"] == self.hosts.rank:
            return None
        return HostEnded(f"host {word['rank']} has ended its run: {word['why']}", stopped=word["stopped"])

    def _wait(self, what: str, rank: int, tell: Tell, wish: Wish, heeds: bool = True) -> bytes:
        """heeds: whether the end of another host's run ends the wait."""
        assert self._store is not None
        store, key, whom = self._store, f"{what}/{rank}", f"for host {rank} at: {what}"

        def look() -> bytes | None:
            if store.check([key]):
                return store.get(key)
            if heeds and (ended := self._ended(store)) is not None:
                raise ended
            if wish() != "no":
                why = f"it was asked to stop while it waited {whom}"
                self.end(why, stopped=True)
                raise HostEnded(why, stopped=True)
            return None

        late = (
            f"host {self.hosts.rank} waited {{}} for host {rank} of {self.hosts.count} at: {what}; "
            f"host {rank}'s log says what it does"
        )
        return wait_for(look, whom, tell, self.timeout_s, late)
