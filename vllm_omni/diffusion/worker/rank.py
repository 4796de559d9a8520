"""The process of one rank: meets the others, loads the pipeline, does the jobs it is sent.

The main thread reads jobs and sends results; what computes runs in the two lanes of
`InProcessExecutor`, as in a replica of one rank.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import zmq

from vllm_omni.diffusion.executor.jobs import Broken, Job, Lane, Step
from vllm_omni.diffusion.executor.rank_wire import Drop, pack_result, unpack_order
from vllm_omni.generation.replica_loop import Shell, keep_loaded

if TYPE_CHECKING:
    from vllm_omni.diffusion.executor.in_process import InProcessExecutor

_BATCH: Final = 64
"""Messages read before results are sent."""


def run_rank(
    shell: Shell, /, *, rank: int, order_address: str, result_address: str, store: str
) -> None:
    """Target of a rank's process; it ends by SIGTERM, by SIGKILL or with its replica."""
    from vllm_omni.diffusion.distributed.process_groups import meet
    from vllm_omni.diffusion.executor.in_process import InProcessExecutor
    from vllm_omni.diffusion.worker.worker import Worker

    spec = shell.spec
    shell.progress("meeting the other ranks")
    ranks = meet(rank, len(spec.devices), spec.devices[rank], Path(store))
    shell.progress("loading the pipeline")
    worker = Worker(spec, shell.progress, ranks)
    with contextlib.ExitStack() as stack:
        loop = RankLoop(rank, order_address, result_address)
        stack.callback(loop.close)
        # Not closed: the process's end takes its lanes along, whatever they do.
        executor = InProcessExecutor(worker.runner, loop.wake)
        shell.figures = executor.figures
        keep_loaded()
        shell.ready({"max_batch_size": worker.max_batch_size, "max_prepared": worker.max_prepared})
        loop.run(executor)


class RankLoop:
    """Orders in, results out, and sleep in the kernel between."""

    def __init__(self, rank: int, order_address: str, result_address: str) -> None:
        self._rank = rank
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._context = zmq.Context()
        self._orders = self._context.socket(zmq.PULL)
        self._orders.bind(order_address)
        self._results = self._context.socket(zmq.PUSH)
        self._results.connect(result_address)
        self._poller = zmq.Poller()
        self._poller.register(self._orders, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)

    def wake(self) -> None:
        """A job has ended; from any thread."""
        with contextlib.suppress(BlockingIOError):  # full: the loop is about to look anyway
            os.eventfd_write(self._wake_fd, 1)

    def run(self, executor: InProcessExecutor) -> None:
        """Do what is ordered, for ever.

        Raises:
            BaseException: the rank cannot go on.
        """
        while True:
            if self._wake_fd in dict(self._poller.poll()):
                os.eventfd_read(self._wake_fd)
            for result in executor.take_results():
                if isinstance(result, Broken):
                    raise result.error
                self._results.send_multipart(pack_result(self._rank, result), copy=False)
            self._obey(executor)

    def close(self) -> None:
        """Give the sockets back."""
        self._context.destroy(linger=0)

    def _obey(self, executor: InProcessExecutor) -> None:
        for _ in range(_BATCH):
            try:
                order = unpack_order(self._orders.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            if isinstance(order, Drop):
                executor.drop(order.request_ids)
            else:
                executor.submit(_lane(order), order)


def _lane(job: Job) -> Lane:
    return Lane.DENOISE if isinstance(job, Step) else Lane.MEDIA
