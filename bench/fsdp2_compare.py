#!/usr/bin/env python3
"""PyTorch's side of bench/fsdp2_compare: transformers' Qwen3 of 18.9 M parameters under FSDP2, or
its Qwen3-MoE of 47 M with grouped products.

    .venv/bin/python bench/fsdp2_compare.py --folder DIR [--model dense|moe] [--steps 30] [--rows 2]
                                            [--profile] [--recompute none|full|selective]
                                            [--micro-batches 4 --sequence 64] [--compile]
                                            [--param-dtype bfloat16|float32]

DIR gets, once, what both sides read: `model/` (a Hugging Face folder with the initial weights in
fp32) and `batches.safetensors` (`input_ids`, `labels` [S,B,T], fixed random tokens). Then two ranks
train and one line of JSON is printed: step times, losses, peak RSS, and, with --profile, where a
step goes. The first steps of a run are warm-up and not counted. --recompute wraps every layer in
torch's non-reentrant checkpoint, inside its FSDP unit; selective saves the results of all matrix
products with a weight, as Tessera's does. Of several micro-batches all but the last one neither
reduce nor free gradients. --compile: torch.compile for each layer, inside its FSDP unit; what is
compiled in the first steps is said, and a run that compiles in one that counts is an error.
"""

import argparse
import json
import pathlib
import resource
import statistics
import time

import local_ranks

LAYERS, HIDDEN, VOCABULARY = 8, 384, 8192
SEQUENCE, ROWS_A_RANK = 256, 2
WARM_UP_STEPS = 5
OPTIMIZER = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
MAX_NORM = 1.0
RECOMPUTE = ("none", "full", "selective")
DTYPES = ("bfloat16", "float32")


MODELS = ("dense", "moe")


def new_model(kind):
    """With random weights."""
    import transformers
    common = dict(
        hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=6,
        num_key_value_heads=2, head_dim=64, intermediate_size=1024, vocab_size=VOCABULARY,
        tie_word_embeddings=False, use_cache=False, attention_dropout=0.0,
        max_position_embeddings=SEQUENCE, bos_token_id=None, eos_token_id=None)
    if kind == "dense":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**common))
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(
        num_experts=16, num_experts_per_tok=4, moe_intermediate_size=256, norm_topk_prob=True,
        output_router_logits=False, **common))


def load_model(kind, folder):
    import torch
    import transformers
    if kind == "dense":
        return transformers.Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return transformers.Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32,
                                                            experts_implementation="grouped_mm")


def prepare(kind, folder, steps, rows, ranks, sequence=SEQUENCE):
    """Writes model/ and batches.safetensors unless they are there with enough steps."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model/model.safetensors").exists():
        torch.manual_seed(0)
        new_model(kind).float().save_pretrained(folder / "model")
    path = folder / "batches.safetensors"
    if path.exists():
        with safe_open(path, "pt") as file:
            if file.get_slice("input_ids").get_shape() == [steps, rows * ranks, sequence]:
                return
    drawn = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (steps, rows * ranks, sequence), generator=drawn)
    save_file({"input_ids": ids, "labels": ids.clone()}, path)


# The first category with a part that an event's name contains counts the event's own time. Gloo works
# on threads of its own; what shows on this thread is the wait, inside the c10d call or FSDP's hook.
CATEGORIES = (
    ("communication and hooks", ("FSDP::", "c10d::", "_c10d_functional", "record_param_comms")),
    ("optimizer", ("_fused_adamw_", "Optimizer.", "clip_grad")),
    ("attention", ("scaled_dot_product", "flash_attention")),
    ("products", ("::mm", "::addmm", "::bmm", "::linear", "::matmul", "_grouped_mm", "mkldnn")),
    ("cross entropy", ("log_softmax", "nll_loss", "cross_entropy")),
    ("copies and casts", ("copy_", "::cat", "chunk_cat", "clone", "_to_copy", "::to", "fsdp::",
                          "split_with_sizes", "fill_", "zero_", "contiguous")),
    ("other kernels", ("aten::",)),
)


def where_time_goes(step, steps):
    """Shares of a step's wall time by category, of this rank's main thread."""
    from torch.profiler import ProfilerActivity, profile
    step(0)
    start = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for index in range(steps):
            step(index)
        wall = time.perf_counter() - start
    seconds = {name: 0.0 for name, _ in CATEGORIES}
    for event in profiled.key_averages():
        for category, parts in CATEGORIES:
            if any(part in event.key for part in parts) and "gloo:" not in event.key:
                seconds[category] += event.self_cpu_time_total * 1e-6
                break
    seconds["Python and dispatch"] = max(0.0, wall - sum(seconds.values()))
    return {"profiled_step_ms": round(1e3 * wall / steps, 1),
            **{name: round(value / wall, 3) for name, value in seconds.items()}}


def recomputed(layer, mode):
    """The layer in torch's checkpoint. On CPUs a Linear is an mm or addmm with its weight; attention's
    products are bmm, or inside its fused kernel."""
    import functools
    import torch
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    products = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}

    def policy(context, operation, *arguments, **named):
        return (CheckpointPolicy.MUST_SAVE if operation in products
                else CheckpointPolicy.PREFER_RECOMPUTE)

    options = {"preserve_rng_state": False}  # nothing is drawn
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpoint_wrapper(layer, **options)


def sharded_model(arguments):
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = load_model(arguments.model, arguments.folder / "model")
    model.train()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, arguments.param_dtype),
                                  reduce_dtype=torch.float32)
    layers = model.model.layers
    for index in range(len(layers)):
        if arguments.recompute != "none":
            layers[index] = recomputed(layers[index], arguments.recompute)
        if arguments.compile:
            layers[index] = torch.compile(layers[index])
        fully_shard(layers[index], mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def graphs_so_far():
    from torch._dynamo.utils import counters
    return counters["stats"]["unique_graphs"]


def train(arguments):
    import torch
    import torch.distributed as dist
    from safetensors import safe_open

    local_ranks.join(arguments)
    model = sharded_model(arguments)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIMIZER)
    count, rows = arguments.micro_batches, arguments.rows
    mine = slice(arguments.rank * rows * count, (arguments.rank + 1) * rows * count)
    with safe_open(arguments.folder / "batches.safetensors", "pt") as file:
        ids = file.get_tensor("input_ids")[:, mine].contiguous()
        labels = file.get_tensor("labels")[:, mine].contiguous()

    def step(index):
        index %= len(ids)
        total = 0.0
        for micro_batch in range(count):
            if count > 1:
                model.set_requires_gradient_sync(micro_batch + 1 == count)
            part = slice(micro_batch * rows, (micro_batch + 1) * rows)
            loss = model(input_ids=ids[index, part], labels=labels[index, part]).loss / count
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return total

    losses, milliseconds = [], []
    began, graphs, warm_up_s = time.perf_counter(), 0, 0.0
    for index in range(arguments.steps):
        if index == WARM_UP_STEPS:
            warm_up_s, graphs = time.perf_counter() - began, graphs_so_far()
        dist.barrier()
        start = time.perf_counter()
        losses.append(step(index))
        milliseconds.append(1e3 * (time.perf_counter() - start))
    if arguments.compile and graphs_so_far() != graphs:
        raise SystemExit(f"fsdp2_compare: {graphs_so_far() - graphs} graphs were compiled in steps "
                         "that count, expected none")
    losses = torch.stack(losses)
    dist.all_reduce(losses)  # every rank kept as many labels: the mean of means is the mean
    result = {"step_ms": milliseconds, "loss": (losses / dist.get_world_size()).tolist(),
              "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
              "warm_up_s": warm_up_s, "graphs": graphs,
              "parameters": sum(p.numel() for p in model.parameters())}
    if arguments.profile:
        result["shares"] = where_time_goes(step, 5)
    local_ranks.report(arguments, result)
    local_ranks.leave(arguments)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--model", choices=MODELS, default="dense")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rows", type=int, default=ROWS_A_RANK, help="a rank and micro-batch")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=SEQUENCE)
    parser.add_argument("--param-dtype", choices=DTYPES, default=DTYPES[0])
    parser.add_argument("--recompute", choices=RECOMPUTE, default="none")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--profile", action="store_true")
    local_ranks.add_rank_arguments(parser)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        return train(arguments)

    prepare(arguments.model, arguments.folder, arguments.steps,
            arguments.rows * arguments.micro_batches, arguments.ranks, arguments.sequence)
    passed = ["--folder", arguments.folder, "--model", arguments.model, "--steps", arguments.steps,
              "--rows", arguments.rows, "--micro-batches", arguments.micro_batches,
              "--param-dtype", arguments.param_dtype, "--recompute", arguments.recompute]
    passed += ["--compile"] * arguments.compile + ["--profile"] * arguments.profile
    ranks = local_ranks.run_ranks(__file__, passed, arguments.ranks)
    slowest = [max(times) for times in zip(*(rank["step_ms"] for rank in ranks))]
    counted = sorted(slowest[WARM_UP_STEPS:])
    print(json.dumps({
        "median_ms": statistics.median(counted),
        "p10_ms": counted[len(counted) // 10], "p90_ms": counted[-1 - len(counted) // 10],
        "step_ms": slowest, "loss": ranks[0]["loss"],
        "peak_rss_mib": [rank["peak_rss_mib"] for rank in ranks],
        "warm_up_s": max(rank["warm_up_s"] for rank in ranks), "graphs": ranks[0]["graphs"],
        "parameters": ranks[0]["parameters"],
        **({"shares": ranks[0]["shares"]} if arguments.profile else {})}))


if __name__ == "__main__":
    main()
