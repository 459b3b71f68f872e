"""PyYAML's safe reader and writer on libyaml, several times as fast, or else in plain Python."""

try:
    from yaml import CSafeDumper as SafeDumper
    from yaml import CSafeLoader as SafeLoader
except ImportError:  # a PyYAML that was built without libyaml
    from yaml import SafeDumper, SafeLoader  # type: ignore[assignment]

__all__ = ["SafeDumper", "SafeLoader"]
