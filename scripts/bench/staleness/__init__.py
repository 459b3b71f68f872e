"""What corrections buy at each staleness."""
