"""uvicorn's HTTP protocol with a bound on headers, which its fast parser reads without one."""

from __future__ import annotations

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class BoundedHttpProtocol(HttpToolsProtocol):
    """Answers 400 and closes when a request's headers are too many or too long.

    The bounds are those of vLLM's flags `--h11-max-incomplete-event-size` and
    `--h11-max-header-count`, on the config that it is made with.
    """

    _num_unfinished_bytes = 0
    _is_in_headers = False

    def on_message_begin(self) -> None:
        self._num_unfinished_bytes = 0
        self._is_in_headers = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= _bound(self.config, "h11_max_header_count"):
            # The parser ends and uvicorn answers 400.
            raise ValueError("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_headers = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._is_in_headers or self.transport.is_closing():
            return
        self._num_unfinished_bytes += len(data)
        if self._num_unfinished_bytes > _bound(self.config, "h11_max_incomplete_event_size"):
            self.logger.warning("Headers that are too long were received.")
            self.send_400_response("The request's headers are too long.")


def _bound(config: uvicorn.Config, name: str) -> int:
    return int(vars(config)[name])
