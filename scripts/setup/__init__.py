"""From words to a checked configuration."""
