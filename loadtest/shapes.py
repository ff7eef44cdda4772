"""For Locust's own command line, beside the users: `locust -f loadtest/locustfile.py,loadtest/shapes.py ...`.

Without this file the load is flat until Locust's `--run-time` or its stop button; with it, it is what `--shape`,
`--duration-s` and the options after them say.
"""

from __future__ import annotations

import math

from locust import LoadTestShape

from loadtest import options
from loadtest.recorder import recorder
from loadtest.stages import Stage, stage_at

OPEN_LOOP_USERS = 64
# So long after its last stage an open loop still sends what was due and had to wait for a user.
DRAIN_S = 10.0


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
        plan, time_s = self.plan(), self.get_run_time()
        stage = stage_at(plan, time_s)
        if parsed.rate > 0:
            is_over = stage is None and (
                recorder(self.runner.environment).is_drained or time_s > plan[-1].end_s + DRAIN_S
            )
            users = 0 if is_over else parsed.num_users or OPEN_LOOP_USERS
        else:
            users = 0 if stage is None else max(1, math.ceil(stage.level))
        return (users, float(users)) if users else None
