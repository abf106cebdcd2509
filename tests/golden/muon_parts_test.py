"""One step of Muon, as a user does it, against torch.optim.Muon of the same gradients, which transformers computed: each
matrix of a fused weight is stepped alone, or with split_fused = false all of them as one."""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

try:
    import torch
    from safetensors.torch import load_file, save_file
except ImportError:
    sys.exit(77)

DATA = pathlib.Path(os.environ["TESSERA_TEST_DATA"])
# The columns, or rows, of a fused weight that form one matrix each.
FUSED = (
    ("gpt-oss-fp32", "gate_up_proj", lambda matrix: [matrix[:, 0::2], matrix[:, 1::2]]),
    ("llama4-text-fp32", "gate_up_proj", lambda matrix: list(matrix.chunk(2, 1))),
    ("gpt2-fp32", "c_attn.weight", lambda matrix: list(matrix.chunk(3, 1))),
    ("phi3-fp32", "gate_up_proj.weight", lambda matrix: list(matrix.chunk(2, 0))),
    ("phi3-fp32", "qkv_proj.weight", lambda matrix: list(matrix.chunk(3, 0))),
)
CONFIG = """
[model]
path = "{folder}"
[data]
path = "batch.safetensors"
[training]
steps = 1
seq_len = {positions}
global_batch_size = {rows}
max_norm = 0
[precision]
param_dtype = "float32"
[optimizer]
name = "Muon"
lr = 0.02
[checkpoint]
interval = 1
"""
AS_ONE = '[[optimizer.rule]]\nmatch = ["*"]\nsplit_fused = false\n'
# Gradients of transformers differ from ours by some 4e-6, small singular values grow 485-fold.
BOUND = 1e-2


def run(folder, *words):
    done = subprocess.run([os.environ["TESSERA_PROGRAM"], *words], cwd=folder, capture_output=True, text=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr


def trained(folder, name, batch, *words, rules=""):
    rows, positions = batch["input_ids"].shape
    save_file({key: value.unsqueeze(0).contiguous() for key, value in batch.items()}, folder / "batch.safetensors")
    config = CONFIG.format(folder=DATA / name, positions=positions, rows=rows)
    (folder / "run.toml").write_text(config + rules)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        run(folder, "train", "run.toml", "--job.dump_folder", f"{place}/run", *words)
        run(folder, "convert", f"{place}/run", f"{place}/out")
        return load_file(pathlib.Path(place) / "out" / "model.safetensors")


def stepped(values, gradient):
    """By torch, whose iterations run in float32 here."""
    parameter = torch.nn.Parameter(values.contiguous().clone())
    parameter.grad = gradient.contiguous().clone()
    before, torch.Tensor.bfloat16 = torch.Tensor.bfloat16, lambda self: self.float().clone()
    try:
        torch.optim.Muon([parameter], lr=0.02, weight_decay=0.1).step()
    finally:
        torch.Tensor.bfloat16 = before
    return parameter.detach()


class MuonParts(unittest.TestCase):
    def test_a_step_is_torchs_of_each_matrix(self):
        for name, ending, parts in FUSED:
            reference = load_file(DATA / name / "reference.safetensors")
            before = load_file(DATA / name / "model.safetensors")
            batch = {key: reference[key] for key in ("input_ids", "labels")}
            with tempfile.TemporaryDirectory() as place:
                apart = trained(pathlib.Path(place), name, batch)
                one = trained(pathlib.Path(place), name, batch, rules=AS_ONE)
                layouts = {"one rank": apart}
                if name == "gpt-oss-fp32":
                    layouts["etp"] = trained(pathlib.Path(place), name, batch,
                                             "--parallelism.tensor_parallel_degree", "2",
                                             "--parallelism.expert_tensor_parallel_degree", "2")
                    layouts["ep"] = trained(pathlib.Path(place), name, batch,
                                            "--parallelism.data_parallel_shard_degree", "2",
                                            "--parallelism.expert_parallel_degree", "2")
                if name == "phi3-fp32":
                    layouts["tp"] = trained(pathlib.Path(place), name, batch,
                                            "--parallelism.tensor_parallel_degree", "2")
            weights = [key for key in before if key.endswith(ending)]
            self.assertGreater(len(weights), 1)
            for key in weights:
                values, gradients = before[key], reference[f"grad/{key}"]
                matrices = [(values, gradients)] if values.dim() == 2 else list(zip(values, gradients))
                for number, (value, gradient) in enumerate(matrices):
                    found = {layout: weights[key] if values.dim() == 2 else weights[key][number]
                             for layout, weights in layouts.items()}
                    whole = one[key] if values.dim() == 2 else one[key][number]
                    with self.subTest(model=name, weight=key, expert=number):
                        self.compare(value, gradient, parts, found, whole)

    def test_queries_keys_and_values_of_unequal_shares_are_one_matrix(self):
        name = "phi4-mini-fp32"
        reference = load_file(DATA / name / "reference.safetensors")
        before = load_file(DATA / name / "model.safetensors")
        batch = {key: reference[key] for key in ("input_ids", "labels")}
        for words in ((), ("--parallelism.tensor_parallel_degree", "2")):
            with tempfile.TemporaryDirectory() as place:
                after = trained(pathlib.Path(place), name, batch, *words)
            for key in (key for key in before if key.endswith("qkv_proj.weight")):
                wanted = stepped(before[key], reference[f"grad/{key}"])
                self.assertLess((after[key] - wanted).norm(), BOUND * (wanted - before[key]).norm(), key)

    def compare(self, value, gradient, parts, found, whole):
        expected = [stepped(*each) for each in zip(parts(value), parts(gradient))]
        as_one = stepped(value, gradient)
        for layout, after in found.items():
            for part, old, wanted in zip(parts(after), parts(value), expected):
                self.assertLess((part - wanted).norm(), BOUND * (wanted - old).norm(), layout)
        self.assertLess((whole - as_one).norm(), BOUND * (as_one - value).norm())
        if gradient.abs().max() > 0:
            self.assertGreater((whole - found["one rank"]).norm(), 10 * BOUND * (as_one - value).norm())


if __name__ == "__main__":
    unittest.main()
