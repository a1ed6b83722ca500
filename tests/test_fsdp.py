"""Fully sharded data parallel, FSDP2 (`fully_shard`) and FSDP1: three steps of a sharded model are those of the whole one.

In one process, where each case is a test, and in two (support/processes.py starts them); on the CPU with gloo, on GPUs with nccl. The whole
model computes its loss from copies of the slices, so no gradient can go past the hooks with which FSDP gathers and frees its weights.
"""

import pytest
import torch
import torch.distributed as dist
from support.processes import devices, run_in_two_processes
from support.small_model import BLANK, DURATIONS, FEATURES, VOCAB, make_speech
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.utils.checkpoint import checkpoint

STEPS, RATE = 3, 0.3
TOLERANCE = {"rtol": 1e-9, "atol": 1e-11}  # float64
SLICES = ("TDTLoss", "parakeet_tdt_loss", "tdt_loss")
DENSE = (*SLICES, "tdt_loss_joint", "rnnt_loss")
FUSED = ("tdt_loss_fused_joint", "rnnt_loss_fused_joint")


class Joint(torch.nn.Module):
    """The joint network: logits, or the loss of a fused function, which takes the weights of the head."""

    def __init__(self, hidden, columns):
        super().__init__()
        self.project = torch.nn.Linear(hidden, hidden)
        self.head = torch.nn.Linear(hidden, columns)

    def forward(self, encoded, decoded, fused_loss=None):
        encoded = self.project(encoded)
        if fused_loss is not None:
            return fused_loss(encoded, decoded, self.head.weight, self.head.bias)
        return self.head(torch.relu(encoded[:, :, None] + decoded[:, None]))


class Model(torch.nn.Module):
    """Returns the logits, or, given a loss of logits, that."""

    def __init__(self, columns, checkpointed=False):
        super().__init__()
        self.encoder, self.decoder = torch.nn.Linear(FEATURES, 8), torch.nn.Embedding(VOCAB, 8)
        self.joint, self.checkpointed = Joint(8, columns), checkpointed

    def forward(self, features, targets, loss=None, fused_loss=None):
        decoded = self.decoder(torch.nn.functional.pad(targets, (1, 0), value=BLANK))

        def joint_and_loss(encoded):
            logits = self.joint(encoded, decoded, fused_loss)
            return logits if loss is None else loss(logits)

        encoded = self.encoder(features)
        return (
            checkpoint(joint_and_loss, encoded, use_reentrant=False) if self.checkpointed else joint_and_loss(encoded)
        )


def make_model(name, device, dtype=torch.float64, **options):
    torch.manual_seed(0)
    return Model(VOCAB + (0 if name.startswith("rnnt") else len(DURATIONS)), **options).to(device, dtype)


def loss_of(kernel, name, labels):
    """The loss of this name as a function of logits. "copies": of copies of the slices."""

    def loss(logits):
        if name.startswith("rnnt"):
            return kernel.rnnt_loss(logits, *labels, BLANK, "mean_batch")
        if name.startswith("tdt_loss_joint"):
            return kernel.tdt_loss_joint(logits, *labels, BLANK, DURATIONS, 0.0, "mean_batch")
        tokens, durations = logits[..., :VOCAB], logits[..., VOCAB:]
        if name == "TDTLoss":
            return kernel.layers.TDTLoss()(tokens, durations, *labels, BLANK, DURATIONS, 0.0, "mean_batch")
        if name == "parakeet_tdt_loss":
            return kernel.parakeet_tdt_loss(tokens, durations, *labels, BLANK, DURATIONS, 0.0, "mean_batch")
        if name == "copies":
            tokens, durations = tokens.clone(), durations.clone()
        return kernel.tdt_loss(tokens, durations, *labels, BLANK, DURATIONS, 0.0, "mean_batch")

    return loss


def loss_in_one_step(kernel, model, name, inputs, inside):
    features, *labels = inputs
    if name in FUSED:

        def fused_loss(*operands):
            durations = () if name.startswith("rnnt") else (DURATIONS,)
            return getattr(kernel, name)(*operands, *labels, BLANK, *durations, reduction="mean_batch")

        return model(features, labels[0], fused_loss=fused_loss)
    loss = loss_of(kernel, name, labels)
    return model(features, labels[0], loss=loss) if inside else loss(model(features, labels[0]))


def train(kernel, model, name, inputs, inside=False):
    """The losses of some steps."""
    optimizer, losses = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE), []
    for _ in range(STEPS):
        loss = loss_in_one_step(kernel, model, name, inputs, inside)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole(name):
    """What is trained as one piece, to compare with."""
    return "rnnt_loss" if name.startswith("rnnt") else "copies"


# What is sharded: units from the inside out.

UNITS = {
    "model": lambda model: [model],
    "head": lambda model: [model.joint.head, model],
    "joint network": lambda model: [model.joint, model],
    "nested": lambda model: [model.encoder, model.joint.project, model.joint.head, model.joint, model],
    "head alone, its input frozen": lambda model: [model.joint.head],
}
EVERY_UNIT_WITH_WEIGHTS = ("model", "joint network")  # where a fused loss finds the head's weights gathered


def freeze(model, units):
    if "frozen" in units:
        for part in (model.encoder, model.decoder, model.joint.project):
            part.requires_grad_(False)
    return model


def shard(model, units, device, **options):
    mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
    for unit in UNITS[units](freeze(model, units)):
        fully_shard(unit, mesh=mesh, **options)
    return model


def wrap(model, units, device, **options):
    """The same in FSDP1, whose units are wrapped modules."""
    options = {"device_id": torch.device(device), "use_orig_params": True, **options}
    wanted = UNITS[units](freeze(model, units))
    for parent in list(model.modules())[::-1]:
        for name, child in list(parent.named_children()):
            if child in wanted:
                setattr(parent, name, FSDP1(child, **options))
    return FSDP1(model, **options) if model in wanted else model


def full_parameters(model):
    """By name, as the model has them before it is sharded."""
    if any(isinstance(module, FSDP1) for module in model.modules()):
        gathered = {}
        root = [module for module in model.modules() if isinstance(module, FSDP1)][0]
        with FSDP1.summon_full_params(root, writeback=False):
            for name, parameter in model.named_parameters():
                gathered[name.replace("_fsdp_wrapped_module.", "")] = parameter.detach().clone()
        return gathered
    named = model.named_parameters()
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in named}


def assert_same_training(kernel, name, units, device, distribute, inputs, mine, inside=False, **model_options):
    """`mine`: the samples of this process."""
    one = freeze(make_model(name, device), units)
    before = {n: p.detach().clone() for n, p in one.named_parameters()}
    expected_losses = train(kernel, one, whole(name), inputs)
    model = distribute(make_model(name, device, **model_options), units, device)
    losses = train(kernel, model, name, [x[mine] for x in inputs], inside)
    assert expected_losses[-1] < 0.97 * expected_losses[0]  # three steps do something
    if len(mine) == len(inputs[0]):
        assert losses == pytest.approx(expected_losses, rel=1e-9)
    actual = full_parameters(model)
    for parameter_name, expected in one.named_parameters():
        moved = not torch.equal(expected, before[parameter_name])
        assert moved == expected.requires_grad, parameter_name
        torch.testing.assert_close(
            actual[parameter_name], expected.detach(), **TOLERANCE, msg=lambda m, n=parameter_name: f"{name}, {n}: {m}"
        )


@pytest.fixture(scope="module")
def one_process(device, tmp_path_factory):
    """A process group of this process alone."""
    rendezvous = tmp_path_factory.mktemp("rendezvous") / "file"
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1
    )
    yield device
    dist.destroy_process_group()


def speech(device, dtype=torch.float64):
    return make_speech(B=4, T=7, U=3, target_lengths=[3, 2, 0, 3], device=device, dtype=dtype)


EVERYONE = [0, 1, 2, 3]
every_unit = pytest.mark.parametrize("units", UNITS)
fsdp2_and_1 = pytest.mark.parametrize("distribute", [shard, wrap], ids=["fsdp2", "fsdp1"])


def test_the_loss_falls(kernel, one_process):
    """The report: the loss of a model under `fully_shard` stayed at 3.54 for ever, without an error."""
    for name in SLICES:
        model = shard(make_model(name, one_process), "model", one_process)
        losses = train(kernel, model, name, speech(one_process))
        assert losses[0] > losses[1] > losses[2] and losses[2] < 0.97 * losses[0]


@pytest.mark.parametrize("name", DENSE)
@every_unit
@fsdp2_and_1
def test_losses_and_units(kernel, one_process, name, units, distribute):
    assert_same_training(kernel, name, units, one_process, distribute, speech(one_process), EVERYONE)


@every_unit
@fsdp2_and_1
def test_losses_within_the_model(kernel, one_process, units, distribute):
    """As transformers' models compute theirs."""
    for name in ("TDTLoss", "parakeet_tdt_loss"):
        assert_same_training(kernel, name, units, one_process, distribute, speech(one_process), EVERYONE, inside=True)


@pytest.mark.parametrize("name", ("TDTLoss", *FUSED))
@fsdp2_and_1
def test_fused_losses_and_weights_kept_gathered(kernel, one_process, name, distribute):
    kept = {"reshard_after_forward": False} if distribute is shard else {}
    for units in EVERY_UNIT_WITH_WEIGHTS:
        for options in ({}, kept):

            def with_options(model, units, device, options=options):
                return distribute(model, units, device, **options)

            assert_same_training(kernel, name, units, one_process, with_options, speech(one_process), EVERYONE)


@pytest.mark.parametrize("name", ("TDTLoss", "parakeet_tdt_loss", "rnnt_loss", "tdt_loss_fused_joint"))
@fsdp2_and_1
def test_checkpointed(kernel, one_process, name, distribute):
    for inside in (False, True):
        inputs = speech(one_process)
        assert_same_training(
            kernel, name, "model", one_process, distribute, inputs, EVERYONE, inside, checkpointed=True
        )


def mixed_precision(distribute):
    if distribute is shard:
        return {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    return {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}


@pytest.mark.parametrize("name", SLICES)
@fsdp2_and_1
@pytest.mark.parametrize("units", ["model", "nested"])
def test_mixed_precision(kernel, one_process, name, distribute, units):
    """Weights of float32, sums of float32, everything between in bfloat16."""

    def trained(name):
        model = distribute(
            make_model(name, one_process, torch.float32), units, one_process, **mixed_precision(distribute)
        )
        losses = train(kernel, model, name, speech(one_process, torch.float32))
        return losses, full_parameters(model)

    (losses, actual), (expected_losses, expected) = trained(name), trained("copies")
    assert losses == pytest.approx(expected_losses, rel=1e-3)  # another last bit before rounding may round otherwise
    whole_model = make_model(name, one_process, torch.float32)
    train(kernel, whole_model, "copies", speech(one_process, torch.float32))
    for parameter_name, parameter in whole_model.named_parameters():
        torch.testing.assert_close(actual[parameter_name], expected[parameter_name], rtol=0, atol=2e-3)
        torch.testing.assert_close(actual[parameter_name], parameter.detach(), rtol=0, atol=0.02)


def test_weights_frozen_and_a_hook_on_the_logits(kernel, one_process):
    """FSDP's hooks and the user's own together."""
    inputs = speech(one_process)
    features, *labels = inputs
    trained = []
    for name in ("copies", *SLICES):
        model = shard(make_model(name, one_process), "nested", one_process)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for _ in range(STEPS):
            logits = model(features, labels[0])
            logits.register_hook(lambda grad: grad * 0.5)
            optimizer.zero_grad()
            loss_of(kernel, name, labels)(logits).backward()
            optimizer.step()
        trained.append(full_parameters(model))
    for name, expected in trained[0].items():
        for actual in trained[1:]:
            torch.testing.assert_close(actual[name], expected, **TOLERANCE)


# Two processes: each has half of the samples, and FSDP takes the mean of the gradients.


def check(kernel, rank, device):
    inputs, mine = speech(device), [[0, 2], [1, 3]][rank]

    def same_training(name, units, distribute, inside=False, checkpointed=False, **options):
        def with_options(model, units, device):
            return distribute(model, units, device, **options)

        assert_same_training(kernel, name, units, device, with_options, inputs, mine, inside, checkpointed=checkpointed)

    for distribute in (shard, wrap):
        for units in UNITS:
            same_training("TDTLoss", units, distribute)
        same_training("parakeet_tdt_loss", "joint network", distribute, inside=True)
        for name in ("tdt_loss_joint", "rnnt_loss"):
            same_training(name, "nested", distribute)
        for name in FUSED:
            same_training(name, "joint network", distribute)
        for name in ("TDTLoss", "tdt_loss_fused_joint"):
            same_training(name, "model", distribute, inside=True, checkpointed=True)
    for reshard in (True, False):
        same_training("TDTLoss", "nested", shard, reshard_after_forward=reshard)
    # Nested units and SHARD_GRAD_OP: FSDP1 on the CPU then trains otherwise than the whole model, whatever the loss.
    for strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        same_training("TDTLoss", "model", wrap, sharding_strategy=strategy)


@devices
def test_two_processes(tmp_path, device):
    run_in_two_processes(check, tmp_path, device)
