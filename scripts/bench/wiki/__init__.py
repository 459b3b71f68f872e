"""The wiki task beside what it could have been."""
