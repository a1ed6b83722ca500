"""Arguments of every op that the library registers, in each form that the op tells apart.

Each function is named after an op and yields arguments for it. Two runs of an op must agree in everything they return, so those that return row_max
or alpha_beta get full lengths: their padding is unspecified.
"""

import torch

from support.batches import make_batch

RAGGED = {"logit_lengths": [6, 4], "target_lengths": [2, 3]}
OPTIONS = {"fastemit_lambda": 0.1, "clamp": 0.5, "delay_penalty": 0.1}
ARCS = {
    "separate": {},
    "joint": {},
    "two lattices": {"omega": 0.5, **OPTIONS},
    "RNN-T": {"durations": (), **OPTIONS},
}
OTHER_DTYPES = (torch.bfloat16, torch.float64)


def every_batch(device, other_dtypes=(), **lengths):
    """(batch, api) for everything that the dense ops tell apart."""
    for name, arguments in ARCS.items():
        for dtype in (torch.float32, *(other_dtypes if name == "joint" else ())):
            batch = make_batch(B=2, T=6, U=3, sigma=0.05, dtype=dtype, device=device, **lengths, **arguments)
            yield batch, "separate" if name == "separate" else "joint"


def arcs_of(batch):
    return [*batch.op_arcs[1:], batch.token_logits.shape[-1]]


def saved_of(ops, batch, api, reduction=0):
    """grad_loss, weights, (node_lp, row_max, ll, alpha_beta)."""
    losses, *saved, weights = ops.loss(*batch.loss_op_args(api, reduction=reduction))
    return torch.ones_like(losses), weights, saved


def of_arcs(saved):
    """What says how likely each arc is: node_lp, ll, alpha_beta."""
    node_lp, _, ll, alpha_beta = saved
    return node_lp, ll, alpha_beta


def loss(ops, device):
    for batch, api in every_batch(device, OTHER_DTYPES):
        yield batch.loss_op_args(api, need_grad=False, zero_infinity=True)
        for logits in (batch.token_logits, batch.duration_logits, batch.joint):
            logits.requires_grad_()
        yield batch.loss_op_args(api, reduction=3)


def log_probs(ops, device):
    for batch, api in every_batch(device, OTHER_DTYPES):
        blank, durations = batch.op_arcs
        yield *batch.op_logits(api), *batch.lengths, blank, len(durations), 0.05, 0.1


def lattice(ops, device):
    for batch, api in every_batch(device):
        _, _, (node_lp, *_) = saved_of(ops, batch, api)
        for need_grad in (True, False):
            yield node_lp, *batch.lengths, *arcs_of(batch), batch.option("omega"), need_grad


def reduce(ops, device):
    for batch, api in every_batch(device, **RAGGED):
        _, _, (_, _, ll, _) = saved_of(ops, batch, api)
        for reduction in (0, 3):
            yield ll, batch.target_lengths, batch.token_logits, batch.option("omega"), True, reduction


def gradient(ops, device):
    for batch, api in every_batch(device, OTHER_DTYPES, **RAGGED):
        grad_loss, weights, saved = saved_of(ops, batch, api, reduction=3)
        yield batch.gradient_op_args(api, grad_loss, weights, *saved)


def gradient_(ops, device):
    for batch, api in every_batch(device, **RAGGED):
        if api == "joint":
            grad_loss, weights, saved = saved_of(ops, batch, api)
            args = batch.gradient_op_args(api, grad_loss, weights, *saved)
            yield *args[:2], args[2].clone(), *args[4:]


def occupancy(ops, device):
    for batch, api in every_batch(device, **RAGGED):
        yield *of_arcs(saved_of(ops, batch, api)[2]), *batch.lengths, *arcs_of(batch)


def node_occupancy(ops, device):
    for batch, api in every_batch(device, **RAGGED):
        options = map(batch.option, ("omega", "fastemit_lambda"))
        yield *of_arcs(saved_of(ops, batch, api)[2]), *batch.lengths, *arcs_of(batch), *options


def align(ops, device):
    for index_dtype in (torch.int32, torch.int64):
        for batch, api in every_batch(device, index_dtype=index_dtype, **RAGGED):
            yield saved_of(ops, batch, api)[2][0], *batch.lengths, *arcs_of(batch)


# Tiles: every third node, of more columns than the logits have


def tile_of(batch):
    """Rows without the bias in the accumulation dtype, the bias, and the nodes."""
    logits = batch.op_logits("joint")[0].flatten(0, 2)
    nodes = torch.arange(0, len(logits), 3, dtype=torch.int32, device=logits.device)
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    tile = torch.nn.functional.pad(logits[nodes].to(wide), (0, -logits.shape[1] % 8 + 8))
    bias = torch.linspace(-1, 1, tile.shape[1], dtype=wide, device=tile.device)
    return tile - bias, bias, nodes


def log_probs_tile_(ops, device):
    for batch, api in every_batch(device, OTHER_DTYPES):
        _, _, (node_lp, row_max, *_) = saved_of(ops, batch, api)
        blank, durations = batch.op_arcs
        vocab = batch.token_logits.shape[-1]
        yield *tile_of(batch), node_lp, row_max, *batch.lengths, blank, vocab, len(durations), 0.05, 0.1


def gradient_tile_(ops, device):
    for batch, api in every_batch(device, OTHER_DTYPES):
        grad_loss, weights, saved = saved_of(ops, batch, api, reduction=3)
        blank, durations = batch.op_arcs
        shaping = map(batch.option, ("omega", "fastemit_lambda", "clamp"))
        arcs = (blank, batch.token_logits.shape[-1], durations)
        tile, bias, nodes = tile_of(batch)
        out, sums = torch.empty_like(tile, dtype=batch.token_logits.dtype), tile.new_empty(1, tile.shape[1])
        given = (grad_loss, weights, tile, bias, nodes, *batch.lengths, *saved, *arcs, *map(float, shaping))
        yield out, sums, *given
        yield out, None, *given


# The band


def list_rows_(ops, device):
    table = torch.tensor([[12, 12, 20], [0, 12, 12], [12, 0, 8], [3, 1, 4]], device=device)
    for first, step in ((0, 2), (3, 1)):
        yield torch.empty(10, dtype=torch.int32, device=device), table, first, step, 4, 4


def head(dtype, device):
    """Weight, bias, and logits of some pilots."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weight = torch.randn(27, 16, device=device).to(dtype)
    return weight, torch.randn(27, dtype=wide, device=device), torch.randn(9, 32, dtype=wide, device=device)


def pilots(ops, device):
    for dtype in (torch.float32, torch.bfloat16):
        weight, bias, logits = head(dtype, device)
        yield logits, bias, weight, 24, 2, 5, 3, 0, 0.0


def narrowed(ops, device, dtype):
    """Arguments of bound_columns, for three samples with up to four labels."""
    weight, bias, logits = head(dtype, device)
    said = ops.pilots(logits, bias, weight, 24, 2, 5, 3, 1, 0.5)
    targets = torch.tensor([[1, 1, 24, 3], [0, 4, 8, 2], [7, 5, 99, -1]], device=device)
    return weight, bias, targets, torch.tensor([4, 3, 2], device=device), *said, 24, 5, 2, 24


def bound_columns(ops, device):
    for dtype in (torch.float32, torch.bfloat16):
        yield narrowed(ops, device, dtype)


def bound_rows_(ops, device):
    for dtype in (torch.float32, torch.bfloat16):
        arguments = narrowed(ops, device, dtype)
        _, bias, counted = ops.bound_columns(*arguments)
        targets, target_lengths = arguments[2:4]
        nodes = torch.arange(0, 90, 4, dtype=torch.int32, device=device)
        rows, node_lp = torch.randn(len(nodes), 24, device=device), torch.zeros(3, 6, 5, 8, device=device)
        labels = (targets, torch.tensor([6, 5, 4], device=device), target_lengths)
        split = dtype != torch.float32
        yield rows, bias, counted, nodes, node_lp, *labels, 25, 2, 5, 3, split, 0.05, 0.1, 2.0**-16


def posterior(ops, device):
    for batch, api in every_batch(device, **RAGGED):
        _, _, (node_lp, _, ll, alpha_beta) = saved_of(ops, batch, api)
        yield node_lp, alpha_beta, ll, *batch.lengths, float(batch.option("omega")), 1.5


def select_nodes_(ops, device):
    for (node_lp, alpha_beta, ll, *labels, omega, factor) in posterior(ops, device):
        mass = ops.posterior(node_lp, alpha_beta, ll, *labels, omega, factor)
        yield None, mass, ll, *labels, omega, 1e-3
        yield torch.zeros_like(mass, dtype=torch.uint8), mass, ll, *labels, omega, 0.0


def hidden_layers(device):
    """A tile of hidden rows, and the inputs of the layer with activation, dropout and seed."""
    for dtype, dropout in ((torch.float32, 0.0), (torch.bfloat16, 0.3)):
        encoder, decoder = torch.randn(2, 6, 24), torch.randn(2, 4, 24)
        nodes = torch.arange(0, 48, 3, dtype=torch.int32, device=device)
        hidden, encoder, decoder = (x.to(device, dtype) for x in (torch.randn(16, 24), encoder, decoder))
        yield hidden, (encoder, decoder, nodes, 1, dropout, 5, 100)


def joint_hidden_(ops, device):
    for hidden, layer in hidden_layers(device):
        yield hidden, *layer


def joint_hidden_backward_(ops, device):
    for hidden, layer in hidden_layers(device):
        encoder, decoder, nodes = layer[:3]
        rows = torch.full((48,), -1, dtype=torch.int32, device=device)
        rows[nodes.long()] = torch.arange(16, dtype=torch.int32, device=device)
        sums = [torch.zeros_like(x, dtype=torch.float32) for x in (encoder, decoder)]
        yield *sums, hidden, *layer, rows, 0
        yield None, sums[1], hidden, *layer, rows, 0


# The ops of the fused losses


def fused_arguments(device):
    """The tensors, and everything up to the last argument."""
    for batch, api in every_batch(device, (torch.float16,)):
        if api == "joint":
            dtype, N, H = batch.token_logits.dtype, batch.op_logits("joint")[0].shape[-1], 24
            shapes = ((2, 6, H), (2, 4, H), (N, H), (N,))
            operands = [torch.randn(shape).to(device, dtype).requires_grad_() for shape in shapes]
            dropout, seed = (0.3, torch.tensor(5)) if dtype == torch.float16 else (0.0, None)
            options = map(batch.option, ("delay_penalty", "omega", "fastemit_lambda", "clamp"))
            blank, durations = batch.op_arcs
            problem = (blank, N - len(durations), durations, 0.05, *options, True, 3, 0, dropout, 1 << 12, 0.0, 1e-6, dtype)
            yield (*operands, *batch.lengths, *batch.lengths[1:], seed), problem


def fused_loss(ops, device):
    for inputs, problem in fused_arguments(device):
        yield *inputs, *problem, True
        yield *(None if x is None else x.detach() for x in inputs), *problem, False


def fused_gradient(ops, device):
    for inputs, problem in fused_arguments(device):
        inputs = [None if x is None else x.detach() for x in inputs]
        losses, *saved = ops.fused_loss(*inputs, *problem, True)
        yield torch.ones_like(losses), *inputs, *saved, *problem, [True, False, True, True]


# Steps on the host


def draw_seed(ops, device):
    yield ()
    yield ()


def to_device(ops, device):
    for there in dict.fromkeys(("cpu", device)):
        for dtype in (torch.int32, torch.int64):
            yield torch.arange(6, dtype=torch.int16).view(2, 3).mT, torch.device(there), dtype


CASES = [
    loss,
    log_probs,
    log_probs_tile_,
    lattice,
    reduce,
    gradient,
    gradient_,
    gradient_tile_,
    list_rows_,
    pilots,
    bound_columns,
    bound_rows_,
    posterior,
    select_nodes_,
    occupancy,
    node_occupancy,
    align,
    joint_hidden_,
    joint_hidden_backward_,
    fused_loss,
    fused_gradient,
    draw_seed,
    to_device,
]
