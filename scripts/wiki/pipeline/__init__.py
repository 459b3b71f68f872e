"""The wiki task from nothing to a trained model: files, a start, training, what came of it."""
