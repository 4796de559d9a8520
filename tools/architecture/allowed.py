"""The exceptions to the checks of `boundaries.py`, each with its reason."""

from __future__ import annotations

from typing import Final

BROAD_EXCEPTS: Final[dict[str, str]] = {
    "vllm_omni/distributed/omni_connectors/mailbox.py:Mailbox._guarded": (
        "one bad message must not stop everyone's data plane"
    ),
    "vllm_omni/distributed/omni_connectors/receiver.py:ZmqReceiver._hand_over": (
        "a stream's boundary: the other streams go on"
    ),
    "vllm_omni/engine/ar_outputs.py:ArOutputs.process": "a request's boundary",
    "vllm_omni/engine/omni_engine.py:OmniEngine._run": (
        "the orchestrator thread's boundary: whoever waits for the start gets the error"
    ),
    "vllm_omni/engine/orchestrator.py:Orchestrator._guarded": "a request's boundary",
    "vllm_omni/engine/replica_calls.py:call_replicas": ("the caller's boundary: it gets the error"),
    "vllm_omni/engine/process_child.py:ChildShell._beat": "a figure that cannot be had is no news",
    "vllm_omni/engine/process_child.py:run_child": "process boundary: the error goes to the parent",
    "vllm_omni/engine/stage_pool.py:StagePool._shutdown_client": (
        "one client's failure must not keep the others running"
    ),
    "vllm_omni/generation/engine.py:OneShotEngine.add": "a request's boundary",
    "vllm_omni/generation/engine.py:OneShotEngine._continue": "a request's boundary",
    "vllm_omni/generation/engine.py:OneShotEngine._release": "a request's boundary",
    "vllm_omni/model_executor/models/smol_voice/bridges.py:TokenReader.read": (
        "tokenizers raises plain Exception; every other message is raised again"
    ),
    "vllm_omni/generation/forward.py:run_forward": "a batch's boundary: its members run one by one",
}
"""`path:function` of every handler that swallows everything: it stands at a boundary."""

PICKLING_FILES: Final[dict[str, str]] = {
    "vllm_omni/engine/process_shell.py": "start arguments for the child, as spawn does",
    "vllm_omni/engine/process_child.py": "what its own parent wrote, once, at start",
}
"""Files that may pickle; nothing that came over a socket is ever unpickled."""
