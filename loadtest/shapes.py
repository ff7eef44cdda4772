"""For Locust's own command line, beside the users: `locust -f loadtest/locustfile.py,loadtest/shapes.py ...`.

Without this file the load is flat until Locust's `--run-time` or its stop button; with it, it is what `--shape`,
`--duration-s` and the options after them say.
"""

from __future__ import annotations

import math

from locust import LoadTestShape

from loadtest import options
from loadtest.stages import Stage, stage_at

OPEN_LOOP_USERS = 64


class StagedLoad(LoadTestShape):  # type: ignore[misc]  # Locust is untyped
    """Users by the stages of a closed loop; in an open loop all of them wait for what is due."""

    use_common_options = True

    def plan(self) -> list[Stage]:
        """The stages, from the options that the runner's environment has now."""
        parsed = self.runner.environment.parsed_options
        return options.plan(parsed, parsed.num_users or 1)

    def tick(self) -> tuple[int, float] | None:
        """Locust asks once a second; None ends the test."""
        parsed = self.runner.environment.parsed_options
        stage = stage_at(self.plan(), self.get_run_time())
        if stage is None:
            return None
        users = (parsed.num_users or OPEN_LOOP_USERS) if parsed.rate > 0 else max(1, math.ceil(stage.level))
        return users, float(users)
