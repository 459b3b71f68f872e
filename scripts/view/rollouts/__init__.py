"""The rollouts of the pages: which are wanted, what they say."""
