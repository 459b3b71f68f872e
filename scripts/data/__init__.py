"""Questions and corpora."""
