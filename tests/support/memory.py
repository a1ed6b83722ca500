"""Memory that a call takes: the peak, and the padded gradients that slices of a tensor cost."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def peak_extra_bytes(function, device):
    """The most memory that `function` held at any time on top of what was there before, from torch's allocator."""
    if device != "cpu":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held, peak = 0, 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


class PaddedSlices(TorchDispatchMode):
    """Counts the tensors that the backward of a slice makes of the slice's gradient: of the size of the whole, zeros all around it."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        # What is no plain tensor stands for one, and takes no memory.
        self.count += function is torch.ops.aten.slice_backward.default and type(result) is torch.Tensor
        return result
