"""What tests start ends with the process that runs them, however that ends."""

import os


def ends_with_us(**more: str) -> dict[str, str]:
    """The environment of a process that ends with this one, which must be its parent: for programs
    that heed `FORAGE_PARENT` (`configs.process.begin`). They do not hand it on.
    """
    return os.environ | {"FORAGE_PARENT": str(os.getpid())} | more
