"""What the fused losses refuse."""

import pytest
import torch
from support.fused import logits_of, make_problem
from support.public_calls import CALLS, FUSED, HIDDEN, D, Inputs, V


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"encoder": torch.zeros(4, 9)}, ValueError, "encoder must have shape"),
        ({"encoder": torch.zeros(4, 9, 24, dtype=torch.int64)}, TypeError, "encoder must be float32"),
        ({"encoder": None}, TypeError, "encoder must be a tensor"),
        ({"decoder": torch.zeros(4, 5, 23)}, ValueError, r"decoder must have shape \(4, U\+1, 24\)"),
        ({"decoder": torch.zeros(3, 5, 24)}, ValueError, "decoder must have shape"),
        ({"decoder": torch.zeros(4, 0, 24)}, ValueError, "decoder must have shape"),
        ({"decoder": torch.zeros(4, 5, 24, dtype=torch.float16)}, TypeError, "decoder must have the dtype of encoder"),
        ({"weight": torch.zeros(25, 23)}, ValueError, "weight must have shape"),
        ({"weight": torch.zeros(4, 24), "bias": None}, ValueError, "at least one token column"),
        ({"weight": torch.zeros(25, 24, dtype=torch.bfloat16)}, TypeError, "weight must have the dtype of encoder"),
        ({"bias": torch.zeros(24)}, ValueError, r"bias must have shape \(25,\)"),
        ({"blank": 21}, ValueError, "blank_token_id"),
        ({"targets": torch.zeros(4, 3, dtype=torch.int64)}, ValueError, "targets must have at least 4 columns"),
        ({"logit_lengths": torch.tensor([9, 10, 9, 9])}, ValueError, "sample 1"),
        ({"activation": "gelu"}, ValueError, "activation must be one of 'relu', 'tanh', got 'gelu'"),
        ({"options": {"dropout": 1.0}}, ValueError, r"dropout must be in \[0, 1\), got 1"),
        ({"options": {"dropout": "0.1"}}, TypeError, "dropout must be a number"),
        ({"options": {"max_tile_bytes": 0}}, ValueError, "max_tile_bytes must be positive, got 0"),
        ({"options": {"occupancy_threshold": -1e-9}}, ValueError, "occupancy_threshold must be at least 0"),
        ({"options": {"omega": 2}}, ValueError, "omega"),
        ({"options": {"fastemit_lambda": 1e5}}, ValueError, r"fastemit_lambda must be in \[0, 10000\], got 100000"),
        ({"options": {"zero_infinity": 1}}, TypeError, "zero_infinity must be True or False, got 1"),
        ({"options": {"return_stats": None}}, TypeError, "return_stats must be True or False, got None"),
        ({"options": {"reduction": "average"}}, ValueError, "Invalid reduction: reduction must be one of 'none', "),
    ],
)
def test_errors(kernel, change, error, message):
    problem = make_problem().replace(**change)
    with pytest.raises(error, match=message):
        kernel.tdt_loss_fused_joint(
            *problem.operands,
            *problem.labels,
            problem.blank,
            list(problem.durations),
            activation=problem.activation,
            **problem.options,
        )


@pytest.mark.parametrize("index", [-1, 45, 2**31 - 1, -(2**31)])
def test_node_indices_outside_the_batch(kernel, device, index):
    """On the host the ops refuse them; on a GPU, where nobody reads them first, nothing is read or written out of bounds."""
    problem, ops = make_problem(B=1, dtype=torch.float64, device=device), kernel.loss.ops
    logits = logits_of(problem.operands, "relu")
    shaping, arcs = (0.0, 0.0, 0.0), list(problem.durations)
    loss, node_lp, row_max, ll, alpha_beta, weights = ops.loss(
        logits, None, *problem.labels, problem.blank, arcs, 0.0, 0.0, *shaping, False, True, False, 0
    )
    saved, count = (node_lp, row_max, ll, alpha_beta), 45
    nodes = torch.tensor([3, index, 7], dtype=torch.int32, device=device)
    tile = torch.nn.functional.pad(logits.flatten(0, 2)[:3], (0, -logits.shape[-1] % 8))
    bias, out = torch.zeros_like(tile[0]), torch.empty_like(tile)
    hidden, joint = tile.new_zeros(3, 24), (problem.encoder, problem.decoder, nodes, 0, 0.0, 0, 0)
    row_of_node = torch.full((count,), -1, dtype=torch.int32, device=device)
    calls = [
        (ops.log_probs_tile_, tile, bias, nodes, node_lp, row_max, *problem.labels, problem.blank, 21, 4, 0.0, 0.0),
        (
            *(ops.gradient_tile_, out, None, loss, weights, tile, bias, nodes),
            *(*problem.labels, *saved, problem.blank, 21, arcs, *shaping),
        ),
        (ops.joint_hidden_, hidden, *joint),
        (ops.joint_hidden_backward_, torch.zeros_like(problem.encoder), None, hidden, *joint, row_of_node, 0),
    ]
    for op, *arguments in calls:
        if device == "cpu":
            with pytest.raises(RuntimeError, match=rf"nodes must be in \[0, {count}\), got {index}"):
                op(*arguments)
        else:
            op(*arguments)
            torch.cuda.synchronize()


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("shape", [(0,), (0, 0), (0, HIDDEN), (V + D, 0), (72,)], ids=str)
def test_a_weight_that_is_not_gathered(kernel, name, shape):
    """ZeRO-3 and FSDP leave an empty or a flat tensor in the place of a sharded weight."""
    inputs = Inputs()
    inputs.weight, inputs.bias = torch.zeros(shape), None
    with pytest.raises(ValueError, match="weight must have"):
        CALLS[name](kernel, inputs)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("field", ["encoder", "decoder", "weight", "bias"])
def test_other_operands_of_the_wrong_shape(kernel, name, field):
    for shape in ((), (0,), (0, 0), (2, 2, 2, 2)):
        inputs = Inputs()
        setattr(inputs, field, torch.zeros(shape))
        if name.startswith("rnnt") and shape == () and field in ("weight", "bias"):
            continue  # this test's own slice of it fails
        with pytest.raises(ValueError, match=f"{field} must have"):
            CALLS[name](kernel, inputs)
