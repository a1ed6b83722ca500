"""The workloads of the `kernels benchmark` command: forward and backward on shapes of real training runs.

    pip install "kernels[benchmark]"
    kernels benchmark kernels-community/tdt-loss --version 1     the kernel that the Hub holds
    make build && kernels benchmark .                            the build in this checkout

(The command takes a folder, as here; it does not ask LOCAL_KERNELS for one when it fetches these scripts.) Each workload is
verified on the first sample before it is timed: TDT against transformers' loss, RNN-T against the recursion below. What the
command prints as reference time and speedup is the time of that one sample, not of the batch.
"""

import torch
from kernels.benchmark import Benchmark

DURATIONS = [0, 1, 2, 3, 4]


class Workload:
    """A batch of full lengths, and the loss and gradient that were last computed from it."""

    seed = 0

    def prepare(self, B: int, T: int, U: int, V: int, D: int, dtype: torch.dtype) -> None:
        self.V = V
        self.logits = torch.randn(B, T, U + 1, V + D, device=self.device, dtype=dtype, requires_grad=True)
        self.targets = torch.randint(0, V - 1, (B, U), device=self.device)
        self.logit_lengths = torch.full((B,), T, device=self.device)
        self.target_lengths = torch.full((B,), U, device=self.device)

    @property
    def lengths(self) -> tuple[torch.Tensor, ...]:
        return self.targets, self.logit_lengths, self.target_lengths

    def run(self) -> None:
        self.logits.grad = None
        self.losses = self.loss()
        self.losses.sum().backward()

    def reference(self) -> torch.Tensor:
        """Loss and gradient of the first sample by another implementation; ours, of the last run, become `out`."""
        logits = self.logits[:1].detach().float().requires_grad_()
        loss = self.reference_loss(logits)
        loss.backward()
        self.out = torch.cat([self.losses[:1].detach(), self.logits.grad[0].float().flatten()])
        return torch.cat([loss.detach().float().reshape(1), logits.grad[0].flatten()])


class TDTLossBenchmark(Workload, Benchmark):
    def loss(self) -> torch.Tensor:
        return self.kernel.tdt_loss_joint(self.logits, *self.lengths, self.V - 1, DURATIONS, reduction="none")

    def reference_loss(self, logits: torch.Tensor) -> torch.Tensor:
        from transformers.loss.loss_tdt import tdt_loss

        first = (tensor[:1] for tensor in self.lengths)
        tokens, durations = logits[..., : self.V], logits[..., self.V :]
        return tdt_loss(tokens, durations, *first, self.V - 1, DURATIONS, reduction="sum")

    def setup_base(self) -> None:
        self.prepare(8, 100, 20, 1025, len(DURATIONS), torch.float32)

    def benchmark_base(self) -> None:
        self.run()

    def verify_base(self) -> torch.Tensor:
        return self.reference()

    def setup_large(self) -> None:
        self.prepare(4, 200, 40, 8193, len(DURATIONS), torch.float32)

    def benchmark_large(self) -> None:
        self.run()

    def verify_large(self) -> torch.Tensor:
        return self.reference()

    def setup_fine_tuning(self) -> None:
        self.prepare(16, 250, 99, 1025, len(DURATIONS), torch.bfloat16)

    def benchmark_fine_tuning(self) -> None:
        self.run()

    def verify_fine_tuning(self) -> torch.Tensor:
        return self.reference()


class RNNTLossBenchmark(Workload, Benchmark):
    def loss(self) -> torch.Tensor:
        return self.kernel.rnnt_loss(self.logits, *self.lengths, self.V - 1, "none")

    def reference_loss(self, logits: torch.Tensor) -> torch.Tensor:
        """Row by row in t; within a row, alpha(u) = logsumexp over v <= u of (alpha(v) from below) + (labels v to u)."""
        lp = logits[0].log_softmax(-1)  # (T, U + 1, V)
        T = lp.shape[0]
        blank = lp[..., self.V - 1].double()  # (T, U + 1)
        label = lp[:, :-1].gather(-1, self.targets[:1, :, None].expand(T, -1, -1)).squeeze(-1).double()  # (T, U)
        labels = torch.nn.functional.pad(label.cumsum(-1), (1, 0))  # (T, U + 1), of all labels before u
        alpha = labels[0]
        for t in range(1, T):
            alpha = labels[t] + (alpha + blank[t - 1] - labels[t]).logcumsumexp(-1)
        return -(alpha[-1] + blank[-1, -1])

    def setup_base(self) -> None:
        self.prepare(8, 100, 20, 1025, 0, torch.float32)

    def benchmark_base(self) -> None:
        self.run()

    def verify_base(self) -> torch.Tensor:
        return self.reference()

    def setup_large(self) -> None:
        self.prepare(4, 200, 40, 8193, 0, torch.float32)

    def benchmark_large(self) -> None:
        self.run()

    def verify_large(self) -> torch.Tensor:
        return self.reference()

    def setup_fine_tuning(self) -> None:
        self.prepare(16, 250, 99, 1025, 0, torch.bfloat16)

    def benchmark_fine_tuning(self) -> None:
        self.run()

    def verify_fine_tuning(self) -> torch.Tensor:
        return self.reference()
