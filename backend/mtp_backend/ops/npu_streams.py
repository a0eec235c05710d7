"""Work beside the main stream of an NPU: functions side by side, and weights that are loaded ahead of their use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch_npu
from torch import Tensor

from mtp_backend.ops.interface import Result
from mtp_backend.ops.npu_prefetch import check_prefetch, prefetch_range


class SideStream:
    """A second stream that forks off the current one and joins it again, also inside a capture."""

    def __init__(self) -> None:
        self._side = torch.npu.Stream()

    @contextmanager
    def forked(self) -> Iterator[None]:
        """What is launched inside goes on this stream, behind all that the current one has so far."""
        self._side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(self._side):
            yield

    def join(self) -> None:
        """The current stream waits for this one."""
        torch.npu.current_stream().wait_stream(self._side)

    def beside(self, x: Tensor, first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """first(x), and second(x) on this stream."""
        with self.forked():
            other = second(x)
        # Memory is handed out again in the order of the stream that it was taken on: the other stream must be known.
        x.record_stream(self._side)
        result = first(x)
        self.join()
        other.record_stream(torch.npu.current_stream())
        return [result, other]


class Prefetch:
    """Loads the beginnings of weights into the device's cache (L2).

    Args:
        limit: bytes of a weight at most.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._stream = SideStream()

    def while_loading(self, weight: Tensor, after: Tensor, compute: Callable[[], Result]) -> Result:
        """compute(), and `weight` on its way meanwhile; what comes behind waits for both."""
        offset, size = prefetch_range(weight, self._limit)
        check_prefetch(weight, offset, size)
        if torch.compiler.is_compiling():
            # The graph engine orders by what depends on what, and has streams of its own.
            torch_npu.npu_prefetch(weight, after, size, offset)
            return compute()
        with self._stream.forked():
            torch_npu.npu_prefetch(weight, None, size, offset)
        result = compute()
        self._stream.join()
        return result
