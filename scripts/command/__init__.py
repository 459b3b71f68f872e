"""What every command shares: its options, and its lines in a terminal."""
