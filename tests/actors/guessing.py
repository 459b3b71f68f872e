"""A game as an environment: the question's answer is a number, to be guessed."""

from actors.environments.base import NOTHING, Outcome, completion_budget
from actors.environments.search_r1 import Answer, parse_action
from replay.trajectory import StopReason

PROMPT = "Guess a number from 0 to 99, for example <answer> 50 </answer>. {question}\n"


class Guessing:
    """Says higher or lower until the guess is right or `actors.max_turns` hints are given."""

    stops = ("</answer>",)
    passages = ()

    def __init__(self, lease, *, retriever, prompter, config):
        self.prompter, self.config = prompter, config
        self.target, self.hints = int(lease.question.answers[0]), config.actors.max_turns
        self.prompt = prompter.question(lease.question, PROMPT)

    def budget(self, context_tokens):
        return completion_budget(self.config, context_tokens)

    async def step(self, action_tokens, context_tokens):
        action = parse_action(self.prompter.decode(action_tokens))
        said = action.text if isinstance(action, Answer) else ""
        guess = int(said) if said.isdecimal() and len(said) < 9 else None
        if guess == self.target:
            return Outcome(NOTHING, stop=StopReason.ANSWERED, answer=said)
        if not self.hints:
            return Outcome(NOTHING, malformed=guess is None, stop=StopReason.TURN_LIMIT)
        self.hints -= 1
        higher = guess is None or guess < self.target
        hint = self.prompter.text(f"\n\n{'higher' if higher else 'lower'}\n\n")
        if not self.budget(context_tokens + len(hint)):
            return Outcome(NOTHING, stop=StopReason.CONTEXT_LIMIT)
        return Outcome(hint, malformed=guess is None)
