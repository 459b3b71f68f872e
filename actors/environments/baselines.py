"""The baselines `no_search` and `rag`: one completion, which holds an answer or does not.

`no_search` never searches. `rag` searches for the question itself before the first turn and puts
the passages into the prompt; that search is on record as the first turn's.
"""

from typing import Self

import numpy as np
from numpy.typing import NDArray

from actors.answers import extract_answer
from actors.environments.base import NOTHING, Outcome, Retriever, Searching, completion_budget
from actors.environments.search_r1 import ANSWER_END
from actors.prompt import Prompter, Tokens
from configs.prompts import NO_SEARCH_PROMPT, RAG_PROMPT
from configs.schema import Config
from replay.protocol import Lease
from replay.trajectory import Search, StopReason
from retrieval_server.protocol import Passage


class SingleCompletion:
    """An environment of one completion. Make it with `no_search` or `await rag`."""

    stops: tuple[str, ...] = (ANSWER_END,)

    def __init__(self, prompt: Tokens, prompter: Prompter, config: Config) -> None:
        self._prompter, self._config = prompter, config
        self.prompt = prompt
        self.passages: tuple[Passage, ...] = ()
        self.searches: tuple[Search, ...] = ()

    @classmethod
    def no_search(
        cls, lease: Lease, *, retriever: Retriever, prompter: Prompter, config: Config
    ) -> Self:
        """Make the prompt of the question alone."""
        system = config.environment.system
        prompt = prompter.question(
            lease.question, NO_SEARCH_PROMPT, system=system, question_mark=True
        )
        return cls(prompt, prompter, config)

    @classmethod
    async def rag(
        cls, lease: Lease, *, retriever: Retriever, prompter: Prompter, config: Config
    ) -> Self:
        """Make the prompt of the question and the passages found for it. Raises RetrievalError."""
        query = lease.question.text.strip()
        searches, groups = await Searching(lease, retriever, config).search([query], 0)
        shown = [each for group in groups for each in group]
        system = config.environment.system
        prompt = prompter.question(
            lease.question, RAG_PROMPT, system=system, passages=shown, question_mark=True
        )
        made = cls(prompt, prompter, config)
        made.passages, made.searches = tuple(shown), searches
        return made

    def budget(self, context_tokens: int) -> int:
        """Return the most tokens of the completion; 0 where the model has no room for one."""
        return completion_budget(self._config, context_tokens)

    async def close(self) -> None:
        """Hold nothing, so let go of nothing."""

    async def step(self, action_tokens: NDArray[np.int32], context_tokens: int) -> Outcome:
        """Read the answer from the tokens just sampled."""
        answer = extract_answer(self._prompter.decode(action_tokens))
        if answer is None:
            return Outcome(NOTHING, self.searches, True, StopReason.TURN_LIMIT)
        return Outcome(NOTHING, self.searches, stop=StopReason.ANSWERED, answer=answer)
