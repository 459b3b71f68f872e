"""The schema of a run: one frozen struct per section, loaded from YAML and `a.b=c` overrides."""
