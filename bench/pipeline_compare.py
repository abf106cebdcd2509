#!/usr/bin/env python3
"""PyTorch's side of bench/pipeline_compare: the models of bench/fsdp2_compare.py, transformers' own
layers, cut into stages of torch.distributed.pipelining.

    .venv/bin/python bench/pipeline_compare.py --folder DIR [--model dense|moe] [--kind ZBV]
                                               [--steps 20] [--rows 1] [--micro-batches 8]
                                               [--param-dtype bfloat16|float32]

Two ranks x 1 thread over Gloo, one pipeline, no data parallelism. One line of JSON: step times of
the slower rank, losses, peak RSS of both.

Every rank makes the modules of its own stages alone and reads their weights alone. bfloat16:
weights and gradients are bf16, so micro-batches are summed in bf16, with fp32 masters that the
optimizer works on. That is less work and memory than fp32 sums, which Tessera has.
"""

import argparse
import json
import pathlib
import resource
import time

import fsdp2_compare as models
import local_ranks

# Name: torch's class, stages a rank, whether they lie on a V.
KINDS = {"GPipe": ("ScheduleGPipe", 1, False), "1F1B": ("Schedule1F1B", 1, False),
         "Interleaved1F1B": ("ScheduleInterleaved1F1B", 2, False),
         "ZBV": ("ScheduleZBVZeroBubble", 2, True), "DualPipeV": ("ScheduleDualPipeV", 2, True)}
# By stages: the first layer of each. With the head, which costs as much as two layers, both ranks
# have equal work.
SPLITS = {2: [0, 5], 4: [0, 2, 5, 7]}
DTYPES = ("bfloat16", "float32")


def stages_of(kind, rank, ranks):
    _, a_rank, on_a_v = KINDS[kind]
    if on_a_v:
        return [rank, 2 * ranks - 1 - rank]
    return list(range(rank, ranks * a_rank, ranks))


def new_schedule(kind, parts, ranks, micro_batches, loss):
    """`parts`: stage -> module, those of this rank. The loss divides by micro-batches itself."""
    import torch
    from torch.distributed import pipelining
    name, a_rank, _ = KINDS[kind]
    stages = [pipelining.PipelineStage(module, stage, ranks * a_rank, torch.device("cpu"))
              for stage, module in parts.items()]
    return getattr(pipelining, name)(stages[0] if a_rank == 1 else stages, micro_batches,
                                     loss_fn=loss, scale_grads=False)


def weights_file(folder):
    return folder / "weights.safetensors"


def prepare(kind, folder, steps, rows):
    """As for FSDP2, and the weights once more under the names of transformers' modules, of which a
    rank reads its own."""
    from safetensors.torch import save_file
    models.prepare(kind, folder, steps, rows, 1)
    if not weights_file(folder).exists():
        state = models.load_model(kind, folder / "model").state_dict()
        save_file({name: tensor.contiguous() for name, tensor in state.items()},
                  weights_file(folder))


def make_parts(arguments):
    """The modules of this rank's stages: stage -> module."""
    import torch
    from safetensors import safe_open
    from torch import nn

    class Part(nn.Module):
        """Layers of the model, with the embedding before the first and the head behind the last."""

        def __init__(self, whole, rope, begin, end):
            super().__init__()
            layers = whole.model.layers
            self.layers = nn.ModuleDict({str(i): layers[i] for i in range(begin, end)})
            self.embed_tokens = whole.model.embed_tokens if begin == 0 else None
            last = end == len(layers)
            self.norm, self.lm_head = (whole.model.norm, whole.lm_head) if last else (None, None)
            self.rope = rope

        def forward(self, x):
            if self.embed_tokens is not None:
                x = self.embed_tokens(x)
            for layer in self.layers.values():
                x = layer(x, position_embeddings=self.rope)  # no mask: causal
            return x if self.lm_head is None else self.lm_head(self.norm(x))

        def names(self):
            """Of parameters: as the module knows them, as the whole model does."""
            for name, _ in self.named_parameters():
                yield name, name if name.startswith("lm_head") else f"model.{name}"

    dtype = getattr(torch, arguments.param_dtype)
    with torch.device("meta"):
        whole = models.new_model(arguments.model)
    if arguments.model == "moe":
        whole.set_experts_implementation("grouped_mm")
    whole.train()
    positions = torch.arange(models.SEQUENCE).unsqueeze(0)
    rope = type(whole.model.rotary_emb)(whole.config)(torch.empty(0, dtype=dtype), positions)
    splits = SPLITS[arguments.ranks * KINDS[arguments.kind][1]] + [models.LAYERS]
    parts = {}
    with safe_open(weights_file(arguments.folder), "pt") as file:
        for stage in stages_of(arguments.kind, arguments.rank, arguments.ranks):
            part = Part(whole, rope, splits[stage], splits[stage + 1])
            state = {name: file.get_tensor(full).to(dtype) for name, full in part.names()}
            part.load_state_dict(state, strict=True, assign=True)
            for parameter in part.parameters():
                parameter.requires_grad_()
            parts[stage] = part
    return parts


class Optimizer:
    """AdamW on fp32 masters, after the norm over all ranks has been clipped."""

    def __init__(self, parameters):
        import torch
        self.parameters = parameters
        self.masters = [p if p.dtype == torch.float32 else p.detach().float() for p in parameters]
        self.adamw = torch.optim.AdamW(self.masters, fused=True, **models.OPTIMIZER)

    def step(self):
        import torch
        import torch.distributed as dist
        for master, parameter in zip(self.masters, self.parameters):
            if master is not parameter:
                master.grad, parameter.grad = parameter.grad.float(), None
        squares = torch.nn.utils.get_total_norm([m.grad for m in self.masters]).square()
        dist.all_reduce(squares)
        torch.nn.utils.clip_grads_with_norm_(self.masters, models.MAX_NORM, squares.sqrt())
        self.adamw.step()
        self.adamw.zero_grad()
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.parameters):
                if master is not parameter:
                    parameter.copy_(master)


def train(arguments):
    import torch
    import torch.distributed as dist
    from safetensors import safe_open
    from torch.nn import functional

    local_ranks.join(arguments)
    parts = make_parts(arguments)

    def loss(logits, labels):
        mean = functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        return mean / arguments.micro_batches  # each has as many labels

    schedule = new_schedule(arguments.kind, parts, arguments.ranks, arguments.micro_batches, loss)
    optimizer = Optimizer([p for part in parts.values() for p in part.parameters()])
    with safe_open(arguments.folder / "batches.safetensors", "pt") as file:
        ids = file.get_tensor("input_ids")
        # Each position's label is the next token, as transformers' loss shifts them.
        labels = functional.pad(file.get_tensor("labels"), (0, 1), value=-100)[..., 1:].contiguous()
    has_first, has_last = 0 in parts, arguments.ranks * KINDS[arguments.kind][1] - 1 in parts

    def step(index):
        losses = [] if has_last else None
        schedule.step(*[ids[index]] if has_first else [], losses=losses, return_outputs=False,
                      target=labels[index] if has_last else None)
        optimizer.step()
        return float(sum(losses)) if has_last else 0.0

    losses, milliseconds = [], []
    for index in range(arguments.steps):
        dist.barrier()
        start = time.perf_counter()
        losses.append(step(index))
        milliseconds.append(1e3 * (time.perf_counter() - start))
    local_ranks.report(arguments, {
        "step_ms": milliseconds, "loss": losses,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "parameters": sum(p.numel() for part in parts.values() for p in part.parameters())})
    local_ranks.leave(arguments)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--model", choices=models.MODELS, default="dense")
    parser.add_argument("--kind", choices=KINDS, default="1F1B")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=1, help="a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--param-dtype", choices=DTYPES, default=DTYPES[0])
    local_ranks.add_rank_arguments(parser)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        return train(arguments)

    prepare(arguments.model, arguments.folder, arguments.steps,
            arguments.rows * arguments.micro_batches)
    ranks = local_ranks.run_ranks(
        __file__, ["--folder", arguments.folder, "--model", arguments.model, "--kind",
                   arguments.kind, "--steps", arguments.steps, "--rows", arguments.rows,
                   "--micro-batches", arguments.micro_batches, "--param-dtype",
                   arguments.param_dtype], arguments.ranks)
    print(json.dumps({
        "step_ms": [max(times) for times in zip(*(rank["step_ms"] for rank in ranks))],
        "loss": [sum(losses) for losses in zip(*(rank["loss"] for rank in ranks))],
        "peak_rss_mib": [rank["peak_rss_mib"] for rank in ranks],
        "parameters": sum(rank["parameters"] for rank in ranks)}))


if __name__ == "__main__":
    main()
