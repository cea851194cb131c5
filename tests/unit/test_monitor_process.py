"""Which process is meant: pids given again, paused, dead, elsewhere. And the lock built on it."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftmill.errors import InputError
from draftmill.monitor.lock import Lock, read_holder
from draftmill.monitor.process import Presence, ProcessIdentity
from monitor_doubles import wait_until

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def test_presence_follows_a_process_through_its_life(sleeper: subprocess.Popen) -> None:
    identity = ProcessIdentity.of(sleeper.pid)
    assert identity.presence() is Presence.RUNNING
    os.kill(sleeper.pid, signal.SIGSTOP)
    wait_until(lambda: identity.presence() is Presence.PAUSED, "SIGSTOP to be seen")
    os.kill(sleeper.pid, signal.SIGCONT)
    wait_until(lambda: identity.presence() is Presence.RUNNING, "SIGCONT to be seen")
    sleeper.kill()
    # A zombie first, for nobody has waited for it, then nothing.
    wait_until(lambda: identity.presence() is Presence.GONE, "the zombie to count as gone")
    sleeper.wait()
    assert identity.presence() is Presence.GONE


def test_a_pid_given_again_is_another_process(sleeper: subprocess.Popen) -> None:
    identity = ProcessIdentity.of(sleeper.pid)
    assert identity.start_ticks is not None
    assert dataclasses.replace(identity, start_ticks=identity.start_ticks - 1).presence() is Presence.GONE


def test_other_host_container_and_boot() -> None:
    mine = ProcessIdentity.of_this()
    assert mine.presence() is Presence.RUNNING
    assert mine.shares_clock()
    elsewhere = dataclasses.replace(mine, host="another", boot_id="x")
    assert elsewhere.presence() is Presence.UNSEEN
    assert not elsewhere.shares_clock()
    container = dataclasses.replace(mine, namespaces="pid:[1]+" + mine.namespaces.partition("+")[2])
    assert container.presence() is Presence.UNSEEN
    assert container.shares_clock()  # the same kernel's clock, though its pids mean nothing here
    assert dataclasses.replace(mine, boot_id="an earlier boot").presence() is Presence.GONE


def test_json_round_trip_and_rubbish() -> None:
    mine = ProcessIdentity.of_this()
    assert ProcessIdentity.from_json(json.loads(json.dumps(mine.to_json()))) == mine
    for rubbish in (None, [], {}, {"pid": "x"}, {**mine.to_json(), "start_ticks": "y"}):
        assert ProcessIdentity.from_json(rubbish) is None


def test_a_living_holder_refuses_and_is_named(tmp_path: Path, sleeper: subprocess.Popen) -> None:
    holder = ProcessIdentity.of(sleeper.pid)
    (tmp_path / "lock").write_text(json.dumps(holder.to_json()))
    with pytest.raises(InputError, match=rf"in use by process {sleeper.pid} on {holder.host}"):
        Lock.take(tmp_path)
    assert read_holder(tmp_path) == holder


def test_a_dead_holder_is_replaced_and_told(tmp_path: Path, sleeper: subprocess.Popen) -> None:
    (tmp_path / "lock").write_text(json.dumps(ProcessIdentity.of(sleeper.pid).to_json()))
    sleeper.kill()
    sleeper.wait()
    lock = Lock.take(tmp_path)
    assert lock.taken_over == (
        f"took over the lock of process {sleeper.pid} on {ProcessIdentity.of_this().host}, which is gone"
    )
    assert read_holder(tmp_path) == ProcessIdentity.of_this()
    lock.release()
    lock.release()
    assert not (tmp_path / "lock").exists()


def test_a_holder_elsewhere_lives_as_long_as_its_heartbeat(tmp_path: Path) -> None:
    elsewhere = dataclasses.replace(ProcessIdentity.of_this(), host="another", boot_id="x")
    (tmp_path / "lock").write_text(json.dumps(elsewhere.to_json()))
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(InputError, match="on another"):
        Lock.take(tmp_path)
    long_ago = time.time() - 3600
    os.utime(tmp_path / "state.json", (long_ago, long_ago))
    assert "on another, which is gone" in str(Lock.take(tmp_path).taken_over)


def test_release_leaves_another_holders_lock(tmp_path: Path) -> None:
    lock = Lock.take(tmp_path)
    other = dataclasses.replace(ProcessIdentity.of_this(), pid=1, start_ticks=0)
    (tmp_path / "lock").write_text(json.dumps(other.to_json()))
    lock.release()
    assert read_holder(tmp_path) == other


def test_two_at_once_one_wins(tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom draftmill.errors import InputError\n"
        "from draftmill.monitor.lock import Lock\n"
        "try:\n    Lock.take(Path(sys.argv[1]))\nexcept InputError:\n    sys.exit(2)\n"
        "print('held', flush=True)\ntime.sleep(60)\n"
    )
    (tmp_path / "lock").write_text(json.dumps({**ProcessIdentity.of_this().to_json(), "start_ticks": 1}))  # stale
    racers = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE) for _ in range(4)]
    try:
        wait_until(lambda: sum(racer.poll() == 2 for racer in racers) == 3, "three of four to be refused")
        winner = next(racer for racer in racers if racer.poll() is None)
        wait_until(lambda: read_holder(tmp_path) == ProcessIdentity.of(winner.pid), "the winner's lock")
    finally:
        for racer in racers:
            racer.kill()
            racer.wait()
            assert racer.stdout is not None
            racer.stdout.close()
