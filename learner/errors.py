"""The learner's errors. A leaf module."""


class LearnerError(Exception):
    """Root of this package's errors.

    LearnerError
    ├── BadBatch       a batch that cannot be trained on; names the group
    ├── BadCheckpoint  a checkpoint that cannot be resumed from; names what differs
    ├── BadModel       a model folder that cannot be trained; names field, value and remedy
    ├── Diverged       a loss or gradient that is not finite; names the step
    └── RankLost       a rank that ended, failed or never joined; names it
    """


class BadBatch(LearnerError):
    """A batch that cannot be trained on; the message names the group, the cause and the remedy."""


class BadCheckpoint(LearnerError):
    """A checkpoint that this run cannot go on from; the message names it and what differs."""


class BadModel(LearnerError):
    """A model that cannot be trained; the message names the field, the value and the remedy."""


class Diverged(LearnerError):
    """A loss or gradient that is not finite; nothing made from it may be published."""


class RankLost(LearnerError):
    """A rank of the learner ended, failed or never joined; the message names it."""
