"""The training loop: sample → update → judge → publish → log → checkpoint.

It waits for replay (a batch, an evaluation) and for actors to apply a version, each with a
deadline. A Stop or a signal ends a wait; a missed deadline raises an error that names the peer.
"""

from learner.run import Run
from replay.protocol import Stop


def train(run: Run) -> str:
    """Train up to `total_steps`; return why training ended: "completed", the cause of a Stop, or
    what a sentinel says while steps are left.

    The first and the last version are evaluated while nothing is trained; those between, while it
    goes on. Raises StopRequested on a signal, and what the collaborators raise.
    """
    learner = run.config.learner
    run.evaluate_due()
    while run.step < learner.total_steps:
        batch = run.sample()
        if isinstance(batch, Stop):
            return batch.cause
        gauges, wrong = run.judge(batch, run.learn(batch))
        run.publish()
        run.log(batch, gauges)
        run.serve_again()
        run.checkpoint()
        if run.step == learner.total_steps:
            break
        if wrong:
            return wrong
        if run.step % learner.eval_every == 0:
            run.evaluate(wait=False)
    run.wait_applied()
    return "completed" if run.evaluate(wait=True) else "stopped during the last evaluation"
