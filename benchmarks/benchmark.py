"""The workloads of the `kernels benchmark` command: forward and backward on shapes of real training runs.

    pip install "kernels[benchmark]"
    kernels benchmark kernels-community/tdt-loss --version 1     the kernel that the Hub holds
    make build && kernels benchmark .                            the build in this checkout

(The command takes a folder, as here; it does not ask LOCAL_KERNELS for one when it fetches these scripts.) Each workload is
verified on the first sample before it is timed, against the recursions below, which need nothing but torch. What the command
prints as reference time and speedup is the time of that one sample, not of the batch.
"""

import torch
from kernels.benchmark import Benchmark

DURATIONS = [0, 1, 2, 3, 4]


def along_labels(below: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(U + 1,) alpha of one frame: `below`, what arrives from earlier frames, and the label arcs within the frame, labels[u] of them before u."""
    return labels + (below - labels).logcumsumexp(-1)


def before(label: torch.Tensor) -> torch.Tensor:
    """(..., U) log-weights of label arcs to (..., U + 1), the sum of those before u."""
    return torch.nn.functional.pad(label.cumsum(-1), (1, 0))


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
        """Frame by frame: arcs of positive durations arrive from earlier frames, labels of duration 0 from the same frame."""
        tokens, durations = logits[0, ..., : self.V].log_softmax(-1), logits[0, ..., self.V :].log_softmax(-1).double()
        T = tokens.shape[0]
        blank = tokens[..., self.V - 1].double()  # (T, U + 1)
        label = tokens[:, :-1].gather(-1, self.targets[:1, :, None].expand(T, -1, -1)).squeeze(-1).double()  # (T, U)
        zero = DURATIONS.index(0)
        labels = before(label + durations[:, :-1, zero])
        alpha, exits = [labels[0]], []
        for t in range(1, T + 1):
            arriving = []
            for i, d in enumerate(DURATIONS):
                if 0 < d <= t:
                    arriving.append(alpha[t - d] + blank[t - d] + durations[t - d, :, i])
                    if t == T:
                        exits.append(arriving[-1][-1])
                    else:
                        by_label = alpha[t - d][:-1] + label[t - d] + durations[t - d, :-1, i]
                        arriving.append(torch.nn.functional.pad(by_label, (1, 0), value=-torch.inf))
            if t < T:
                alpha.append(along_labels(torch.stack(arriving).logsumexp(0), labels[t]))
        return -torch.stack(exits).logsumexp(0)

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
        """Frame by frame: a blank arrives from the frame before, labels from the same frame."""
        lp = logits[0].log_softmax(-1)  # (T, U + 1, V)
        T = lp.shape[0]
        blank = lp[..., self.V - 1].double()  # (T, U + 1)
        label = lp[:, :-1].gather(-1, self.targets[:1, :, None].expand(T, -1, -1)).squeeze(-1).double()  # (T, U)
        labels = before(label)
        alpha = labels[0]
        for t in range(1, T):
            alpha = along_labels(alpha + blank[t - 1], labels[t])
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
