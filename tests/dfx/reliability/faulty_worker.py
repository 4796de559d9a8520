"""vLLM's worker, with orders: what happens in one step of an autoregressive stage."""

from __future__ import annotations

import time
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput

from tests.dfx.reliability.cut_sockets import cut_sockets
from tests.dfx.reliability.orders import Fault, Order, order_in
from vllm_omni.core.token_streams import TokenStreams, targets_of
from vllm_omni.distributed.omni_connectors import wire
from vllm_omni.distributed.omni_connectors.sender import ZmqSender

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


class FaultyWorker(Worker):  # type: ignore[misc,valid-type]
    """Obeys the orders of the requests in each step, before the step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._orders: dict[str, Order] = {}
        self._num_steps: dict[str, int] = {}
        self._is_broken = False
        _install_losses()

    def nap(self, seconds: float) -> None:
        """A call that takes its time."""
        time.sleep(seconds)

    def execute_dummy_batch(self) -> None:
        self._check()
        super().execute_dummy_batch()

    def _check(self) -> None:
        if self._is_broken:
            raise RuntimeError("broken by the test")

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        self._check()
        for request_id in scheduler_output.finished_req_ids:
            self._orders.pop(request_id, None)
            self._num_steps.pop(request_id, None)
        for request in scheduler_output.scheduled_new_reqs:
            params = request.sampling_params
            order = order_in(params.seed if params is not None else None)
            if order is not None:
                self._orders[request.req_id] = order
        self._obey(scheduler_output)
        return super().execute_model(scheduler_output)

    def _obey(self, scheduler_output: SchedulerOutput) -> None:
        pause_ms = 0
        for request_id in scheduler_output.num_scheduled_tokens:
            order = self._orders.get(request_id)
            if order is None:
                continue
            step = self._num_steps.get(request_id, 0)
            self._num_steps[request_id] = step + 1
            if order.fault is Fault.PACE or (order.fault is Fault.HANG and step == 1):
                pause_ms = max(pause_ms, order.value)
            elif step >= order.value:
                self._fail(order.fault, is_first=step == order.value)
        time.sleep(pause_ms / 1000)

    def _fail(self, fault: Fault, *, is_first: bool) -> None:
        match fault:
            case Fault.RAISE:
                raise RuntimeError("ordered by the test")
            case Fault.MEMORY:
                raise MemoryError("ordered by the test")
            case Fault.CUT_SOCKETS if is_first:
                cut_sockets()
            case Fault.CUT_ALL if is_first:
                cut_sockets(only_data=False)
            case Fault.BREAK:
                self._is_broken = True
                self._check()


def _install_losses() -> None:
    """Have this process's sender lose messages of the streams whose requests order it."""
    orders: dict[str, Order] = {}
    real_open, real_post = TokenStreams.open, ZmqSender._post

    def remember(self: TokenStreams, request_id: str, params: Any, prompt: Any = None) -> None:
        order = order_in(params.seed if params is not None else None)
        if order is not None:
            orders.update((target.stream, order) for target in targets_of(params))
        real_open(self, request_id, params, prompt)

    def lose(self: ZmqSender, link: Any, message: wire.Message, payload: Any = None) -> bool:
        if _is_lost(message, orders):
            return True
        return real_post(self, link, message, payload)

    TokenStreams.open, ZmqSender._post = remember, lose  # type: ignore[method-assign]


def _is_lost(message: wire.Message, orders: dict[str, Order]) -> bool:
    if isinstance(message, wire.Chunk):
        order = orders.get(message.stream)
        lost = order is not None and order.fault is Fault.LOSE_CHUNK
        return lost and order is not None and order.value == message.seq
    if isinstance(message, wire.End):
        order = orders.pop(message.stream, None)
        return order is not None and order.fault is Fault.LOSE_END
    return False
