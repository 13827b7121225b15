"""One rank of test_parallel_layers.py: python parallel_worker.py FOLDER RANK WORLD_SIZE.

Every scenario builds a layer whole and split over ranks with the same numbers, and saves what both give: outputs and
gradients of the input and parameters, those of this rank's part.
"""

import gc
import sys
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.nn  # before any process group: examples/gpt_training.py says why
import torch.nn.functional as F

from flash_attn.modules.mha import MHA, ParallelMHA
from flash_attn.modules.mlp import GatedMlp, Mlp, ParallelGatedMlp, ParallelMLP
from flash_attn.ops.fused_dense import FusedDense, FusedMLP, ParallelFusedMLP, fused_dense_func
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
from flash_attn.utils import distributed
from flash_attn.utils.distributed import allreduce_sequence_parallel_grad, sync_shared_params
from flash_attn.utils.generation import InferenceParams

B, S, E = 4, 6, 32


def parts(weight, sizes, rank, world_size):
    """Rows of `weight` that belong to this rank: its share of each block of rows with those sizes."""
    return torch.cat([block.chunk(world_size)[rank] for block in weight.split(sizes)])


def share(name, tensor, row_blocks, rank, world_size):
    """This rank's part of a parameter or its gradient: first layers are split by outputs, second ones by inputs."""
    if name.split(".")[0] in ("fc1", "Wqkv"):
        return parts(tensor, row_blocks, rank, world_size)
    return tensor.chunk(world_size, dim=1)[rank] if name.endswith("weight") else tensor


def compare(name, make_whole, make_split, row_blocks, x, sequence_parallel, save, call=lambda layer, x: layer(x)):
    """Saves what a layer and its split form give for the same numbers, reduced to this rank's part."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # The first rank alone draws the second layer's bias.
    torch.manual_seed(4)
    whole, split = make_whole(), make_split()
    parameters = dict(whole.named_parameters())
    for n, p in split.named_parameters():
        p.data.copy_(share(n, parameters[n].data, row_blocks, rank, world_size))
    leaf = x.clone().requires_grad_()
    out = whole(leaf)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=out.dtype)
    out.backward(g)

    def own(rows):
        return rows.chunk(world_size)[rank] if sequence_parallel else rows

    part = own(x).clone().requires_grad_()
    split_out = call(split, part)
    split_out.backward(own(g))
    save(f"{name} out", own(out), split_out)
    save(f"{name} dx", own(leaf.grad), part.grad)
    for n, p in split.named_parameters():
        save(f"{name} d{n}", share(n, parameters[n].grad, row_blocks, rank, world_size), p.grad)


def layers(save):
    x = torch.randn(B * S, E, generator=torch.Generator().manual_seed(1)).double()
    wide = dict(dtype=torch.float64)
    for sequence_parallel in (False, True):
        common = dict(process_group=dist.group.WORLD, sequence_parallel=sequence_parallel, **wide)
        label = "split rows" if sequence_parallel else "whole rows"
        run = partial(compare, x=x, sequence_parallel=sequence_parallel, save=save)
        run(f"ParallelMLP {label}", partial(Mlp, E, 40, **wide), partial(ParallelMLP, E, 40, **common), [40])
        gated = dict(hidden_features=40, multiple_of=8, activation=F.silu)
        whole, split = partial(GatedMlp, E, **gated, **wide), partial(ParallelGatedMlp, E, **gated, **common)
        run(f"ParallelGatedMlp {label}", whole, split, [40, 40])
        biases = dict(bias1=sequence_parallel, bias2=not sequence_parallel)
        whole, split = partial(Mlp, E, 40, 24, **biases, **wide), partial(ParallelMLP, E, 40, 24, **biases, **common)
        run(f"ParallelMLP of other widths {label}", whole, split, [40])
        gated.update(biases, out_features=24)
        whole, split = partial(GatedMlp, E, **gated, **wide), partial(ParallelGatedMlp, E, **gated, **common)
        run(f"ParallelGatedMlp of other widths {label}", whole, split, [40, 40])
        for level in (0, 2):
            whole, split = partial(FusedMLP, E, 40, **wide), partial(ParallelFusedMLP, E, 40, **common)
            run(f"ParallelFusedMLP {label} {level}", whole, partial(split, checkpoint_lvl=level), [40])
        options = dict(out_features=24, activation="sqrelu", **biases)
        run(f"ParallelFusedMLP of other widths {label}", partial(whole, **options), partial(split, **options), [40])
        for kv_heads in (4, 2):
            options = dict(num_heads_kv=kv_heads, causal=True, use_flash_attn=True, use_alibi=True, rotary_emb_dim=8)
            if kv_heads == 2:
                options.update(softmax_scale=0.3, window_size=(3, 0), out_proj_bias=False, rotary_emb_base=50.0)
            whole, split = partial(Flattened, **options, **wide), partial(ParallelMHA, E, 4, **options, **common)
            blocks = [E, kv_heads * 8, kv_heads * 8]
            run(f"ParallelMHA {kv_heads} {label}", whole, split, blocks, call=lambda layer, x: layer(x, seqlen=S))


class Flattened(MHA):
    """MHA on (B*S,E)."""

    def __init__(self, **options):
        super().__init__(E, 4, **options)

    def forward(self, x):
        return super().forward(x.view(B, S, E)).flatten(0, 1)


def gathered_dense(save):
    """FusedDense with a group: rows of all ranks."""
    torch.manual_seed(2)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module, x = FusedDense(E, 5), torch.randn(8, E)
    part = x.chunk(world_size)[rank].clone().requires_grad_()
    out = module(part, process_group=dist.group.WORLD)
    save("FusedDense out", module(x), out)
    (out.sum() * (rank + 1)).backward()
    total = sum(range(1, world_size + 1))
    save("FusedDense dx", total * module.weight.sum(0).expand(len(part), E), part.grad)


def gradients_that_come_in(save):
    """They are the caller's and stay as they are; sums over ranks are made of copies."""
    x, weight = torch.randn(4, E, requires_grad=True), torch.randn(5, E)
    g = torch.full((4, E), dist.get_rank() + 1.0)
    before = g.clone()
    _, entered = fused_dense_func(x, weight, None, True, dist.group.WORLD, sequence_parallel=False)
    entered.backward(g)
    save("own gradient that came in", before, g)
    save("own gradient of what entered", torch.full_like(g, sum(range(1, dist.get_world_size() + 1))), x.grad)


def collectives(save):
    """A sum over ranks leaves the summands as they are; the raw functions give a handle where one is asked for."""
    x = torch.full((4, 3), dist.get_rank() + 1.0)
    distributed.all_reduce(x, dist.group.WORLD)
    save("own summands", torch.full((4, 3), dist.get_rank() + 1.0), x)
    for name in ("all_gather_raw", "reduce_scatter_raw", "all_reduce_raw"):
        function = getattr(distributed, name)
        (at_once, none), (later, handle) = (function(x.clone(), dist.group.WORLD, later) for later in (False, True))
        save(f"own handles of {name}", torch.tensor([True, True]), torch.tensor([none is None, handle is not None]))
        if handle is not None:
            handle.wait()
        save(f"own result of {name}", at_once, later)
    try:
        distributed.reduce_scatter_raw(torch.zeros(4 * dist.get_world_size() + 1, 3), dist.group.WORLD)
        refused = False
    except AssertionError as error:
        refused = "cannot share equally" in str(error)
    save("own refusal of rows that do not divide", torch.tensor(True), torch.tensor(refused))


def recomputed_products(save):
    """checkpoint_lvl of the split layer: how many products forward and backward make."""
    plain, counts = F.linear, []
    for level in (0, 1, 2):
        module, calls = ParallelFusedMLP(E, 8, process_group=dist.group.WORLD, checkpoint_lvl=level), []
        F.linear = lambda *args, calls=calls: calls.append(args) or plain(*args)
        module(torch.randn(2, E)).sum().backward()
        counts.append(len(calls))
    F.linear = plain
    save("own products of ParallelFusedMLP", torch.tensor([2, 3, 4]), torch.tensor(counts))


def generation(save):
    torch.manual_seed(6)
    module = ParallelMHA(E, 4, dist.group.WORLD, causal=True, layer_idx=3, use_flash_attn=True, sequence_parallel=False)
    x, params = torch.randn(2, 5, E), InferenceParams(max_seqlen=5, max_batch_size=2)
    for p in module.parameters():
        p.data.normal_()
    with torch.no_grad():
        whole = module(x)
        pieces = [module(x[:, :3], inference_params=params)]
        params.seqlen_offset = 3
        pieces.append(module(x[:, 3:], inference_params=params))
    save("ParallelMHA 4 generation", whole, torch.cat(pieces, dim=1))
    save("ParallelMHA 4 generation's layer", torch.tensor([3]), torch.tensor(list(params.key_value_memory_dict)))


def cross_entropy(save):
    torch.manual_seed(3)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    logits, labels = torch.randn(9, 14, dtype=torch.float64), torch.randint(14, (9,))
    labels[[4, 5, 6, 7]] = torch.tensor([-100, 0, 7, 13])  # the ranks' first and last
    options = dict(label_smoothing=0.1, logit_scale=0.8, lse_square_scale=0.01)
    whole = logits.clone().requires_grad_()
    part = logits.chunk(world_size, dim=1)[rank].clone().requires_grad_()
    wanted = cross_entropy_loss(whole, labels, **options)
    got = cross_entropy_loss(part, labels, process_group=dist.group.WORLD, **options)
    weights = torch.randn(9, dtype=torch.float64)
    (wanted[0] * weights).sum().backward()
    (got[0] * weights).sum().backward()
    save("cross entropy losses", wanted[0], got[0])
    save("cross entropy z losses", wanted[1], got[1])
    save("cross entropy dlogits", whole.grad.chunk(world_size, dim=1)[rank], part.grad)
    known = torch.logsumexp(part.detach(), dim=-1)  # over the classes of this rank
    got = cross_entropy_loss(part, labels, known, lse_square_scale=0.01, process_group=dist.group.WORLD)
    save("cross entropy of a known LSE", cross_entropy_loss(whole, labels, lse_square_scale=0.01)[0], got[0])


def shared_parameters(save):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(rank + 1.0)
        model.bias.fill_(rank + 1.0)
    model.weight._shared_params = True
    sync_shared_params(model, dist.group.WORLD)
    save("synchronized weight", torch.ones(2, 3), model.weight)
    save("own bias", torch.full((2,), rank + 1.0), model.bias)
    groups = [dist.new_group([n]) for n in range(world_size)]
    model.bias._shared_params = True
    sync_shared_params(model, groups[rank])  # the group's first rank, not the world's
    save("own bias in a group of its own", torch.full((2,), rank + 1.0), model.bias)
    model.weight._sequence_parallel = True
    for p in model.parameters():
        p.grad = torch.full_like(p, rank + 1.0)
    model.unused = torch.nn.Parameter(torch.zeros(3))  # has no gradient
    model.unused._sequence_parallel = True
    allreduce_sequence_parallel_grad(torch.nn.Linear(2, 2), dist.group.WORLD)  # has none that is marked
    allreduce_sequence_parallel_grad(model, dist.group.WORLD)
    save("summed gradient", torch.full((2, 3), sum(range(1, world_size + 1)) * 1.0), model.weight.grad)
    save("own gradient", torch.full((2,), rank + 1.0), model.bias.grad)
    model = torch.nn.Module()
    for name in ("first", "second")[:: -1 if rank else 1]:  # ranks need not make them in one order
        model.register_parameter(name, torch.nn.Parameter(torch.zeros(3)))
    for p, value in ((model.first, 1.0), (model.second, 10.0)):
        p._sequence_parallel, p.grad = True, torch.full_like(p, value)
    allreduce_sequence_parallel_grad(model, dist.group.WORLD)
    for name, value in (("first", 1.0), ("second", 10.0)):
        save(f"summed gradient of {name}", torch.full((3,), world_size * value), getattr(model, name).grad)


def main(folder, rank, world_size):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    results = {}

    def save(name, wanted, got):
        results[name] = (wanted.detach().clone(), got.detach().clone())

    for scenario in (
        layers,
        gathered_dense,
        gradients_that_come_in,
        collectives,
        recomputed_products,
        generation,
        cross_entropy,
        shared_parameters,
    ):
        scenario(save)
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()
    gc.collect()  # what still holds the group keeps its threads


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
