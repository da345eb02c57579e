"""MeanTeacher alone under FSDP2, on one of two ranks. Run by sharded_worker.py."""

import copy

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import unteach

WORLD = 2


class TiedModel(torch.nn.Module):
    """A small causal language model (a running mean mixes the positions) whose head is its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(97, 32)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.Tanh(), torch.nn.Linear(48, 32)) for _ in range(2)
        )
        self.norm = torch.nn.LayerNorm(32)
        self.head = torch.nn.Linear(32, 97, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            mean = hidden.cumsum(1) / torch.arange(1, hidden.shape[1] + 1).unsqueeze(-1)
            hidden = hidden + layer(mean)
        return self.head(self.norm(hidden))


def loss_of(logits, tokens):
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def full_weights(sharded):
    return {name: p.full_tensor().detach().clone() for name, p in sharded.items()}


def full_teacher(sharded, optimizer):
    return {name: optimizer.state[p]["teacher"].full_tensor().clone() for name, p in sharded.items()}


def compute_with(twin, weights, tokens):
    with torch.no_grad():
        for name, p in twin.named_parameters():
            p.copy_(weights[name])
        return twin(tokens)


def check(rank, **root_setting):
    torch.manual_seed(0)
    model = TiedModel()
    twin, alone = copy.deepcopy(model), copy.deepcopy(model)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model, **root_setting)
    sharded = dict(model.named_parameters())  # taken now: while gathered, the module shows gathered parameters instead
    assert all(p.requires_grad and isinstance(p, DTensor) for p in sharded.values())
    assert model.head.weight is model.embedding.weight

    settings = {"lr": 0.05, "momentum": 0.9, "teacher_rate": 4.0, "damping": 0.5, "clip": 0.3}
    optimizer = unteach.MeanTeacher(sharded.values(), **settings)
    reference = unteach.MeanTeacher(alone.parameters(), **settings)
    tokens = torch.randint(97, (WORLD, 12), generator=torch.Generator().manual_seed(7))
    mine = tokens[rank : rank + 1]
    for _ in range(4):
        with optimizer.teacher_weights():
            inside = model(mine)
        assert torch.equal(inside, compute_with(twin, full_teacher(sharded, optimizer), mine))
        with torch.no_grad():
            after = model(mine)
        assert torch.equal(after, compute_with(twin, full_weights(sharded), mine))

        optimizer.zero_grad()
        loss_of(model(mine), mine).backward()
        optimizer.step()
        reference.zero_grad()
        loss_of(alone(tokens), tokens).backward()
        reference.step()
        assert abs(optimizer.last_grad_norm / reference.last_grad_norm - 1) < 1e-5, "the norm is over all ranks"
        assert optimizer.last_clip_factor < 1
    assert not torch.equal(inside, after), "teacher and student must differ for this test to say anything"
    for name, p in alone.named_parameters():
        torch.testing.assert_close(full_weights(sharded)[name], p.detach(), rtol=1e-4, atol=1e-6)

    state = copy.deepcopy(optimizer.state_dict())
    before = full_teacher(sharded, optimizer)
    optimizer.load_state_dict(state)
    assert all(torch.equal(before[name], value) for name, value in full_teacher(sharded, optimizer).items())
    assert all(isinstance(v, DTensor) for p in sharded.values() for v in optimizer.state[p].values())

    for p in sharded.values():
        p.grad.to_local().fill_(float("nan") if rank == 0 else 1.0)  # one rank's bad gradient stops both
    try:
        optimizer.step()
    except FloatingPointError:
        pass
    else:
        raise AssertionError("a non-finite gradient on rank 0 must be refused on every rank")
