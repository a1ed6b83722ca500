"""Copies, pickles, wrappers and restorations of patched models: each works on its own parameters, and nothing is patched for ever."""

import copy
import io
import pickle

import pytest
import torch
from support.tiny_transducers import (
    BLANK,
    MODELS,
    assert_same_gradients,
    loss_and_gradients,
    loss_of_logits,
    make_batch,
    make_transducer,
)
from torch.optim.swa_utils import AveragedModel

BOTH = pytest.mark.parametrize("use", ["use_loss", "use_fused_loss"])
EACH = pytest.mark.parametrize("name", MODELS)


def picklable(model):
    """Without what keeps transformers' own models from being pickled where its hooks for kernels hold local classes."""
    for module in model.modules():
        vars(module).pop("_kernel_funcs", None)
    return model


def through_torch_save(model):
    file = io.BytesIO()
    torch.save(picklable(model), file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def averaged(model):
    return AveragedModel(model).module


COPIES = {
    "deepcopy": copy.deepcopy,
    "AveragedModel": averaged,
    "pickle": lambda model: pickle.loads(pickle.dumps(picklable(model))),
    "torch.save": through_torch_save,
    "DataParallel": lambda model: replica(model),
    "copy of a copy": lambda model: copy.deepcopy(copy.deepcopy(model)),
}


def replica(model):
    """As DataParallel makes them, one module at a time, but with parameters of its own."""
    copies = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, other in copies.items():
        for key, child in module._modules.items():
            other._modules[key] = copies[child]
        for key, parameter in module._parameters.items():
            other._parameters[key] = None if parameter is None else torch.nn.Parameter(parameter.detach().clone())
        for key, buffer in module._buffers.items():
            other._buffers[key] = buffer
        if isinstance(other, torch.nn.LSTM):
            other._flat_weights = [getattr(other, key) for key in other._flat_weights_names]
    return copies[model]


@BOTH
@EACH
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_computes_with_its_own_parameters(kernel, use, name, how):
    model, batch = make_transducer(name), make_batch(name)
    getattr(kernel, use)(model)
    other = COPIES[how](model).train()
    plain = make_transducer(name)
    with torch.no_grad():
        for ours, theirs in zip(other.parameters(), plain.parameters()):
            ours.mul_(0.5)
            theirs.mul_(0.5)
    expected, gradients = loss_of_logits(kernel, plain, batch)
    output, ours = loss_and_gradients(other, batch)
    torch.testing.assert_close(output.loss, expected, rtol=1e-5, atol=0)
    assert_same_gradients(ours, gradients)
    assert (output.logits is None) == (use == "use_fused_loss")
    assert all(parameter.grad is None for parameter in model.parameters())
    assert output.loss != model(**batch).loss


def test_the_average_of_a_training_run(kernel):
    name = MODELS[0]
    model, batch = make_transducer(name), make_batch(name)
    kernel.use_fused_loss(model)
    average = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
        average.update_parameters(model)
    plain = make_transducer(name)
    plain.load_state_dict(average.module.state_dict())
    expected, _ = loss_of_logits(kernel, plain.eval(), batch)
    torch.testing.assert_close(average.eval()(**batch).loss, expected, rtol=1e-6, atol=0)


@EACH
def test_patching_again_and_restoring(kernel, name):
    model, batch = make_transducer(name), make_batch(name)
    own, keys = type(model), list(model.state_dict())
    expected, _ = loss_of_logits(kernel, model, batch)
    losses = []
    for use, options in (
        (kernel.use_fused_loss, {"reduction": "sum"}),
        (kernel.use_fused_loss, {}),
        (kernel.use_loss, {}),
        (kernel.use_loss, {}),
        (kernel.use_fused_loss, {}),
    ):
        use(model, **options)
        losses.append(model(**batch).loss)
        assert isinstance(model, own) and type(model).__name__ == own.__name__
        assert type(model).__mro__.count(own) == 1
        assert list(model.state_dict()) == keys
    assert losses[0] > losses[1]
    for loss in losses[1:]:
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for _ in range(2):
        kernel.restore_loss(model)
        assert type(model) is own
        assert not any("tdt_loss" in key for key in vars(model))
    with pytest.raises((TypeError, ImportError)) if name not in ("ParakeetForTDT",) else no_error():
        model(**batch)  # the model's own loss, where it has one that runs without torchaudio


class no_error:
    def __enter__(self):
        pass

    def __exit__(self, *error):
        return False


def test_restoring_gives_the_loss_function_of_before(kernel):
    model, batch = make_transducer(MODELS[0]), make_batch(MODELS[0])
    model.loss_function = lambda **arguments: torch.tensor(7.0)
    kernel.use_fused_loss(model)
    assert model(**batch).loss != 7
    kernel.restore_loss(model)
    assert model(**batch).loss == 7


@BOTH
def test_a_patched_model_is_saved_as_the_model_that_it_is(kernel, use, tmp_path):
    name = MODELS[0]
    model, batch = make_transducer(name), make_batch(name)
    getattr(kernel, use)(model)
    model.save_pretrained(tmp_path)
    import transformers

    loaded = getattr(transformers, name).from_pretrained(tmp_path).train()
    assert loaded.config.architectures == [name]
    expected, _ = loss_of_logits(kernel, loaded, batch)
    torch.testing.assert_close(model(**batch).loss, expected, rtol=1e-6, atol=0)


def test_a_model_inside_wrappers(kernel):
    """Patched through whatever holds it: as DDP, PEFT and torch.compile wrap."""
    model, batch = make_transducer(MODELS[0]), make_batch(MODELS[0])
    holder = torch.nn.Module()
    holder.base_model = torch.nn.Module()
    holder.base_model.model = model
    kernel.use_fused_loss(holder)
    assert model(**batch).logits is None
    kernel.restore_loss(holder)
    assert model(**batch).logits is not None
    assert isinstance(torch.compile(model), torch._dynamo.OptimizedModule)
    kernel.use_fused_loss(torch.compile(model))
    assert model(**batch).logits is None


@BOTH
def test_accelerate_prepares_a_patched_model(kernel, use, monkeypatch):
    accelerate = pytest.importorskip("accelerate")
    name = MODELS[0]
    model, batch = make_transducer(name), make_batch(name)
    own = model.decoder.forward
    model.decoder.forward = torch.autocast("cpu", enabled=False)(lambda *args, **kwargs: own(*args, **kwargs))
    getattr(kernel, use)(model)
    expected = model(**batch).loss
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    prepared = accelerator.prepare(model)
    output = prepared(**batch)
    assert (output.logits is None) == (use == "use_fused_loss")
    torch.testing.assert_close(output.loss, expected, rtol=0.02, atol=0)
    with pytest.raises(ValueError, match="forward has been replaced on the instance"):
        getattr(kernel, use)(make_prepared(accelerator, name))
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    output = unwrapped(**batch)
    assert (output.logits is None) == (use == "use_fused_loss")
    torch.testing.assert_close(output.loss, expected, rtol=1e-6, atol=0)


def make_prepared(accelerator, name):
    return accelerator.prepare(make_transducer(name))


class Samples(torch.utils.data.Dataset):
    def __init__(self, batch):
        self.batch = batch

    def __len__(self):
        return len(self.batch["labels"])

    def __getitem__(self, i):
        return {key: value[i] for key, value in self.batch.items()}


@EACH
def test_trainer_steps_are_those_of_one_large_batch(kernel, name, tmp_path):
    """Batches of one, accumulated: with "mean_volume" the step is that of all samples at once, and evaluation runs."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    batch = make_batch(name)
    padding = BLANK if name == "ParakeetForRNNT" else 0
    batch["labels"] = batch["labels"].masked_fill(batch["labels"] == padding, -100)

    def trained(per_step):
        model = make_transducer(name)
        for module in model.modules():  # batch norm would see other batches
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                module.momentum, module.train = 0.0, lambda mode=True, module=module: module
                module.training = False
        kernel.use_fused_loss(model, reduction="mean_volume")
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=per_step,
            gradient_accumulation_steps=3 // per_step,
            max_steps=2,
            learning_rate=0.05,
            optim="sgd",
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            prediction_loss_only=True,
            seed=0,
        )
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Samples(batch))
        trainer.train()
        assert trainer.evaluate(Samples(batch))["eval_loss"] > 0
        return {key: value.detach().clone() for key, value in model.named_parameters()}

    one_by_one, at_once, before = trained(1), trained(3), dict(make_transducer(name).named_parameters())
    assert (one_by_one["joint.head.weight"] - before["joint.head.weight"]).norm() > 1e-4
    for key, value in at_once.items():
        torch.testing.assert_close(one_by_one[key], value, rtol=1e-4, atol=1e-5, msg=key)
