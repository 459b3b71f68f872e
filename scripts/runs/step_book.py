"""The learner's steps as the records have them: which groups each trained, and what is durable."""

from collections.abc import Iterator, Sequence

from configs.schema import ReplayConfig
from scripts.runs.group_book import Group, Groups
from scripts.runs.record import facts


class StepBook:
    """Batches, commits and starts of learners; each method yields what does not add up.

    `last`: the last step put together; `reached`: the newest that any weights can have had.
    """

    def __init__(self, groups: Groups) -> None:
        self.count = self.last = self.reached = self.committed = 0
        self.trained = self.trained_durably = 0  # groups
        self.staleness_max: int | None = None
        self._groups, self._incarnation = groups, 0
        self._batches: dict[int, tuple[int, ...]] = {}  # not committed

    def sampled(self, fact: facts.Sampled, settings: ReplayConfig, stopped: bool) -> Iterator[str]:
        """Take the batch of a step."""
        step, wanted = fact.step, settings.groups_per_step
        if step <= self.last:
            yield f"step {step} was put together twice"
        elif self.count and step != self.last + 1:
            yield f"step {step} follows step {self.last}: steps are missing between"
        if stopped:
            yield f"step {step} was put together after the run had stopped"
        if fact.incarnation != self._incarnation:
            whose = f"incarnation {fact.incarnation}, not to {self._incarnation}"
            yield f"step {step} was given to {whose}"
        if len(fact.group_ids) != wanted:
            yield f"step {step} has {len(fact.group_ids)} groups, not {wanted}"
        whole: list[Group] = []
        for group_id in fact.group_ids:
            yield from self._train(group_id, step, settings.max_staleness, whole)
        if len(whole) == len(fact.group_ids) > 0:
            yield from _of_gauges(fact, whole)
        self.count += 1
        self.last, self.reached = max(step, self.last), max(step, self.reached)
        self._batches[step] = fact.group_ids

    def resampled(self, fact: facts.Resampled) -> Iterator[str]:
        """Take a batch that was served again."""
        if fact.step <= self.committed:
            yield f"step {fact.step} was trained again although it is committed"
        elif fact.step not in self._batches:
            yield f"step {fact.step} was served again, but never put together"

    def made_durable(self, fact: facts.StepsCommitted) -> Iterator[str]:
        """Take a checkpoint."""
        if fact.step < self.committed:
            yield f"step {fact.step} was committed after step {self.committed}"
        if fact.step > self.last:
            yield f"step {fact.step} was committed, but {self.last} was the last put together"
        self.committed = max(self.committed, fact.step)
        for step in [step for step in self._batches if step <= fact.step]:
            for group_id in self._batches.pop(step):
                self._groups.commit(group_id, step)
                self.trained_durably += 1

    def resumed(self, fact: facts.LearnerResumed) -> Iterator[str]:
        """Take a start of the learner."""
        if fact.incarnation <= self._incarnation:
            yield f"incarnation {fact.incarnation} resumed after {self._incarnation}"
        if fact.step < self.committed:
            yield f"a learner went back to step {fact.step}, behind what is committed"
        self._incarnation, self.reached = fact.incarnation, max(self.reached, fact.step)

    def opened(self, fact: facts.GroupOpened, settings: ReplayConfig) -> Iterator[str]:
        """Take a train group: no more are opened than steps can take before they are too old."""
        before = self.reached * settings.groups_per_step + self._groups.standing
        allowed = (settings.max_staleness + fact.version + 1) * settings.groups_per_step
        what = f"group {fact.group_id} was opened under version {fact.version}"
        if before >= allowed:
            yield f"{what} behind {before} others: fewer than {allowed} may stand there"
        if not 0 <= fact.version <= self.reached:
            yield f"{what}: no step beyond {self.reached} was put together"

    def _train(self, group_id: int, step: int, bound: int, whole: list[Group]) -> Iterator[str]:
        self.trained += 1
        place, group = self._groups.place(group_id), self._groups.live.get(group_id)
        what = f"group {group_id} was trained at step {step}"
        if place:
            yield f"{what}, but it is {place}"
        if group is None or group.kind != "train":
            if not place:
                yield f"{what}; it is none to train"
            return
        self._groups.train(group, step)
        if not group.whole:
            yield f"{what} without {[i for i in range(group.size) if i not in group.rollouts]}"
            return
        whole.append(group)
        staleness = step - 1 - group.oldest_version
        self.staleness_max = max(staleness, self.staleness_max or 0)
        if staleness > bound:
            yield f"group {group_id} was {staleness} steps old at step {step}: more than {bound}"


def _of_gauges(fact: facts.Sampled, trained: Sequence[Group]) -> Iterator[str]:
    """What replay said of a batch when it put it together."""
    searches = [each.searches for group in trained for each in group.rollouts.values()]
    oldest = min(group.oldest_version for group in trained)
    for name, found in (
        ("replay/staleness", float(fact.step - 1 - oldest)),
        ("replay/trained_searches_per_rollout", sum(searches) / len(searches)),
    ):
        if (said := fact.gauges.get(name, found)) != found:
            yield f"step {fact.step}: {name}: the record says {said:g}, its payloads {found:g}"
