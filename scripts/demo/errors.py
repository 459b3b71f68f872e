"""What the demo's task ends with where a part of it did not come out well enough."""


class TaskFailed(RuntimeError):
    """A part of the task is not usable with this seed; another may do."""


class ColdStartFailed(TaskFailed):
    """The policy did not reach a start that reinforcement learning can work with."""


class EncoderFailed(TaskFailed):
    """The encoder does not find held-out facts."""
