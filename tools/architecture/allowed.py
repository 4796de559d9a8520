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
    "vllm_omni/engine/rank_processes.py:RankProcesses._main": (
        "the start's boundary: whoever waits for it gets the error"
    ),
    "vllm_omni/engine/replica_calls.py:call_replicas": ("the caller's boundary: it gets the error"),
    "vllm_omni/engine/process_child.py:ChildShell._beat": "a figure that cannot be had is no news",
    "vllm_omni/engine/process_child.py:run_child": "process boundary: the error goes to the parent",
    "vllm_omni/engine/supervisor.py:Supervisor._start_again": (
        "a replica's boundary: whatever its start raises, it alone did not start"
    ),
    "vllm_omni/engine/stage_pool.py:StagePool._shutdown_client": (
        "one client's failure must not keep the others running"
    ),
    "vllm_omni/entrypoints/openai/videos/jobs.py:VideoJobs._run": (
        "a job's boundary: whatever the engine, a codec or the disk raises, it alone failed"
    ),
    "vllm_omni/generation/engine.py:OneShotEngine.add": "a request's boundary",
    "vllm_omni/generation/engine.py:OneShotEngine._continue": "a request's boundary",
    "vllm_omni/generation/engine.py:OneShotEngine._release": "a request's boundary",
    "vllm_omni/diffusion/executor/in_process.py:InProcessExecutor._work": (
        "a thread's boundary: it becomes the death of the replica"
    ),
    "vllm_omni/diffusion/worker/isolation.py:_step": (
        "a batch's boundary: its members run one by one"
    ),
    "vllm_omni/diffusion/worker/model_runner.py:ModelRunner._retried": (
        "all but a lack of memory is raised again"
    ),
    "vllm_omni/diffusion/worker/step_runner.py:StepRunner._prepare": "a request's boundary",
    "vllm_omni/diffusion/worker/step_runner.py:StepRunner._decode": "a request's boundary",
    "vllm_omni/diffusion/worker/step_runner.py:StepRunner._preview": (
        "a preview's boundary: the request goes on"
    ),
    "vllm_omni/diffusion/worker/whole_runner.py:WholeRunner._run_whole": "a request's boundary",
    "vllm_omni/model_executor/models/smol_voice/bridges.py:TokenReader.read": (
        "tokenizers raises plain Exception; every other message is raised again"
    ),
    "vllm_omni/generation/forward.py:_run_apart": "a batch's boundary: its members run one by one",
    "vllm_omni/generation/replica_loop.py:ReplicaLoop._call": "the boundary of one call",
    "vllm_omni/model_executor/models/smol_voice/voice.py:PiperVoice._result": (
        "the boundary of one request in the batch"
    ),
    "vllm_omni/core/conditioned_core.py:ConditionedCore._begin": (
        "a request's boundary: outside it is the end of the core"
    ),
    "vllm_omni/core/conditioned_requests.py:ConditionedRequests._take_one": "a request's boundary",
    "vllm_omni/core/stage_core.py:StageCore.add_request": (
        "a request's boundary: outside it is the end of the core"
    ),
    "vllm_omni/core/stage_core.py:StageCore._or_die": (
        "a thread's boundary: it becomes the death of the core"
    ),
    "vllm_omni/core/token_streams.py:TokenStreams.push": (
        "the boundary of one request's streams: its text goes on"
    ),
    "vllm_omni/core/token_streams.py:TokenStreams.refuse": "the boundary of one request's streams",
    "vllm_omni/core/token_streams.py:TokenStreams._leave": "the boundary of one request's streams",
}
"""`path:function` of every handler that swallows everything: it stands at a boundary."""

PICKLING_FILES: Final[dict[str, str]] = {
    "vllm_omni/engine/process_shell.py": "start arguments for the child, as spawn does",
    "vllm_omni/engine/process_child.py": "what its own parent wrote, once, at start",
    "vllm_omni/model_executor/models/common/voice_file.py": (
        "names the error of a reader that builds tensors and plain values only"
    ),
}
"""Files that may pickle; nothing that came over a socket is ever unpickled."""

OWNED_WAITS: Final[dict[str, str]] = {
    "vllm_omni/distributed/omni_connectors/mailbox.py:Mailbox.close:self._thread.join": (
        "the thread: it was told to stop and woken in the lines before"
    ),
    "vllm_omni/distributed/omni_connectors/mailbox.py:Mailbox._read_inbox:self._inbox.recv": (
        "the kernel: the poller said that a message is there, whose other parts come with it"
    ),
    "vllm_omni/distributed/omni_connectors/mailbox.py:Mailbox._on_monitor:monitor.recv_multipart": (
        "the kernel: the poller said that an event is there"
    ),
    "vllm_omni/engine/ar_client.py:ArClient.get_outputs_async:self._core.get_output_async": (
        "the client: outputs, a deadline or the process's death, all on one queue; the process is "
        "watched by its exit and by its heartbeats"
    ),
    "vllm_omni/engine/ar_launch.py:_Handshake.run:self._socket.send_multipart": (
        "`_all_ready`: cancelled when the process dies or makes no progress while it starts"
    ),
    "vllm_omni/engine/ar_launch.py:_Handshake._receive:self._socket.recv_multipart": (
        "`_all_ready`: cancelled when the process dies or makes no progress while it starts"
    ),
    "vllm_omni/engine/mailbox.py:Inbox.take:self._queue.async_q.get": (
        "the orchestrator's task group: cancelled at shutdown; `close` wakes it"
    ),
    "vllm_omni/engine/process_client.py:ProcessClient.get_outputs_async:self._changed.wait": (
        "the client: outputs or the process's death; the process is watched by its exit and by "
        "its heartbeats"
    ),
    "vllm_omni/engine/orchestrator.py:Orchestrator.run:self._shutdown_requested.wait": (
        "whoever owns the engine: `shutdown`; a task that fails cancels it"
    ),
    "vllm_omni/engine/orchestrator.py:Orchestrator._close:asyncio.gather": (
        "`StagePool.close`: each has a time-out"
    ),
    "vllm_omni/engine/orchestrator.py:Orchestrator._next_outputs:client.get_outputs_async": (
        "the client: its outputs or its death; eviction shuts it down"
    ),
    "vllm_omni/engine/orchestrator.py:Orchestrator._serve_messages:self._inbox.take": (
        "the orchestrator's task group: cancelled at shutdown"
    ),
    "vllm_omni/engine/orchestrator.py:Orchestrator._guarded:work": (
        "the work: a client sends and does not wait; a request's deadline aborts what hangs"
    ),
    "vllm_omni/engine/process_shell.py:ReplicaProcess._on_status:self._status.recv": (
        "nobody: the socket does not block"
    ),
    "vllm_omni/engine/rank_processes.py:RankProcesses._main:self._closing.wait": (
        "`close`, which the replica calls however it ends; with its process this thread ends too"
    ),
    "vllm_omni/engine/replica_start.py:ReplicaStarter.start:held.enter_async_context": (
        "the replica that starts on the same device: a start without progress is ended"
    ),
    "vllm_omni/engine/device_turns.py:DeviceTurns.alone:self._is_free.wait": (
        "whoever starts now has a start time-out, and leaves its turn when it ends"
    ),
    "vllm_omni/engine/stage_pool.py:StagePool.wait_closed:asyncio.wait": (
        "`_shutdown_client`: SIGKILL after its grace, and a bounded wait for the exit"
    ),
    "vllm_omni/engine/supervisor.py:Supervisor._start_again:self._pool(replica).wait_closed": (
        "`StagePool.wait_closed`"
    ),
    "vllm_omni/engine/supervisor.py:Supervisor._drain_and_stop:self._pool(replica).wait_closed": (
        "`StagePool.wait_closed`"
    ),
}
"""`path:function:what` of every wait without a time-out of its own: who ends it, and when."""
