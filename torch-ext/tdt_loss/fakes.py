"""What the ops return, as shapes: for torch.compile, torch.export, FakeTensorMode and the meta device, and for out-of-memory errors."""

import torch

from ._ops import add_op_namespace_prefix
from .arguments import LossArguments


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of log-probabilities, losses and sums of logits of this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def record_size(num_durations: int) -> int:
    """Numbers that node_lp holds for a node, as in tdt_loss_common/problem.h."""
    return (3 + num_durations + 3) // 4 * 4


def fake_log_probs(
    logits, duration_logits, targets, logit_lengths, target_lengths, blank, num_durations, sigma, delay_penalty
):
    shape, dtype = logits.shape[:3], accumulate_dtype(logits.dtype)
    node_lp = logits.new_empty((*shape, record_size(num_durations)), dtype=dtype)
    return node_lp, logits.new_empty(shape, dtype=dtype)


def fake_lattice(node_lp, targets, logit_lengths, target_lengths, durations, vocab, omega, need_grad):
    batch, max_t, max_u1 = node_lp.shape[:3]
    lattices = 2 if omega > 0 and durations else 1
    ll = node_lp.new_empty((lattices, batch), dtype=torch.float64)
    alpha_beta = node_lp.new_empty((lattices, 2, batch, max_t, max_u1) if need_grad else (0,), dtype=torch.float64)
    return ll, alpha_beta


def fake_reduce(ll, target_lengths, like, omega, zero_infinity, reduction):
    batch, dtype = ll.shape[1], accumulate_dtype(like.dtype)
    loss = ll.new_empty(() if reduction else (batch,), dtype=dtype)
    return loss, ll.new_empty((batch if reduction else 0,), dtype=dtype)


def fake_loss(*args):
    a = LossArguments(*args)
    emission = (a.blank, len(a.durations), a.sigma, a.delay_penalty)
    node_lp, row_max = fake_log_probs(a.logits, a.duration_logits, *a.labels, *emission)
    ll, alpha_beta = fake_lattice(node_lp, *a.labels, a.durations, None, a.omega, a.need_grad)
    loss, weights = fake_reduce(ll, a.target_lengths, a.logits, a.omega, a.zero_infinity, a.reduction)
    return loss, node_lp, row_max, ll, alpha_beta, weights


def _gradient_like(logits):
    grad = torch.empty_like(logits)
    return grad if grad.stride(3) == 1 or grad.shape[3] == 1 else logits.new_empty(logits.shape)


def fake_gradient(grad_loss, weights, logits, duration_logits, *rest):
    grad_durations = logits.new_empty((0,)) if duration_logits is None else _gradient_like(duration_logits)
    return _gradient_like(logits), grad_durations


def fake_occupancy(node_lp, ll, alpha_beta, targets, logit_lengths, target_lengths, durations, vocab):
    shape = (*node_lp.shape[:3], len(durations)) if durations else node_lp.shape[:3]
    return node_lp.new_empty(shape), node_lp.new_empty(shape)


def fake_node_occupancy(node_lp, *rest):
    return node_lp.new_empty(node_lp.shape[:3])


def fake_align(node_lp, targets, logit_lengths, target_lengths, durations, vocab):
    frames = node_lp.new_empty(targets.shape, dtype=torch.int64)
    return frames, torch.empty_like(frames), node_lp.new_empty((node_lp.shape[0],))


def fake_bound_columns(weight, bias, targets, *rest):
    batch, columns, dtype = targets.shape[0], rest[-1], accumulate_dtype(weight.dtype)
    sizes = (batch, columns)
    return (
        weight.new_empty((*sizes, weight.shape[1])),
        weight.new_empty(sizes, dtype=dtype),
        weight.new_empty(sizes, dtype=dtype),
    )


def fake_pilots(logits, bias, weight, blank, num_durations, frequent, groups, *rest):
    H, dtype = weight.shape[1], logits.dtype
    sizes = ((weight.shape[0] - num_durations,), (groups, H), (3, groups), (H + 1,))
    return weight.new_empty((frequent,), dtype=torch.int32), *(weight.new_empty(size, dtype=dtype) for size in sizes)


def fake_posterior(like, *rest):
    return like.new_empty(like.shape[:3])


def fake_select_nodes_(known, mass, ll, *rest):
    return (
        mass.new_empty((mass.numel(),), dtype=torch.int32),
        torch.empty_like(mass, dtype=torch.int32),
        mass.new_empty((1,), dtype=torch.int32),
        mass.new_empty((mass.shape[0],), dtype=torch.float64),
    )


def _fake_in_place(*args):
    return None


for _name, _fake in {
    "loss": fake_loss,
    "log_probs": fake_log_probs,
    "log_probs_tile_": _fake_in_place,
    "lattice": fake_lattice,
    "reduce": fake_reduce,
    "gradient": fake_gradient,
    "gradient_": _fake_in_place,
    "gradient_tile_": _fake_in_place,
    "occupancy": fake_occupancy,
    "node_occupancy": fake_node_occupancy,
    "align": fake_align,
    "joint_hidden_": _fake_in_place,
    "joint_hidden_backward_": _fake_in_place,
    "list_rows_": _fake_in_place,
    "pilots": fake_pilots,
    "bound_columns": fake_bound_columns,
    "bound_rows_": _fake_in_place,
    "posterior": fake_posterior,
    "select_nodes_": fake_select_nodes_,
}.items():
    torch.library.register_fake(add_op_namespace_prefix(_name))(_fake)


# Out of memory. An exception inside an op reaches Python through the stable ABI as a RuntimeError without its type and its
# words, and an allocation is the only call of torch there that can fail.


def call(op, allocate, *args):
    """``op(*args)``; where an allocation fails, raises torch's own error, on a GPU torch.OutOfMemoryError.

    ``allocate(*args)`` allocates as much as the op does: the op's fake, called with real tensors.
    """
    if torch.compiler.is_compiling():
        return op(*args)
    try:
        return op(*args)
    except RuntimeError as error:
        if "API call failed" in str(error):
            try:
                allocate(*args)  # from here, where an error keeps its type
            except RuntimeError as own:
                raise own from None
        raise


def _allocate_lattice_work(*args):
    """What a lattice works in: no more than another alpha and beta."""
    return fake_lattice(*args, True)[1]


def allocate_lattice(*args):
    return fake_lattice(*args), _allocate_lattice_work(*args[:-1])


def allocate_loss(*args):
    outputs, a = fake_loss(*args), LossArguments(*args)
    return outputs, _allocate_lattice_work(outputs[1], *a.labels, a.durations, None, a.omega)


def allocate_align(node_lp, *args):
    """Its outputs, and the best score and the best arc of every node."""
    nodes = node_lp.shape[:3]
    return (
        fake_align(node_lp, *args),
        node_lp.new_empty(nodes, dtype=torch.float64),
        node_lp.new_empty(nodes, dtype=torch.uint8),
    )
