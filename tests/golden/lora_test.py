#!/usr/bin/env python3
"""Adapters that `tessera train` made, as peft and transformers read them.

The truth is peft's own forward and backward in fp64. A part of the layouts of each family; all of them with
TESSERA_FULL=1 (`scripts/full families`). Run by ctest with TESSERA_PROGRAM and TESSERA_TEST_DATA; leaves with 77
(skipped) where `transformers` or `peft` is missing, as with TESSERA_TORCH.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

try:
    import peft
    import torch
    import transformers
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

DATA = pathlib.Path(os.environ["TESSERA_TEST_DATA"])
FULL = os.environ.get("TESSERA_FULL") == "1"
FLOAT32 = ("--precision.param_dtype", "float32")
# From a second fp32 implementation, in the README of the reference data.
LOGITS_BOUND = 5e-5
LOSS_BOUND = 5e-6
GRADIENT_BOUND = 5e-5  # relative L2
STEPS_BOUND = 1e-3  # of how far a parameter moved, as between layouts (docs/layouts.md)
BFLOAT16_BOUND = 0.01  # 1 - cosine, likewise
RANK, ALPHA = 4, 10
TARGETS = ("q_proj", "o_proj", "layers.1.mlp.down_proj")


def in_transformers(name):
    return re.sub(r"^backbone\.", "model.", name)  # Nemotron-H's files have another stem than its class


def peft_names(gradients, folder):
    """Of ours, as peft calls and shapes them: A [E, r, in] and B [E, out, r] there stand [E r, in] and [out, r E]."""
    found = {}
    for name, value in gradients.items():
        module, product, factor, _ = (name.rsplit(".", 3))
        if not module.endswith(".experts"):
            found[in_transformers(name)] = value
            continue
        if folder.startswith("llama4"):  # whose matrices peft takes for their transposes
            factor = {"lora_A": "lora_B", "lora_B": "lora_A"}[factor]
            value = value.transpose(1, 2)
        both = f"{module}.down_proj.lora_A.weight" in gradients and product != "down_proj"
        module = in_transformers(module).replace("block_sparse_moe", "mlp") + (".base_layer" if both else "")
        found[f"{module}.{factor}.weight"] = (value.flatten(0, 1) if factor == "lora_A"
                                              else value.permute(1, 2, 0).flatten(1))
    return found


class Lora(unittest.TestCase):
    def setUp(self):
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        self.folder = pathlib.Path(made.name)

    def run_tessera(self, *words, code=0):
        done = subprocess.run([os.environ["TESSERA_PROGRAM"], *map(str, words)], capture_output=True, text=True,
                              cwd=self.folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
        self.assertEqual(done.returncode, code, done.stderr)
        return done.stdout if code == 0 else done.stderr

    def train(self, base, *more, targets=TARGETS, data="qwen3-fp32", run="run", code=0):
        (self.folder / "run.toml").write_text(
            f'[model]\npath = "{base}"\n[data]\npath = "{DATA / data / "reference.safetensors"}"\n'
            f"[training]\nsteps = 3\n[optimizer]\nlr = 0.05\n[lora]\nrank = {RANK}\nalpha = {ALPHA}\n"
            f"targets = {json.dumps(targets)}\n[job]\ndump_folder = \"{run}\"\n")
        said = self.run_tessera("train", "run.toml", "--nproc", "2", *FLOAT32, *more, code=code)
        return said if code else self.folder / run / "checkpoint/step-3"

    def adapted_layers(self, name):
        return 2 * json.loads((DATA / name / "config.json").read_text())["num_hidden_layers"] + 1

    def gradients(self, model, name, *more):
        out = self.folder / "gradients.safetensors"
        self.run_tessera("gradients", "--model", model, "--batch", DATA / name / "reference.safetensors",
                         "--out", out, *(more if "--precision.param_dtype" in more else FLOAT32 + more))
        found = load_file(out)
        out.unlink()
        return found

    def base_model(self, folder, dtype=torch.float64):
        config = transformers.AutoConfig.from_pretrained(folder)
        # The default experts have no fp64.
        return getattr(transformers, config.architectures[0]).from_pretrained(
            folder, dtype=dtype, experts_implementation="eager").eval()

    def batch(self, name):
        """What goes into a model of transformers, and the labels."""
        held = load_file(DATA / name / "reference.safetensors")
        inputs = {key: held[key] for key in ("input_ids", "pixel_values", "image_position_ids", "mm_token_type_ids")
                  if key in held}
        return inputs, held["labels"].long()

    def truth(self, base, adapter, name):
        """Loss, logits and the adapters' gradients of peft's model in fp64."""
        model = peft.PeftModel.from_pretrained(self.base_model(base), adapter, is_trainable=True,
                                               autocast_adapter_dtype=False).double()
        inputs, labels = self.batch(name)
        logits = model(**{key: value.double() if value.is_floating_point() else value
                          for key, value in inputs.items()}).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(),
                                                 ignore_index=-100)
        loss.backward()
        gradients = {name.removeprefix("base_model.model.").replace(".default", ""): parameter.grad
                     for name, parameter in model.named_parameters() if parameter.requires_grad}
        return loss.detach(), logits.detach(), gradients

    def expect_gradients(self, found, truth):
        loss, logits, gradients = truth
        self.assertLess(abs(found["loss"].double() - loss).item(), LOSS_BOUND)
        self.assertLess((found["logits"].double() - logits).abs().max().item(), LOGITS_BOUND)
        ours = {in_transformers(name.removeprefix("grad/")): value for name, value in found.items()
                if name.startswith("grad/")}
        self.assertEqual(ours.keys(), gradients.keys())
        for name, expected in gradients.items():
            self.assertGreater(expected.norm().item(), 0, name)
            error = (ours[name].double() - expected).norm() / expected.norm()
            self.assertLess(error.item(), GRADIENT_BOUND, name)

    def test_peft_computes_our_logits_loss_and_gradients(self):
        fused = ("qkv_proj", "o_proj", "gate_up_proj")
        states = ("in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj")
        for name, targets in (("qwen3-fp32", TARGETS), ("llama-mixed", TARGETS), ("phi4-mini-fp32", fused),
                              ("qwen3-next-fp32", states),
                              ("nemotron-h-fp32", ("in_proj", "o_proj", "up_proj", "down_proj"))):
            with self.subTest(name):
                checkpoint = self.train(DATA / name, run=name, targets=targets, data=name)
                self.run_tessera("convert", checkpoint, f"{name}-adapter")
                adapter = self.folder / f"{name}-adapter"
                truth = self.truth(DATA / name, adapter, name)
                plain = self.base_model(DATA / name)(**self.batch(name)[0]).logits
                self.assertGreater((truth[1] - plain).abs().max().item(), 100 * LOGITS_BOUND, "they learned")
                tp = ("--nproc", 2, "--parallelism.tensor_parallel_degree", 2)
                layouts = [("--nproc", 3), tp, ("--nproc", 1), (*tp, "--parallelism.sequence_parallel", "false")]
                if not FULL:
                    layouts = {"qwen3-fp32": layouts[:2], "phi4-mini-fp32": layouts[1:2],
                               "qwen3-next-fp32": layouts[1:2], "nemotron-h-fp32": layouts[1:2]}.get(name, layouts[2:])
                for layout in layouts:
                    self.expect_gradients(self.gradients(checkpoint, name, *layout), truth)

    def test_with_a_bf16_model_gradients_point_where_those_of_fp64_do(self):
        checkpoint = self.train(DATA / "qwen3-fp32")
        self.run_tessera("convert", checkpoint, "adapter")
        truth = self.truth(DATA / "qwen3-fp32", self.folder / "adapter", "qwen3-fp32")[2]
        found = self.gradients(checkpoint, "qwen3-fp32", "--precision.param_dtype", "bfloat16", "--nproc", 2)
        for name, expected in truth.items():
            ours = found[f"grad/{name}"].double().flatten()
            cosine = torch.nn.functional.cosine_similarity(ours, expected.flatten(), dim=0)
            self.assertLess(1 - cosine.item(), BFLOAT16_BOUND, name)

    def test_gemma4_with_adapters_in_text_tower_and_projector(self):
        targets = ("language_model.layers.*.self_attn.q_proj", "mlp.down_proj", "layers.0.self_attn.v_proj.linear",
                   "embedding_projection")
        checkpoint = self.train(DATA / "gemma4-fp32", targets=targets, data="gemma4-fp32")
        self.run_tessera("convert", checkpoint, "adapter")
        truth = self.truth(DATA / "gemma4-fp32", self.folder / "adapter", "gemma4-fp32")
        self.assertTrue(any("vision_tower" in name for name in truth[2]))
        self.expect_gradients(self.gradients(checkpoint, "gemma4-fp32", "--nproc", 2), truth)
        self.assertIn("images have no row and position",
                      self.train(DATA / "gemma4-fp32", "--lora.dropout", 0.1, targets=targets, data="gemma4-fp32",
                                 code=2))
        self.assertIn("which is no linear layer",
                      self.train(DATA / "gemma4-fp32", targets=("experts",), data="gemma4-fp32", code=2))

    def expect_experts_as_peft(self, name, targets, layouts):
        """Loss, logits and gradients of adapters of experts are peft's, and the merged model has our logits."""
        checkpoint = self.train(DATA / name, targets=targets, data=name, run=name)
        adapter = self.folder / f"{name}-adapter"
        self.run_tessera("convert", checkpoint, adapter, "--verify")
        loss, logits, gradients = self.truth(DATA / name, adapter, name)
        plain = self.base_model(DATA / name)(**self.batch(name)[0]).logits
        self.assertGreater((logits - plain).abs().max().item(), 100 * LOGITS_BOUND, "they learned")
        stored = load_file(adapter / "adapter_model.safetensors")
        self.assertEqual({key.removeprefix("base_model.model.") for key in stored}, gradients.keys())
        for layout in layouts:
            found = self.gradients(checkpoint, name, *layout)
            self.assertLess(abs(found["loss"].double() - loss).item(), LOSS_BOUND)
            self.assertLess((found["logits"].double() - logits).abs().max().item(), LOGITS_BOUND)
            ours = peft_names({key.removeprefix("grad/"): value.double() for key, value in found.items()
                               if key.startswith("grad/")}, name)
            self.assertEqual(ours.keys(), gradients.keys())
            for key, expected in gradients.items():
                self.assertGreater(expected.norm().item(), 0, key)
                self.assertLess(((ours[key] - expected).norm() / expected.norm()).item(), GRADIENT_BOUND, key)
        merged = self.folder / f"{name}-merged"
        self.run_tessera("convert", checkpoint, merged, "--merged", "--dtype", "float32", "--verify")
        with torch.no_grad():
            of_merged = self.base_model(merged)(**self.batch(name)[0]).logits
        self.assertLess((of_merged - logits).abs().max().item(), LOGITS_BOUND)
        return adapter

    def test_adapters_of_experts_are_those_of_peft_in_every_family(self):
        tp = ("--nproc", 2, "--parallelism.tensor_parallel_degree", 2)
        layouts = ((), ("--nproc", 2, "--parallelism.expert_parallel_degree", 2),
                   (*tp, "--parallelism.expert_tensor_parallel_degree", 2))
        for number, name in enumerate(("qwen3-moe-fp32", "gpt-oss-fp32", "deepseek-v2-fp32", "deepseek-v3-fp32",
                                       "glm4-moe-fp32", "mixtral-fp32", "llama4-text-fp32", "gemma4-fp32",
                                       "qwen3-next-fp32", "nemotron-h-fp32")):
            with self.subTest(name):
                first = "up_proj" if name.startswith("nemotron") else "gate_up_proj"
                self.expect_experts_as_peft(name, (f"experts.{first}", "experts.down_proj", "o_proj"),
                                            layouts if FULL else (layouts[number % len(layouts)],))

    def test_adapters_of_shared_experts_and_dense_mlps_stay_theirs_in_peft(self):
        """peft maps target_modules of these names to the routed experts of these families."""
        cases = (("qwen3-next-fp32", ("shared_expert.*_proj", "experts.*", "q_proj")),
                 ("deepseek-v3-fp32", ("layers.0.mlp.*_proj", "layers.1.*.shared_experts.down_proj", "o_proj")),
                 ("glm4-moe-fp32", ("gate_proj",)), ("deepseek-v2-fp32", ("up_proj", "experts.down_proj")),
                 ("kimi-k2-fp32", ("shared_experts.*", "mlp.down_proj")))
        for name, targets in cases if FULL else cases[:2]:
            with self.subTest(name):
                self.expect_experts_as_peft(name, targets, ((),))

    def test_dropout_of_shared_experts_is_refused_by_convert_before_it_writes(self):
        name = "qwen3-next-fp32"
        checkpoint = self.train(DATA / name, "--lora.dropout", 0.1, targets=("shared_expert.up_proj",), data=name)
        said = self.run_tessera("convert", checkpoint, "adapter", code=2)
        self.assertIn("found lora.dropout 0.1 with an adapter in model.layers.0.mlp.shared_expert.up_proj of a "
                      "qwen3_next model", said)
        self.assertIn("--merged", said)
        self.assertFalse((self.folder / "adapter").exists())

    def test_adapters_of_some_experts_alone(self):
        adapter = self.expect_experts_as_peft(
            "mixtral-fp32", ("layers.1.*.experts.gate_up_proj", "layers.2.*.experts.*"), ((),))
        config = json.loads((adapter / "adapter_config.json").read_text())
        self.assertEqual(config["target_modules"], [])
        self.assertEqual(config["target_parameters"],
                         ["model.layers.1.mlp.experts.gate_up_proj", "model.layers.2.mlp.experts.down_proj",
                          "model.layers.2.mlp.experts.gate_up_proj"])

    def test_files_of_experts_are_those_that_peft_writes(self):
        name = "qwen3-moe-fp32"
        self.run_tessera("convert", self.train(DATA / name, targets=("experts.*", "q_proj"), data=name), "adapter")
        model = peft.PeftModel.from_pretrained(self.base_model(DATA / name, torch.float32), self.folder / "adapter")
        model.save_pretrained(self.folder / "theirs")
        ours = load_file(self.folder / "adapter/adapter_model.safetensors")
        theirs = load_file(self.folder / "theirs/adapter_model.safetensors")
        self.assertEqual(ours.keys(), theirs.keys())
        for key, tensor in theirs.items():
            self.assertTrue(torch.equal(ours[key], tensor), key)
        config = json.loads((self.folder / "adapter/adapter_config.json").read_text())
        self.assertEqual(config["target_modules"], ["q_proj"])
        self.assertEqual(config["target_parameters"], ["experts.down_proj", "experts.gate_up_proj"])

    def test_steps_of_sgd_on_experts_are_those_of_peft(self):
        """From one step on, when B is no longer zero: three more of plain SGD on one batch."""
        name, rate = "qwen3-moe-fp32", 0.5
        inputs, labels = self.batch(name)
        data = self.folder / "batch.safetensors"
        save_file({"input_ids": inputs["input_ids"], "labels": labels.to(inputs["input_ids"].dtype)}, data)
        words = ("--data.path", f"['{data}']", "--optimizer.name", "SGD", "--optimizer.lr", rate, "--training.max_norm", 0,
                 "--checkpoint.interval", 1, "--checkpoint.keep_latest_k", 0, "--training.steps", 4,
                 "--parallelism.tensor_parallel_degree", 2, "--parallelism.expert_tensor_parallel_degree", 2)
        self.train(DATA / name, *words, targets=("experts.*",), data=name)
        adapters = []
        for step in (1, 4):
            self.run_tessera("convert", f"run/checkpoint/step-{step}", f"adapter-{step}")
            adapters.append(load_file(self.folder / f"adapter-{step}/adapter_model.safetensors"))
        model = peft.PeftModel.from_pretrained(self.base_model(DATA / name), self.folder / "adapter-1",
                                               is_trainable=True, autocast_adapter_dtype=False).double()
        optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=rate)
        for _ in range(3):
            optimizer.zero_grad()
            logits = model(**inputs).logits
            torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(),
                                              ignore_index=-100).backward()
            optimizer.step()
        theirs = peft.get_peft_model_state_dict(model)
        self.assertEqual(theirs.keys(), adapters[1].keys())
        for key, expected in theirs.items():
            moved = (expected - adapters[0][key]).norm()
            self.assertGreater(moved.item(), 0, key)
            self.assertLess(((adapters[1][key] - expected).norm() / moved).item(), STEPS_BOUND, key)

    def test_dropout_of_experts_is_refused(self):
        said = self.train(DATA / "qwen3-moe-fp32", "--lora.dropout", 0.1, targets=("experts.down_proj",), code=2,
                          data="qwen3-moe-fp32")
        self.assertIn("lora.dropout: found 0.1 with an adapter in model.layers.0.mlp.experts.down_proj", said)

    def test_the_files_are_those_that_peft_writes(self):
        checkpoint = self.train(DATA / "qwen3-fp32")
        self.run_tessera("convert", checkpoint, "adapter")
        model = peft.PeftModel.from_pretrained(self.base_model(DATA / "qwen3-fp32", torch.float32),
                                               self.folder / "adapter")
        model.save_pretrained(self.folder / "theirs")
        ours = load_file(self.folder / "adapter/adapter_model.safetensors")
        theirs = load_file(self.folder / "theirs/adapter_model.safetensors")
        self.assertEqual(ours.keys(), theirs.keys())
        for name, tensor in theirs.items():
            self.assertEqual(ours[name].dtype, torch.float32)
            self.assertTrue(torch.equal(ours[name], tensor), name)
        config = json.loads((self.folder / "adapter/adapter_config.json").read_text())
        saved = json.loads((self.folder / "theirs/adapter_config.json").read_text())
        for key, value in config.items():
            if key == "target_modules":
                self.assertEqual(set(value), set(saved[key]))
            else:
                self.assertEqual(value, saved[key], key)

    def test_short_names_where_they_mean_the_same(self):
        checkpoint = self.train(DATA / "qwen3-fp32", targets=("q_proj", "v_proj"))
        self.assertIn("for a checkpoint of adapters, expected none",
                      self.run_tessera("convert", checkpoint, "adapter", "--max-shard-size", "1MB", code=2))
        self.run_tessera("convert", checkpoint, "adapter")
        config = json.loads((self.folder / "adapter/adapter_config.json").read_text())
        self.assertEqual(config["target_modules"], ["q_proj", "v_proj"])

    def test_merged_is_a_model_of_the_files_dtypes_with_our_logits(self):
        for name in ("qwen3-fp32", "llama-mixed"):
            with self.subTest(name):
                checkpoint = self.train(DATA / name, run=name)
                inputs = self.batch(name)[0]
                self.run_tessera("convert", checkpoint, f"{name}-merged", "--merged", "--dtype", "float32")
                with torch.no_grad():
                    logits = self.base_model(self.folder / f"{name}-merged", torch.float32)(**inputs).logits
                ours = self.gradients(checkpoint, name)["logits"]
                self.assertLess((logits - ours).abs().max().item(), LOGITS_BOUND)
                # As written: each tensor in the dtype of the file, rounded once from that.
                self.run_tessera("convert", checkpoint, f"{name}-auto", "--merged")
                wide = load_file(self.folder / f"{name}-merged/model.safetensors")
                narrow = load_file(self.folder / f"{name}-auto/model.safetensors")
                base = load_file(DATA / name / "model.safetensors")
                self.assertEqual(narrow.keys(), base.keys())
                for tensor, value in base.items():
                    self.assertEqual(narrow[tensor].dtype, value.dtype, tensor)
                    self.assertTrue(torch.equal(narrow[tensor], wide[tensor].to(value.dtype)), tensor)
                changed = {tensor for tensor in base if not torch.equal(base[tensor].float(), wide[tensor])}
                self.assertEqual(len(changed), self.adapted_layers(name))

    def test_merged_has_the_weights_that_peft_merges(self):
        checkpoint = self.train(DATA / "qwen3-fp32")
        self.run_tessera("convert", checkpoint, "adapter")
        self.run_tessera("convert", checkpoint, "merged", "--merged")
        theirs = peft.PeftModel.from_pretrained(self.base_model(DATA / "qwen3-fp32", torch.float32),
                                                self.folder / "adapter").merge_and_unload().state_dict()
        for name, tensor in load_file(self.folder / "merged/model.safetensors").items():
            # A product of four terms and a sum: within four roundings of the largest.
            bound = 4 * 2**-24 * tensor.abs().max().item()
            self.assertLessEqual((tensor - theirs[name]).abs().max().item(), bound, name)

    def test_the_contract_says_why(self):
        self.train(DATA / "qwen3-mixed")
        shown = self.run_tessera("inspect", "--contract", "run.toml", "--json")
        parameters = {each["name"]: each for each in json.loads(shown)["parameters"]}
        layer = "model.layers.0.self_attn.q_proj"
        base, adapter = parameters[f"{layer}.weight"], parameters[f"{layer}.lora_A.weight"]
        self.assertEqual(base["storage"], {"value": "bfloat16", "reason": "[lora] base: as compute"})
        self.assertEqual(base["trainable"], {"value": False, "reason": "[lora] base"})
        self.assertEqual(adapter["storage"]["value"], "float32")
        self.assertEqual(adapter["compute"]["value"], "float32")
        self.assertEqual(adapter["final"]["value"], "float32")
        self.assertIn("[lora] adapter", adapter["storage"]["reason"])
        norm = parameters["model.layers.0.input_layernorm.weight"]  # recorded by the mixed file
        self.assertEqual((norm["storage"]["value"], norm["compute"]["value"]), ("float32", "float32"))

    def test_generate_reads_a_checkpoint_of_adapters(self):
        checkpoint = self.train(DATA / "qwen3-fp32")
        self.run_tessera("convert", checkpoint, "merged", "--merged")
        words = ("--prompt-tokens", "1,2,3", "--max-new-tokens", "8")
        found = self.run_tessera("generate", "--model", checkpoint, *words)
        self.assertEqual(found, self.run_tessera("generate", "--model", "merged", *words))
        self.assertNotEqual(found, self.run_tessera("generate", "--model", DATA / "qwen3-fp32", *words))

    def test_the_checkpoint_holds_the_adapters_alone(self):
        checkpoint = self.train(DATA / "qwen3-fp32")
        elements = 0
        names = set()
        for path in checkpoint.glob("rank_*.safetensors"):
            with safe_open(path, "pt") as file:
                for name in file.keys():
                    names.add(name.split("/")[-1])
                    if not name.startswith("optim/step/"):
                        elements += file.get_tensor(name).numel()
        self.assertEqual(len(names), 2 * self.adapted_layers("qwen3-fp32"))
        self.assertTrue(all(".lora_" in name for name in names))
        adapters = sum(parameter.numel() for parameter in load_file(self.adapter_of(checkpoint)).values())
        self.assertEqual(elements, 3 * adapters)  # the adapters and two moments of each
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        self.assertEqual(manifest["model_path"], str(DATA / "qwen3-fp32"))
        self.assertEqual(manifest["lora"]["rank"], RANK)
        self.assertEqual(manifest["lora"]["alpha"], ALPHA)

    def adapter_of(self, checkpoint):
        self.run_tessera("convert", checkpoint, "adapter")
        return self.folder / "adapter/adapter_model.safetensors"

    def test_another_base_is_refused_wherever_it_would_be_used(self):
        base = self.folder / "base"
        self.run_tessera("convert", DATA / "qwen3-fp32", base)
        checkpoint = self.train(base)
        weights = load_file(base / "model.safetensors")
        name = "model.layers.0.mlp.up_proj.weight"
        weights[name][3, 5] += 1e-3  # not even an adapted one
        save_file(weights, base / "model.safetensors", {"format": "pt"})
        for words in (("convert", checkpoint, "merged", "--merged"),
                      ("generate", "--model", checkpoint, "--prompt-tokens", "1", "--max-new-tokens", "1"),
                      ("gradients", "--model", checkpoint, "--batch", DATA / "qwen3-fp32/reference.safetensors",
                       "--out", "g.safetensors")):
            self.assertIn("of the model that the adapters", self.run_tessera(*words, code=2))
        self.assertIn("model.path: found tensors with the hash",
                      self.train(base, "--training.steps", "5", code=2))

    def test_what_cannot_be_trained_says_which_key(self):
        base = DATA / "qwen3-fp32"
        for targets, message in (
                (("q_prj",), "lora.targets: found the pattern 'q_prj', which matches nothing (nearest name:"),
                (("q_norm",), "which is no linear layer"),
                ((), "lora.targets: found nothing")):
            self.assertIn(message, self.train(base, targets=targets, code=2))
        self.assertIn("lora.rank: found 4096, expected at most", self.train(base, "--lora.rank", 4096, code=2))
        self.assertIn("model.freeze: found a list with lora.rank",
                      self.train(base, "--model.freeze", "[]", code=2))
        tied = next(f for f in ("llama-mixed", "llama-fp32", "qwen3-mixed") if json.loads(
            (DATA / f / "config.json").read_text()).get("tie_word_embeddings"))
        self.assertIn("tied to model.embed_tokens.weight", self.train(DATA / tied, targets=("lm_head",), code=2))
        checkpoint = self.train(base)
        text = (self.folder / "run.toml").read_text()
        (self.folder / "plain.toml").write_text(text[:text.index("[lora]")])
        self.assertIn("a checkpoint of adapters, expected a whole model",
                      self.run_tessera("train", "plain.toml", "--model.path", checkpoint, code=2))
        self.assertIn("--merged: found", self.run_tessera("convert", base, "merged", "--merged", code=2))


if __name__ == "__main__":
    unittest.main()
