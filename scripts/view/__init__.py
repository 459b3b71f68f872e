"""The pages of runs: a local web server, or one file."""
