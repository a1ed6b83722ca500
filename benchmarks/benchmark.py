"""The workloads that `kernels benchmark kernels-community/tdt-loss` runs: forward and backward on shapes of real training runs.

Each is verified against transformers' loss on the first sample before it is timed.
"""

import torch
from kernels.benchmark import Benchmark

DURATIONS = [0, 1, 2, 3, 4]


class TDTLossBenchmark(Benchmark):
    seed = 0

    def prepare(self, B: int, T: int, U: int, V: int, dtype: torch.dtype) -> None:
        self.V = V
        self.logits = torch.randn(B, T, U + 1, V + len(DURATIONS), device=self.device, dtype=dtype, requires_grad=True)
        self.targets = torch.randint(0, V - 1, (B, U), device=self.device)
        self.logit_lengths = torch.full((B,), T, device=self.device)
        self.target_lengths = torch.full((B,), U, device=self.device)

    def run(self) -> None:
        self.logits.grad = None
        self.losses = self.kernel.tdt_loss_joint(
            self.logits,
            self.targets,
            self.logit_lengths,
            self.target_lengths,
            blank_token_id=self.V - 1,
            durations=DURATIONS,
            reduction="none",
        )
        self.losses.sum().backward()

    def reference(self) -> torch.Tensor:
        """Loss and gradient of the first sample by transformers; ours, of the last run, become `out`."""
        from transformers.loss.loss_tdt import tdt_loss

        logits = self.logits[:1].detach().float().requires_grad_()
        losses = tdt_loss(
            logits[..., : self.V],
            logits[..., self.V :],
            self.targets[:1],
            self.logit_lengths[:1],
            self.target_lengths[:1],
            self.V - 1,
            DURATIONS,
            reduction="none",
        )
        losses.sum().backward()
        self.out = torch.cat([self.losses[:1].detach(), self.logits.grad[0].float().flatten()])
        return torch.cat([losses.detach(), logits.grad[0].flatten()])

    def setup_base(self) -> None:
        self.prepare(8, 100, 20, 1025, torch.float32)

    def benchmark_base(self) -> None:
        self.run()

    def verify_base(self) -> torch.Tensor:
        return self.reference()

    def setup_large(self) -> None:
        self.prepare(4, 200, 40, 8193, torch.float32)

    def benchmark_large(self) -> None:
        self.run()

    def verify_large(self) -> torch.Tensor:
        return self.reference()

    def setup_fine_tuning(self) -> None:
        self.prepare(16, 250, 99, 1025, torch.bfloat16)

    def benchmark_fine_tuning(self) -> None:
        self.run()

    def verify_fine_tuning(self) -> torch.Tensor:
        return self.reference()
