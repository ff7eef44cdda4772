"""For Locust's own command line and web UI: `locust -f loadtest/locustfile.py InferHttpUser`."""

from locust import events

from loadtest.base_user import prepare
from loadtest.grpc_user import InferGrpcUser
from loadtest.http_user import InferHttpUser
from loadtest.options import add_arguments

__all__ = ["InferGrpcUser", "InferHttpUser"]
events.init_command_line_parser.add_listener(add_arguments)
events.init.add_listener(prepare)
events.test_start.add_listener(prepare)
