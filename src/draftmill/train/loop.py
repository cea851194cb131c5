"""The training loop: take a batch, step, evaluate, save, report."""

from __future__ import annotations

from draftmill.monitor.phases import Phase
from draftmill.pipeline.meeting import Meeting
from draftmill.pipeline.team import Team
from draftmill.pipeline.tickets import Evaluate, Snapshot, Step
from draftmill.train.report import Reporter
from draftmill.train.saving import Saver
from draftmill.train.setup import Setup


def training_loop(
    setup: Setup, team: Team, meeting: Meeting, saver: Saver, reporter: Reporter, first_step: int
) -> Phase:
    """Run every step from `first_step` on. Returns how the run ended: FINISHED, or STOPPED when asked to stop.

    Tickets run ahead of their results by the team's lookahead; steps are counted from 0, checkpoints from 1.
    """
    stream = setup.stream
    for step in range(first_step, stream.total_steps):
        reporter.take(team.submit(Step(step)))
        if stream.evaluates_after(step):
            reporter.take(team.submit(Evaluate(step)))
        stop = meeting.stop_after(step, reporter.run.stop_requested())
        saver.report_decoded()
        done = step + 1 == stream.total_steps
        if saver.due(step + 1) or done or stop == "graceful":
            reporter.take(team.drain())  # the checkpoint's state tells what is known up to here
            request = saver.request(step + 1, done, reporter.heldout_after(step))
            reporter.take(team.submit(Snapshot(step, request)))
            saver.began()
        if stop != "no" and not done:
            reporter.take(team.drain())
            return Phase.STOPPED
    reporter.take(team.drain())
    return Phase.FINISHED
