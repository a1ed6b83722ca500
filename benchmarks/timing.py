"""How long calls take on the GPU and how much memory they need: what sweep.py and fused.py share."""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Times(NamedTuple):
    """Milliseconds of a call: the median, and the percentiles between which three fifths of the calls lie."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, milliseconds: list[float]) -> "Times":
        p20, _, _, p80 = statistics.quantiles(milliseconds, n=5, method="inclusive")
        return cls(statistics.median(milliseconds), p20, p80)

    def divided_by(self, count: int) -> "Times":
        return Times(*(ms / count for ms in self))

    def fields(self, part: str = "") -> dict[str, float]:
        """As the results have them: ms, ms_p20 and ms_p80; for the part "forward" ms_forward, ms_forward_p20 and so on."""
        name = f"ms_{part}" if part else "ms"
        return {name: self.median, f"{name}_p20": self.p20, f"{name}_p80": self.p80}


def times_of(
    call: Callable[[Any], Any], before: Callable[[int], Any] = lambda i: i, *, repeats: int = 0, warmup: int = 8
) -> Times:
    """Times of `call(before(i))` for i = 0, 1, ..., of which only `call` lies between the two events.

    Nothing waits for the GPU between the calls, so that several are in flight as in training. Here `before` makes what the call needs: fresh leaves, or
    for a backward the graph, which cannot be used twice. It runs right before each call and is dropped right after, so that one graph exists at a time.

    Of `repeats` calls. 0: of as many as a fifth of a second holds, 25 to 400; where call and `before` take less than a millisecond, of the window with
    the lowest median of five, since the host decides about short calls, and what else it does only makes them longer."""
    _run(call, before, warmup)
    windows = 1
    if not repeats:
        torch.cuda.synchronize()
        start = time.perf_counter()
        _run(call, before, warmup)  # again: the first calls also load kernels and get memory
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / warmup
        repeats = min(400, max(25, int(0.2 / seconds)))
        windows = 5 if seconds < 1e-3 else 1
    return min((_window(call, before, repeats) for _ in range(windows)), key=lambda times: times.median)


def _run(call: Callable[[Any], Any], before: Callable[[int], Any], repeats: int) -> None:
    for i in range(repeats):
        call(before(i))


def _window(call: Callable[[Any], Any], before: Callable[[int], Any], repeats: int) -> Times:
    events = []
    for i in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        given = before(i)
        start.record()
        result = call(given)
        end.record()
        events.append((start, end))
        del given, result  # outside of the timed window, and before the next graph is made
    torch.cuda.synchronize()
    return Times.of([start.elapsed_time(end) for start, end in events])


def graph_times(calls: list[Callable[[], Any]]) -> Times:
    """Times of one call when all are replayed in turn as CUDA graphs."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graphs = []
    for call in calls:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graphs.append(graph)
    return times_of(lambda i: graphs[i % len(graphs)].replay())


def copy_tbps() -> float:
    """Bandwidth of a copy within the GPU's memory, reads and writes counted."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / times_of(lambda i: target.copy_(source), repeats=10).median / 1e9


def peak_extra_bytes(call: Callable[[], Any]) -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
