"""What `use_kernels=True` of transformers needs of the layers, should its losses gain the hook; and a test that fails the day they do."""

import inspect
import re
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="needs transformers")


@pytest.mark.parametrize(
    ("module", "function", "layer"), [("loss_tdt", "tdt_loss", "TDTLoss"), ("loss_rnnt", "rnnt_loss", "RNNTLoss")]
)
def test_names_order_defaults_and_flags(kernel, module, function, layer):
    """`kernelize` compares the signatures; the flags let it take the layer for training and under torch.compile."""
    losses = pytest.importorskip(f"transformers.loss.{module}")
    theirs = inspect.signature(inspect.unwrap(getattr(losses, function))).parameters
    ours = list(inspect.signature(getattr(kernel.layers, layer).forward).parameters.values())[1:]
    assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in theirs.values()]
    assert getattr(kernel.layers, layer).has_backward is True
    assert getattr(kernel.layers, layer).can_torch_compile is True
    assert not list(getattr(kernel.layers, layer)().state_dict())


def test_transformers_has_no_hook_for_its_transducer_losses():
    """Should this fail, transformers has one: docs/TRANSFORMERS.md must then say how `use_kernels=True` maps it.

    The sources are read, not the objects, so that no version is too new to be looked at.
    """
    root = Path(transformers.__file__).parent
    found = []
    mapping = root / "integrations" / "hub_kernels.py"
    if mapping.is_file():
        found += re.findall(r".*(?:tdt|rnnt|transducer)[-_]?loss.*", mapping.read_text(encoding="utf-8"), re.I)
    for path in [*(root / "loss").glob("loss_*nnt*.py"), *(root / "loss").glob("loss_*tdt*.py")]:
        found += re.findall(r".*(?:use_kernel|from_hub|kernelize).*", path.read_text(encoding="utf-8"))
    for path in [*(root / "models").glob("parakeet/model*.py"), *(root / "models").glob("nemotron*asr*/model*.py")]:
        found += re.findall(r".*from_hub\(.*[Ll]oss.*", path.read_text(encoding="utf-8"))
    assert list((root / "loss").glob("loss_tdt.py")) or not hasattr(transformers, "ParakeetForTDT")
    assert not found
