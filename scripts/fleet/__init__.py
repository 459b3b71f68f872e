"""Start, watch and end the processes of a run."""

import os

# Ray reads these when it is imported, and whoever is placed by it inherits them.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_AUTH_MODE", "token")
# Ray gives its workers way to everything else on the machine (15); they are the work here.
os.environ.setdefault("RAY_worker_niceness", "0")
# It would print what it notices of nodes and processes between our lines, which say that already.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "^")
