"""The table of refusals for test_refusals.py: what a program does, and the text that it gets."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tessera
import torch
from support import Mlp, drawn, shard_layers
from tessera import MixedPrecisionPolicy, Rule, fully_shard
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

UNITS = ("layers.0", "layers.1")


def sharded(**options: Any) -> Any:
    """Returns an Mlp of three units and the rest."""
    return shard_layers(Mlp(), UNITS, **options)


def loss_of(model: Any, rank: int = 0) -> Tensor:
    """Returns the loss of a rank's rows."""
    return model(drawn(1, rank, shape=(4, 8))).square().mean()  # type: ignore[no-any-return]


def after_backward(**options: Any) -> Any:
    """Returns an Mlp with gradients."""
    model = sharded(**options)
    loss_of(model).backward()
    return model


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """What is a cycle stays until gc.collect() is called."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclasses.dataclass(frozen=True)
class Refusal:
    """`act` raises `error` with a text that `text` matches. `lasting`: a forward or a backward has failed with it."""

    act: Callable[[], Any]
    text: str
    error: type[BaseException] = tessera.Error
    lasting: bool = False


REFUSALS: dict[str, Refusal] = {}


def refused(text: str, error: type[BaseException] = tessera.Error, lasting: bool = False) -> Any:
    """Adds a function to the table under its name."""

    def add(act: Callable[[], Any]) -> Callable[[], Any]:
        REFUSALS[act.__name__] = Refusal(act, text, error, lasting)
        return act

    return add


# --- what reads a rank's part as if it were the whole ---


@refused("norm.*tessera.clip_grad_norm_")
def torch_clip_grad_norm() -> None:
    torch.nn.utils.clip_grad_norm_(after_backward().parameters(), 1.0)


@refused("norm.*tessera.clip_grad_norm_")
def torch_clip_grad_norm_without_foreach() -> None:
    torch.nn.utils.clip_grad_norm_(after_backward().parameters(), 1.0, foreach=False)


@refused("norm.*tessera.gradient_norm")
def torch_get_total_norm() -> None:
    torch.nn.utils.get_total_norm([shard.grad for shard in after_backward().parameters()])


@refused("norm.*tessera.clip_grad_norm_")
def norm_of_a_gradient() -> None:
    next(after_backward().parameters()).grad.norm()


@refused("norm.*full_grad")
def norm_of_the_data_of_a_gradient() -> None:
    next(after_backward().parameters()).grad.data.norm(2)


@refused("sum.*gradient_norm")
def sum_of_squares_of_a_gradient() -> None:
    next(after_backward().parameters()).grad.detach().float().pow(2).sum()


@refused("all.*tessera.GradScaler")
def a_branch_on_a_gradient() -> None:
    torch.isfinite(next(after_backward().parameters()).grad).all()


@refused("weight of Linear: found another one than fully_shard has seen")
def a_parameter_that_was_replaced() -> None:
    model = sharded()
    model.layers[2].weight = nn.Parameter(torch.zeros(8, 8))
    loss_of(model)


@refused("0 of ModuleList: found another one than fully_shard has seen")
def a_unit_that_was_replaced() -> None:
    model = sharded()
    model.layers[0] = nn.Linear(8, 8)
    loss_of(model)


@refused("expected one thread at a time")
def a_call_on_a_second_thread() -> None:
    model = sharded()
    raised: list[BaseException] = []

    def call(*_: Any) -> None:
        try:
            loss_of(model)
        except tessera.Error as error:
            raised.append(error)

    def inside(*_: Any) -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    with model.layers[0].register_forward_pre_hook(inside):
        loss_of(model)
    raise raised[0]


@refused("norm.*full_tensor")
def norm_of_a_shard() -> None:
    next(sharded().parameters()).norm()


@refused("register_hook.*change .grad")
def hook_on_a_shard() -> None:
    next(sharded().parameters()).register_hook(lambda gradient: gradient)


@refused("register_post_accumulate_grad_hook.*change .grad")
def optimizer_in_backward() -> None:
    next(sharded().parameters()).register_post_accumulate_grad_hook(lambda parameter: None)


@refused("parameter late.weight: found a tensor that was put into the module after fully_shard")
def a_module_that_comes_late() -> None:
    model = sharded()
    model.late = nn.Linear(2, 2)
    torch.optim.SGD(model.parameters(), lr=0.1)


@refused("tessera.GradScaler")
def torch_grad_scaler() -> None:
    model = sharded()
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(loss_of(model)).backward()
    scaler.step(optimizer)


@refused("LBFGS.*tessera.AdamW")
def torch_lbfgs() -> None:
    model = after_backward()
    torch.optim.LBFGS(model.parameters()).step(lambda: 0.0)


@refused("Adafactor.*tessera.AdamW")
def torch_adafactor() -> None:
    torch.optim.Adafactor(after_backward().parameters()).step()


@refused("Muon only supports 2D parameters", ValueError)
def torch_muon_which_torch_refuses_itself() -> None:
    torch.optim.Muon(sharded().parameters())


# --- what asks others for gradients than the shards ---


@refused(r"backward\(inputs=\).*layers.0.weight.*call loss.backward\(\)")
def backward_with_shards_as_inputs() -> None:
    model = sharded()
    loss_of(model).backward(inputs=list(model.parameters()))


@refused(r"torch.autograd.grad.*layers.0.weight.*call loss.backward\(\)")
def autograd_grad_of_shards() -> None:
    model = sharded()
    torch.autograd.grad(loss_of(model), model.parameters())


@refused(r"torch.autograd.grad.*layers.0.weight.*call loss.backward\(\)")
def autograd_grad_of_shards_that_may_be_unused() -> None:
    model = sharded()
    x = drawn(1, shape=(4, 8)).requires_grad_()
    torch.autograd.grad(model(x).sum(), [x, *model.parameters()], allow_unused=True)


@refused("layers.2.weight: found the .grad .* cleared, by zero_grad.*made before fully_shard", lasting=True)
def zero_grad_of_an_optimizer_that_was_made_before() -> None:
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shard_layers(model, UNITS)
    optimizer.zero_grad()
    loss_of(model)


@refused("layers.2.weight: found the .grad .* cleared, by zero_grad.*plain module around", lasting=True)
def zero_grad_of_a_plain_module_around_a_sharded_one() -> None:
    plain = nn.Sequential(after_backward())
    plain.zero_grad()
    loss_of(plain)


@refused("layers.2.weight: found the .grad .* cleared, by zero_grad", lasting=True)
def zero_grad_of_a_plain_module_inside() -> None:
    model = after_backward()
    model.layers[2].zero_grad()
    loss_of(model)


# --- copies and casts ---


@refused("deepcopy.*before fully_shard")
def deepcopy_of_a_module() -> None:
    copy.deepcopy(sharded())


@refused("deepcopy.*before fully_shard")
def deepcopy_of_a_shard() -> None:
    copy.deepcopy(next(sharded().parameters()))


@refused("deepcopy")
def deepcopy_of_a_plain_module_around_a_sharded_one() -> None:
    copy.deepcopy(nn.Sequential(sharded()))


@refused("copy.*before fully_shard")
def copy_of_a_module() -> None:
    copy.copy(sharded())


@refused("get_model_state_dict")
def pickle_of_a_module() -> None:
    pickle.dumps(sharded())


@refused("get_model_state_dict")
def pickle_of_a_shard() -> None:
    pickle.dumps(next(sharded().parameters()))


@refused("torch.save.*get_model_state_dict")
def torch_save_of_a_module() -> None:
    torch.save(sharded(), io.BytesIO())


@refused("after fully_shard.*mp_policy")
def half() -> None:
    sharded().half()


@refused("after fully_shard.*mp_policy")
def to_a_dtype() -> None:
    sharded().to(torch.bfloat16)


@refused("after fully_shard.*mp_policy")
def double_of_an_inner_unit() -> None:
    sharded().layers[0].double()


@refused("after fully_shard")
def to_another_device() -> None:
    sharded().to("meta")


@refused("to_empty.*before fully_shard.*load_state_dict")
def to_empty() -> None:
    sharded().to_empty(device="cpu")


@refused("to_empty.*before fully_shard")
def to_empty_of_a_plain_module_around_a_sharded_one() -> None:
    nn.Sequential(sharded()).to_empty(device="cpu")


@refused("share_memory.*before fully_shard")
def share_memory() -> None:
    sharded().share_memory()


# --- sharding ---


@refused("sharded already")
def sharding_twice() -> None:
    fully_shard(sharded())


@refused("no forward")
def sharding_a_list() -> None:
    fully_shard(Mlp().layers)


@refused("one torch.nn.Module")
def sharding_several_modules_at_once() -> None:
    fully_shard([nn.Linear(2, 2), nn.Linear(2, 2)])  # type: ignore[type-var]


@refused("shard_placement_fn.*leave it out")
def shard_placement_fn() -> None:
    fully_shard(Mlp(), shard_placement_fn=lambda parameter: None)  # type: ignore[arg-type]


@refused("offload_policy.*leave it out")
def offload_policy() -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy

    fully_shard(Mlp(), offload_policy=CPUOffloadPolicy())  # type: ignore[arg-type]


@refused("reshard_after_forward=2")
def reshard_after_forward_by_a_number() -> None:
    fully_shard(Mlp(), reshard_after_forward=2)


@refused("mp_policy", TypeError)
def another_policy() -> None:
    fully_shard(Mlp(), mp_policy={"param_dtype": torch.bfloat16})


@refused("without a shape")
def a_lazy_parameter() -> None:
    fully_shard(nn.LazyLinear(3))


@refused("ScriptModule")
def a_script_module() -> None:
    fully_shard(torch.jit.script(nn.Linear(2, 2)))


@refused("found a gradient.*zero_grad")
def a_gradient_before_sharding() -> None:
    model = Mlp()
    loss_of(model).backward()
    fully_shard(model)


@refused("found a hook on its gradient")
def a_hook_before_sharding() -> None:
    model = Mlp()
    model.layers[0].weight.register_hook(lambda gradient: gradient)
    fully_shard(model)


@refused("layers.0.weight and layers.1.weight.*memory of their own")
def overlapping_views_as_parameters() -> None:
    model = Mlp()
    model.layers[1].weight = nn.Parameter(model.layers[0].weight.detach().flatten()[:32].view(4, 8))
    fully_shard(model)


@refused("matches none")
def a_pattern_that_matches_nothing() -> None:
    fully_shard(Mlp(), mp_policy=MixedPrecisionPolicy(rules=[Rule("*nrom", pin=True)]))


@refused("loss_scaling|loss is scaled")
def float16_without_a_scaler() -> None:
    fully_shard(Mlp(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))


@refused("no method 'encode'")
def a_forward_method_that_is_not_there() -> None:
    tessera.register_fsdp_forward_method(sharded(), "encode")


@refused("not sharded")
def whole_tensors_of_a_plain_module() -> None:
    tessera.full_parameters(Mlp())


# --- forwards and backwards ---


@refused("use_reentrant=False", RuntimeError, lasting=True)
def a_reentrant_checkpoint_around_a_unit() -> None:
    x = drawn(1, shape=(4, 8)).requires_grad_()

    class Around(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](checkpoint(self.layers[0], x, use_reentrant=True))

    shard_layers(Around(), UNITS)(x).sum().backward()


@refused("layers.0.*sharded", RuntimeError)
def reading_a_weight_outside_of_a_forward() -> None:
    sharded().layers[0].weight.sum()


@refused("layers.0.*sharded|sharded.*layers.0", RuntimeError)
def an_inner_modules_forward_past_its_unit() -> None:
    model = sharded()
    model.layers[0].forward(drawn(1, shape=(4, 8)))


@refused("argument 0 in place.*clone", lasting=True)
def a_forward_that_changes_its_argument() -> None:
    class Changing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x *= 2
            return super().forward(x)

    model = nn.Sequential(nn.Linear(8, 8), Changing(8, 8))
    fully_shard(model[1])
    fully_shard(model)
    model(drawn(1, shape=(4, 8)))


@refused("result 0 was changed in place.*clone", RuntimeError, lasting=True)
def a_caller_that_changes_a_result_which_the_module_keeps() -> None:
    class Keeping(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = super().forward(x)
            return self.kept

    model = nn.Sequential(Keeping(8, 8))
    fully_shard(model[0])
    fully_shard(model)
    y = model(drawn(1, shape=(4, 8)))
    y += 1
    y.sum().backward()


@refused("its parameter.*weight.*clone", lasting=True)
def a_parameter_as_the_result_of_a_unit() -> None:
    class Giving(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return self.weight

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = Giving(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.inside(x)

    model = Around()
    fully_shard(model.inside)
    fully_shard(model)
    model(drawn(1, shape=(4, 8)))


@refused("autograd::grad.*expected backward", RuntimeError, lasting=True)
def autograd_grad_of_a_modules_own_parameter() -> None:
    model = sharded()
    loss = loss_of(model)
    torch.autograd.grad(loss, [model.layers[0].weight])


@refused("create_graph", RuntimeError, lasting=True)
def create_graph_through_a_unit() -> None:
    loss_of(sharded()).backward(create_graph=True)


@refused("FSDPMlp: found a call inside of torch.func.*loss.backward")
def torch_func_grad() -> None:
    model = sharded()
    torch.func.grad(lambda x: model(x).sum())(drawn(1, shape=(4, 8)))


@refused("torch.func.*get_model_state_dict")
def torch_func_jvp() -> None:
    x = drawn(1, shape=(4, 8))
    torch.func.jvp(sharded(), (x,), (x,))


@refused("torch.func.*get_model_state_dict")
def torch_func_vmap() -> None:
    torch.func.vmap(sharded())(drawn(1, shape=(3, 4, 8)))


@refused("FSDPLinear: found a call inside of torch.func")
def torch_func_jacrev_of_a_plain_module_around_a_sharded_one() -> None:
    torch.func.jacrev(nn.Sequential(fully_shard(nn.Linear(8, 8))))(drawn(1, shape=(4, 8)))


@refused("forward-mode autograd.*loss.backward")
def forward_mode_autograd() -> None:
    x = drawn(1, shape=(4, 8))
    with forward_ad.dual_level():
        sharded()(forward_ad.make_dual(x, x))


@refused("set_reshard_after_forward: found .* forwards whose backward has not run")
def a_control_between_forward_and_backward() -> None:
    model = sharded()
    loss = loss_of(model)
    model.set_reshard_after_forward(True)
    del loss


@refused("micro-batches.*set_requires_gradient_sync")
def a_norm_while_micro_batches_wait() -> None:
    model = sharded()
    model.set_requires_gradient_sync(False)
    loss_of(model).backward()
    tessera.clip_grad_norm_(model, 1.0)


@refused("micro-batches.*set_requires_gradient_sync")
def a_step_while_micro_batches_wait() -> None:
    model = sharded()
    optimizer = tessera.SGD(model, lr=0.1)
    model.set_requires_gradient_sync(False)
    loss_of(model).backward()
    optimizer.step()


# --- optimizers and training states ---


@refused("sharded|handle|fully_shard", RuntimeError)
def an_optimizer_of_a_plain_childs_parameters() -> None:
    model = fully_shard(Mlp())
    optimizer = torch.optim.SGD(model.layers[0].parameters(), lr=0.1)
    loss_of(model).backward()
    optimizer.step()


@refused("set_trainable")
def requires_grad_of_a_shard() -> None:
    next(sharded().parameters()).requires_grad_(False)


@refused("set_trainable")
def requires_grad_of_a_shard_by_attribute() -> None:
    next(sharded().parameters()).requires_grad = False


@refused("matches no")
def set_trainable_of_nothing() -> None:
    sharded().set_trainable("*nrom", False)


@refused("zero_grad|gradient")
def set_trainable_with_gradients() -> None:
    after_backward().set_trainable("layers.0.weight", False)


@refused("load_state_dict")
def load_state_dict_of_a_plain_module_around_a_sharded_one() -> None:
    plain = nn.Sequential(Mlp())
    values = plain.state_dict()
    shard_layers(plain[0], UNITS)
    plain.load_state_dict(values)


@refused("layers.0.weight")
def load_state_dict_without_a_parameter() -> None:
    values = Mlp().state_dict()
    del values["layers.0.weight"]
    sharded().load_state_dict(values)


@refused("layers.0.weight")
def load_state_dict_of_another_shape() -> None:
    values = Mlp().state_dict()
    values["layers.0.weight"] = torch.zeros(3, 3)
    sharded().load_state_dict(values)
