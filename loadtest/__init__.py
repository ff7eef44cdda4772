"""Load tests with Locust: users that check every answer, and percentiles from raw samples."""
