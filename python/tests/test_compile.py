"""torch.compile of modules that are units: right gradients, no graph breaks inside, raw gradients by one door.

Compiled with aot_eager, which traces and partitions as inductor does and needs no C++ compiler; the cases of inductor
run with TESSERA_FULL=1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tessera
import torch
import torch._dynamo
from functorch.compile import make_boxed_func
from support import (
    FULL,
    MLP_UNITS,
    Mlp,
    Plain,
    Unitwise,
    assert_bits,
    assert_same_gradients,
    drawn,
    mean_in_rank_order,
    shard_layers,
)
from tessera import MixedPrecisionPolicy, Rule, fully_shard
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

BFLOAT16 = torch.bfloat16
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.skipif(not FULL, reason="TESSERA_FULL=1"))]


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    """Each test compiles for itself."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Layer(nn.Linear):
    """Dynamo skips frames of torch.nn itself, and compiles those of a class of the user's."""

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in_features] to [rows, out_features]."""
        return torch.tanh(nn.functional.linear(x, self.weight, self.bias)) * 2


def mlp(kind: type[Mlp] = Mlp) -> Any:
    """Returns an Mlp of Layers."""
    model = kind()
    for i, layer in enumerate(model.layers):
        own = Layer(8, 8)
        own.load_state_dict(layer.state_dict())
        model.layers[i] = own
    return model


def loss_of(model: Any, rank: int, step: int = 0) -> Tensor:
    """Returns the loss of a rank's rows."""
    return model(drawn(1, step, rank, shape=(4, 8))).float().square().mean()  # type: ignore[no-any-return]


def assert_two_steps(world: Any, model: Any, plain: Plain | Unitwise, bound: float | None) -> None:
    """Compares the gradients of two steps of SGD."""
    for step in range(2):
        loss_of(model, world.rank, step).backward()
        plain.backward(lambda one, rank, at=step: loss_of(one, rank, at))
        if isinstance(plain, Unitwise):
            plain.reduce()
        assert_same_gradients(model, plain, bound)
        model.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_compiled_before_they_are_sharded_have_the_plain_gradients(world: Any, backend: str) -> None:
    """layer.compile() as torchtitan does it: no graph break, and as few compilations as plain layers need."""
    model = mlp()
    plain = Plain(model, world.size)
    counter, of_plain = CompileCounterWithBackend(backend), CompileCounterWithBackend("aot_eager")
    for layer in model.layers:
        layer.compile(backend=counter, fullgraph=True)
    shard_layers(model, MLP_UNITS)
    assert_two_steps(world, model, plain, None if backend == "aot_eager" else 1e-6)
    torch._dynamo.reset()
    unsharded = mlp()
    for layer in unsharded.layers:
        layer.compile(backend=of_plain, fullgraph=True)
    for step in range(2):
        loss_of(unsharded, world.rank, step).backward()
    assert counter.frame_count == of_plain.frame_count > 0


def test_torch_compile_of_a_layer_before_it_is_sharded_has_the_plain_gradients(world: Any) -> None:
    """The OptimizedModule that torch.compile(layer) returns is what is sharded."""
    model = mlp()
    plain = Plain(model, world.size)
    for i, layer in enumerate(model.layers):
        model.layers[i] = torch.compile(layer, backend="aot_eager")
    shard_layers(model, MLP_UNITS)
    loss_of(model, world.rank).backward()
    plain.backward(loss_of)
    found = {name.replace("._orig_mod", ""): value for name, value in tessera.full_gradients(model)}
    for name, expected in plain.gradients().items():
        assert_bits(name, found[name], expected)


def test_a_compiled_model_around_sharded_layers_breaks_at_their_borders_and_is_right(world: Any) -> None:
    """torch.compile of the outermost module after sharding: units run as they are."""
    model = mlp()
    plain = Plain(model, world.size)
    shard_layers(model, MLP_UNITS)
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(2):
        loss_of(compiled, world.rank, step).backward()
        plain.backward(lambda one, rank, at=step: loss_of(one, rank, at))
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()


def test_compiled_layers_inside_checkpoints_have_the_plain_gradients(world: Any) -> None:
    """A non-reentrant checkpoint around each unit, whose inside is compiled."""

    class Recomputing(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.tanh(checkpoint(layer, x, use_reentrant=False))
            return x

    model = mlp(Recomputing)
    plain = Plain(model, world.size)
    for layer in model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    shard_layers(model, MLP_UNITS)
    assert_two_steps(world, model, plain, None)


def test_compiled_layers_compute_in_the_policys_dtype(world: Any) -> None:
    """Compiled for bf16 leaves: the bits of bf16 copies."""
    model = mlp()
    unitwise = Unitwise(
        model, world.size, units=(*MLP_UNITS, ""), compute=lambda name: BFLOAT16, cast=lambda unit: BFLOAT16
    )
    for layer in model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    shard_layers(model, MLP_UNITS, mp_policy=MixedPrecisionPolicy(param_dtype=BFLOAT16))
    assert_two_steps(world, model, unitwise, None)


# --- raw gradients of a compiled backward ---


@torch.library.custom_op("tessera_tests::product", mutates_args=())
def product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T, whose backward gives the weight's gradient unrounded."""
    return (x.float() @ weight.float().T).to(x.dtype)


@product.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@torch.library.custom_op("tessera_tests::product_backward", mutates_args=())
def product_backward(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x, in its dtype, and of the weight, in float32."""
    return (gradient.float() @ weight.float()).to(x.dtype), gradient.float().T @ x.float()


@product_backward.register_fake
def _(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), weight.new_empty(weight.shape, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.tessera_tests.product_backward(gradient, *ctx.saved_tensors)  # type: ignore[no-any-return]


product.register_autograd(_backward, setup_context=_save)


class Fused(nn.Module):
    """A linear layer as a fused kernel has it: its weight's gradient leaves the backward in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.weight = nn.Parameter(torch.randn(6, 8).to(BFLOAT16))

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 8] to [rows, 6]."""
        return torch.ops.tessera_tests.product(x, self.weight)  # type: ignore[no-any-return]


def rows(rank: int, micro: int = 0) -> Tensor:
    """Returns a rank's rows in bfloat16."""
    return drawn(6, rank, micro, shape=(5, 8), dtype=BFLOAT16)


def rounded(gradient: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Returns the values in float32 after a cast to `dtype`, if there is one."""
    return gradient if dtype is None else gradient.to(dtype).float()


def raw_gradient(rank: int, micro: int = 0) -> Tensor:
    """Returns what the backward of the sum of results gives for the weight, unrounded."""
    ones = torch.ones(5, 6, dtype=BFLOAT16)
    return ones.float().T @ rows(rank, micro).float()


class Rows(nn.Linear):
    """A linear layer that is not torch.nn's own."""

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in_features] to [rows, out_features]."""
        return nn.functional.linear(x, self.weight)


def wide_backward(graph: Any, examples: Any) -> Callable[..., Any]:
    """A backend's backward compiler, whose code gives the gradients of bfloat16 parameters in float32.

    It stands for kernels that keep their float32 sums: the graph's products run in float32, and their results are not
    rounded to what the traced program says.
    """
    outputs = [node for node in graph.graph.nodes if node.op == "output"]

    def run(*arguments: Any) -> Any:
        widened = [one.float() if isinstance(one, Tensor) and one.dtype == BFLOAT16 else one for one in arguments]
        with torch.no_grad():
            return graph(*widened)

    assert len(outputs) == 1
    return make_boxed_func(run)  # type: ignore[no-any-return]


def fused_backend() -> Any:
    """Returns a compiler whose forwards are as they are traced, and whose backwards give float32 gradients."""
    return aot_autograd(fw_compiler=lambda graph, examples: make_boxed_func(graph.forward), bw_compiler=wide_backward)


RULES: dict[str, tuple[MixedPrecisionPolicy, torch.dtype | None]] = {
    "kept": (MixedPrecisionPolicy(), None),
    "normalised": (MixedPrecisionPolicy(rules=[Rule("weight", grad_dtype=BFLOAT16)]), BFLOAT16),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("compiled", [None, *BACKENDS])
def test_float32_gradients_of_a_bfloat16_parameter_come_through_one_door(
    world: Any, compiled: str | None, rule: str
) -> None:
    """Two micro-batches without sync of a kernel that gives float32: kept with all digits where nothing asks for a
    dtype, rounded on arrival, each by itself, where grad_dtype does. AOTAutograd's trace of autograd has the cast to
    the parameter's dtype in the compiled code, so there each arrives as that code gives it."""
    policy, rounds = RULES[rule]
    model = Fused()
    if compiled is not None:
        model.compile(backend=compiled, fullgraph=True)
        rounds = BFLOAT16
    fully_shard(model, mp_policy=policy)
    for micro in range(2):
        model.set_requires_gradient_sync(micro == 1)
        model(rows(world.rank, micro)).float().sum().backward()
    sums = [rounded(raw_gradient(rank), rounds) + rounded(raw_gradient(rank, 1), rounds) for rank in range(world.size)]
    expected = mean_in_rank_order(sums, world.size, torch.float32)
    assert expected is not None
    assert not torch.equal(expected.to(BFLOAT16).float(), expected)
    assert_bits("gradient", dict(tessera.full_gradients(model))["weight"], expected)


def test_a_compilers_own_float32_sums_are_kept_or_normalised_by_contract(world: Any) -> None:
    """A backend whose backward code does not round what the trace calls bfloat16: the raw dtype is the slot's."""
    for policy, rounds in RULES.values():
        torch._dynamo.reset()
        torch.manual_seed(4)
        model = Rows(8, 6, bias=False, dtype=BFLOAT16)
        model.compile(backend=fused_backend(), fullgraph=True)
        fully_shard(model, mp_policy=policy)
        model(rows(world.rank)).float().sum().backward()
        raw = [rounded(raw_gradient(rank), rounds) for rank in range(world.size)]
        expected = mean_in_rank_order(raw, world.size, torch.float32)
        assert expected is not None
        assert_bits("gradient", dict(tessera.full_gradients(model))["weight"], expected)


@pytest.mark.parametrize(("own", "rounds"), [(None, None), (torch.float32, None), (BFLOAT16, BFLOAT16)])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_leafs_own_grad_dtype_says_what_a_rule_says(
    world: Any, compiled: bool, own: torch.dtype | None, rounds: torch.dtype | None
) -> None:
    """Tensor.grad_dtype of the parameter before sharding: None keeps raw gradients, float32 holds them, bfloat16
    rounds each on arrival."""
    torch.manual_seed(4)
    model = Rows(8, 6, bias=False, dtype=BFLOAT16) if compiled else Fused()
    model.weight.grad_dtype = own
    if compiled:
        model.compile(backend=fused_backend(), fullgraph=True)
    fully_shard(model)
    model(rows(world.rank)).float().sum().backward()
    raw = [rounded(raw_gradient(rank), rounds) for rank in range(world.size)]
    expected = mean_in_rank_order(raw, world.size, torch.float32)
    assert expected is not None
    assert_bits(f"gradient with grad_dtype {own}", dict(tessera.full_gradients(model))["weight"], expected)
