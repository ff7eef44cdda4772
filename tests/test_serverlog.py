"""Lines of a real Triton 24.10 log, and what is read from them."""

from __future__ import annotations

from ortgraph.serverlog import ModelState, first_line, last_error, loading_states, models_not_tried, stuck_reason

LOG = """\
[libprotobuf ERROR /build/text_format.cc:337] Error parsing text-format inference.ModelConfig: 1:6: Message type \
"inference.ModelConfig" has no field named "this".
E1201 00:25:12.269406 5070 model_repository_manager.cc:1460] "Poll failed for model directory 'garbage': failed to \
read text proto from /models/garbage/config.pbtxt"
E1201 00:25:12.269572 5070 model_repository_manager.cc:1460] "Poll failed for model directory 'other': Invalid model \
name: Could not determine backend"
I1201 00:25:12.269990 5070 model_lifecycle.cc:472] "loading: exits:1"
I1201 00:25:12.272152 5070 model_lifecycle.cc:472] "loading: good:12"
I1201 00:25:12.272407 5070 model_lifecycle.cc:472] "loading: slow:1"
E1201 00:25:12.272358 5070 model_repository_manager.cc:724] "failed to load model 'noversion': at least one version \
must be available under the version policy of model 'noversion'"
I1201 00:25:15.579249 5070 model_lifecycle.cc:839] "successfully loaded 'good'"
E1201 00:25:16.857022 5070 model_lifecycle.cc:642] "failed to load 'exits' version 1: Internal: Stub process 'exits_0' \
is not healthy."
I1201 00:25:16.857033 5070 model_lifecycle.cc:777] "failed to load 'exits'"
"""


def test_loading_states_follow_the_log():
    assert loading_states(LOG) == [
        ModelState("exits", "1", "UNAVAILABLE", ""),
        ModelState("good", "12", "READY", ""),
        ModelState("slow", "1", "LOADING", ""),
    ]
    assert loading_states("") == []


def test_models_that_were_not_tried_have_a_reason_with_its_place():
    assert models_not_tried(LOG) == {
        "garbage": "failed to read text proto from /models/garbage/config.pbtxt "
        '(1:6: Message type "inference.ModelConfig" has no field named "this".)',
        "other": "Invalid model name: Could not determine backend",
        "noversion": "at least one version must be available under the version policy of model 'noversion'",
    }


def test_a_stuck_stub_is_seen_with_what_to_do():
    assert stuck_reason(LOG) == ""
    missing = "I1201 1 2 pb_stub.cc:2105]  Failed to preinitialize Python stub: Python model file not found in '/m'\n"
    assert stuck_reason(LOG + missing) == ("Python model file not found in '/m'; mend the model or remove its folder")
    library = (
        "/b/triton_python_backend_stub: error while loading shared libraries: libpython3.12.so.1.0: no such file\n"
    )
    assert "libpython3.12.so.1.0: no such file; install this Python's shared library" in stuck_reason(LOG + library)


def test_the_last_error_has_no_time_and_no_source():
    assert last_error(LOG) == "failed to load 'exits' version 1: Internal: Stub process 'exits_0' is not healthy."
    assert last_error("tritonserver: unrecognized option '--x'\nUsage: tritonserver [options]\n  --help\n") == (
        "tritonserver: unrecognized option '--x'"
    )
    assert last_error("only this\n") == "only this"
    assert last_error("") == "it said nothing"


def test_a_reason_is_cut_to_its_first_line():
    stack = "Internal: TritonModelException: m: no model.onnx\n\nAt:\n  model.py(3): initialize\n"
    assert first_line(stack) == "m: no model.onnx"
    assert first_line("") == ""
