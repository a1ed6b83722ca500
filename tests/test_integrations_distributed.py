"""Patched models under DistributedDataParallel and as FSDP2 units, in one process: the training of the bare model."""

import pytest
import torch
import torch.distributed as dist
from support.tiny_transducers import MODELS, make_batch, make_transducer
from torch.nn.parallel import DistributedDataParallel

fsdp = pytest.importorskip("torch.distributed.fsdp", reason="needs torch.distributed")
if not hasattr(fsdp, "fully_shard"):
    pytest.skip("needs FSDP2", allow_module_level=True)


@pytest.fixture(autouse=True, scope="module")
def group(tmp_path_factory):
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path_factory.mktemp('group') / 'file'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def losses_of(model, batch, steps=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        output = model(**batch)
        output.loss.backward()
        optimizer.step()
        losses.append(output.loss.item())
    return torch.tensor(losses), output


def shard(model, units):
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    for unit in units:
        fsdp.fully_shard(model.get_submodule(unit), mesh=mesh)
    return model


UNITS = {
    "the whole": [""],
    "encoder and the whole": ["encoder", ""],
    "head": ["joint.head"],
    "joint": ["joint"],
    "head, joint, decoder and the whole": ["joint.head", "joint", "decoder", ""],
}


@pytest.mark.parametrize("use", ["use_loss", "use_fused_loss"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("units", UNITS.values(), ids=UNITS.keys())
def test_fsdp_units(kernel, use, name, units):
    batch, plain = make_batch(name), make_transducer(name)
    kernel.use_fused_loss(plain)
    expected, _ = losses_of(plain, batch)
    assert expected[-1] < expected[0]
    model = make_transducer(name)
    getattr(kernel, use)(model)
    losses, output = losses_of(shard(model, units), batch)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=0)
    assert (output.logits is None) == (use == "use_fused_loss")


@pytest.mark.parametrize("units", UNITS.values(), ids=UNITS.keys())
def test_patched_after_sharding(kernel, units):
    name = MODELS[0]
    batch, plain = make_batch(name), make_transducer(name)
    kernel.use_fused_loss(plain)
    expected, _ = losses_of(plain, batch)
    model = shard(make_transducer(name), units)
    kernel.use_fused_loss(model)
    losses, output = losses_of(model, batch)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=0)
    assert output.logits is None
    kernel.restore_loss(model)
    assert model(**batch).logits is not None


def test_restored_under_fsdp(kernel):
    """The class that FSDP has put on top stays; the loss is the model's own again."""
    name = MODELS[0]
    model, batch = make_transducer(name), make_batch(name)
    kernel.use_fused_loss(model)
    shard(model, [""])
    kernel.restore_loss(model)
    assert isinstance(model, fsdp.FSDPModule)
    assert model(**batch).logits is not None


@pytest.mark.parametrize("use", ["use_loss", "use_fused_loss"])
@pytest.mark.parametrize("name", MODELS)
def test_data_parallel(kernel, use, name):
    batch, plain = make_batch(name), make_transducer(name)
    kernel.use_fused_loss(plain)
    expected, _ = losses_of(plain, batch)
    model = make_transducer(name)
    getattr(kernel, use)(model)
    losses, output = losses_of(DistributedDataParallel(model), batch)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=0)
    assert (output.logits is None) == (use == "use_fused_loss")


def test_patched_inside_data_parallel(kernel):
    name = MODELS[0]
    model = DistributedDataParallel(make_transducer(name))
    kernel.use_fused_loss(model)
    assert model(**make_batch(name)).logits is None
