"""Records moved between devices: which batch goes where, bounded slots, worker threads, drafters in step, failures.

    loader ──► target workers ──► channel of each drafter ──► drafter workers ──► results ──► main thread
                one replica        slots on the drafter's       static buffers,                 │
                a device           device, in order             step, sum over drafters ◄── tickets

    stream        which number is which batch, and which drafter's          (pure)
    placement     which replica on which device                             (pure)
    channel       who may touch a slot; backpressure                        waits: targets, drafters
    workers       one thread a device                                       waits: loader, channel, tickets, the sum
    collective    one end of the sum over all drafters                      waits: the other drafters
    team          the workers as the main thread sees them                  waits: results
    supervision   first failure, what to close, the watch over stalls       wakes everybody
    meeting       what the main threads of several hosts tell one another   waits: the other hosts

Never knows drafter mathematics: what a step, an update or an evaluation is, a replica says.
"""

from draftmill.pipeline.channel import Channel, ChannelClosed
from draftmill.pipeline.collective import Collective, Hosts
from draftmill.pipeline.meeting import Meeting
from draftmill.pipeline.placement import Placement, place
from draftmill.pipeline.stream import Stream
from draftmill.pipeline.supervision import Stalled, Supervisor, WorkerFailed
from draftmill.pipeline.team import Team

__all__ = [
    "Channel",
    "ChannelClosed",
    "Collective",
    "Hosts",
    "Meeting",
    "Placement",
    "Stalled",
    "Stream",
    "Supervisor",
    "Team",
    "WorkerFailed",
    "place",
]
