"""What the algorithms of the learner cost, and what they are worth: `forage bench algorithms`."""
