"""PyTorch's test_fully_shard_state_dict.py in the words of this package; docs/python_fsdp2.md has the table.

State dicts hold whole plain tensors, where upstream's hold DTensors that share the shards' memory.
"""

from __future__ import annotations

import copy

import pytest
import tessera
import torch
from fsdp2_reference import Mlp, shard_children, shard_layers_of, transformer, units_of
from support import assert_bits, drawn
from torch import Tensor, nn


def nested(width: int) -> nn.Sequential:
    """Returns modules in modules, the same on every rank."""
    torch.manual_seed(42)
    return nn.Sequential(Mlp(width), nn.Sequential(Mlp(width), nn.Linear(width, width)), Mlp(width))


def save_and_load(model: nn.Module, plain: nn.Module) -> None:
    """Saves the whole state, loads other values, and looks at both. Collective."""
    state = model.state_dict()
    expected = plain.state_dict()
    assert list(state) == list(expected)
    for name, value in state.items():
        assert type(value) is Tensor
        assert_bits(name, value, expected[name])
    places = [one.data_ptr() for one in model.parameters()]
    new = {name: drawn(9, at, shape=value.shape, dtype=value.dtype) for at, (name, value) in enumerate(state.items())}
    model.load_state_dict(new)
    assert [one.data_ptr() for one in model.parameters()] == places
    for name, value in state.items():
        assert_bits(name, value, expected[name])
    for name, value in model.state_dict().items():
        assert_bits(name, value, new[name])
    for name, found in tessera.full_parameters(model):
        assert_bits(name, found, new[name])


class TestSaveLoad:
    """Upstream: TestFullyShardStateDictMultiProcess."""

    @pytest.mark.parametrize("reshard_after_forward", [True, False])
    @pytest.mark.parametrize("width", [2, 3, 4, 5])
    def test_dp_state_dict_save_load(self, world: tessera.World, width: int, reshard_after_forward: bool) -> None:
        """What is saved is the plain module's dict, what is loaded is written into the shards' own memory.

        Units that stay gathered after a forward save the same.
        """
        model = nested(width)
        plain = copy.deepcopy(model)
        shard_children(model, reshard_after_forward=reshard_after_forward)
        save_and_load(model, plain)
        before = model.state_dict()
        with torch.no_grad():
            model(drawn(1, world.rank, shape=(2, width)))
        for name, value in model.state_dict().items():
            assert_bits(name, value, before[name])

    @pytest.mark.parametrize("width", [2, 5])
    def test_cached_state_dict(self, world: tessera.World, width: int) -> None:
        """A state dict is a copy of the moment: steps do not reach it, where upstream's is the live memory."""
        torch.manual_seed(42)
        model = nn.Linear(width, width, bias=False)
        before = model.weight.detach().clone()
        tessera.fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        state = model.state_dict()
        for step in range(2):
            model(drawn(step, world.rank, shape=(width, width))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_bits("weight", state["weight"], before)
        assert not torch.equal(model.state_dict()["weight"], before)

    def test_dp_state_dict_cpu_offload(self, world: tessera.World) -> None:
        """A model without memory is loaded in pieces with `strict=False`, and computes once it is whole.

        Upstream keeps parameters on the CPU then; `offload_policy` is refused here by name.
        """
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        shard_children(model)
        pieces = {f"{at}.weight": drawn(at, shape=(4, 4)) for at in range(2)}
        x = drawn(5, shape=(4, 4))
        for name, value in pieces.items():
            found = model.load_state_dict({name: value}, strict=False)
            assert not found.unexpected_keys
        assert_bits("result", model(x).detach(), x @ pieces["0.weight"].T @ pieces["1.weight"].T)
        for name, value in model.state_dict().items():
            assert_bits(name, value, pieces[name])

    def test_rank0_offload_full_state_dict(self, world: tessera.World) -> None:
        """`full_state_dict` with `cpu_offload` gives rank 0 the plain module's dict, the others an empty one."""
        model = transformer()
        plain = copy.deepcopy(model)
        shard_layers_of(model)
        options = tessera.StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = tessera.get_model_state_dict(model, options=options)
        if world.rank != 0:
            assert state == {}
            return
        assert list(state) == list(plain.state_dict())
        for name, value in plain.state_dict().items():
            assert state[name].device.type == "cpu"
            assert_bits(name, state[name], value)

    def test_plain_dict_is_set(self, world: tessera.World) -> None:
        """The plain module's dict is set by set_model_state_dict, every rank with the whole one."""
        model = transformer()
        plain = copy.deepcopy(model)
        shard_layers_of(model)
        with torch.no_grad():
            for shard in model.parameters():
                shard.zero_()
        options = tessera.StateDictOptions(full_state_dict=True)
        tessera.set_model_state_dict(model, plain.state_dict(), options=options)
        for name, found in tessera.full_parameters(model):
            assert_bits(name, found, plain.get_parameter(name).detach())
        assert all(isinstance(one, tessera.ShardedParameter) for unit in units_of(model) for one in unit.parameters())
