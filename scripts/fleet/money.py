"""The money of live searches, told on the console when it runs out and once it has."""

import math
from collections.abc import Callable

from configs.schema import Config
from configs.trust import flag_for
from retrieval_server.app.live.opening import spending_of
from retrieval_server.protocol import BadRecord

EVERY_S = 5.0  # between two looks at the file
NEARLY = 0.8  # of the budget


class MoneyWatch:
    """Looks now and then at what a run's own retrieval server has spent; tells each thing once."""

    def __init__(self, config: Config, say: Callable[[str, str], None]) -> None:
        """`say(text, style)` tells the person at the terminal."""
        asked = config.retrieval
        self._live, self._say = asked.live, say
        self._run_dir, self._flag = config.run_dir, flag_for(config)
        pays = asked.is_live and asked.has_own_server and asked.live.needs_key
        self._spending = spending_of(config) if pays else None
        self._next_s, self._is_near, self._is_spent = -math.inf, False, False

    def tend(self, now: float) -> None:
        """Look, if it is time to, and say what has come about."""
        if self._spending is None or self._is_spent or now < self._next_s:
            return
        self._next_s = now + EVERY_S
        try:
            spent_usd = self._spending.look()
        except (OSError, BadRecord):  # the server cannot count either, and says so itself
            return
        budget_usd = self._live.budget_usd
        if self._spending.is_spent(budget_usd, self._live.price_usd):
            self._is_spent = True
            self._say(
                f"the money for live searches is spent: {spent_usd:.6g} of "
                f"retrieval.live.budget_usd = {budget_usd:.6g} US dollars. The run goes on; "
                "searches that are not on record are told BudgetSpent. To give it more, end it and "
                f"`forage resume {self._run_dir}{self._flag} retrieval.live.budget_usd=USD`",
                "bold yellow",
            )
        elif spent_usd >= NEARLY * budget_usd and not self._is_near:
            self._is_near = True
            self._say(
                f"live searches have spent {spent_usd:.6g} of retrieval.live.budget_usd = "
                f"{budget_usd:.6g} US dollars",
                "yellow",
            )
