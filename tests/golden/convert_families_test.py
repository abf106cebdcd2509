#!/usr/bin/env python3
"""A config.json that `tessera convert` writes is read by transformers, which computes the logits that Tessera does:
for every family of the registry, from a config alone, trained, in the published spelling and with keys turned to
other values than the reference folders have. With TESSERA_FULL=1 (`scripts/full families`) all of these values and every
family without them (here a third), and every reference folder, trained. Gemma 4's experts evened out: what a run says of them is what transformers' routers say.

Run by ctest with TESSERA_PROGRAM and TESSERA_TEST_DATA; leaves with 77 (skipped) where `transformers` is
missing, as with TESSERA_TORCH.
"""

import json
import os
import pathlib
import re
import shutil
import unittest

import convert_test
import convert_whole_test
from convert_test import (DATA, FLOAT32, FULL, GROUP_LOGITS_BOUND, LOGITS_BOUND, Program, in_turn, load_file, torch,
                          transformers)

ROOT = pathlib.Path(__file__).resolve().parents[2]
# One folder a family, and what else its config.json can say.
FAMILIES = {
    "qwen3": [{"tie_word_embeddings": True, "attention_bias": False, "num_key_value_heads": 4}],
    "llama": [{"tie_word_embeddings": False, "rope_scaling": None, "num_key_value_heads": 1}],
    "gemma4": [],
    "qwen3-moe": [{"norm_topk_prob": False, "decoder_sparse_step": 2}, {"mlp_only_layers": [1, 2]}],
    "gpt-oss": [{"sliding_window": 3, "layer_types": ["full_attention", "full_attention", "sliding_attention",
                                                      "full_attention"]}],
    "deepseek-v2": [{"first_k_dense_replace": 2, "n_shared_experts": 1, "q_lora_rank": 20}],
    "qwen2": [{"use_sliding_window": True, "max_window_layers": 2}, {"tie_word_embeddings": True}],
    "mistral": [{"sliding_window": None}],
    "deepseek-v3": [{"q_lora_rank": None, "n_shared_experts": 2}, {"n_group": 1, "topk_group": 1},
                    {"norm_topk_prob": False, "first_k_dense_replace": 0}],
    "glm4-moe": [{"use_qk_norm": False, "attention_bias": False}, {"n_group": 2, "topk_group": 1},
                 {"partial_rotary_factor": 1.0}],
    "llama4-text": [{"no_rope_layers": [1, 0, 1, 0], "attention_chunk_size": 5},
                    {"use_qk_norm": False, "attn_temperature_tuning": False},
                    {"interleave_moe_layer_step": 1, "moe_layers": [0, 1, 2, 3], "num_experts_per_tok": 2},
                    {"rope_scaling": None}],
    "mixtral": [{"sliding_window": 5}, {"num_experts_per_tok": 1}],
    "olmo2": [{"attention_bias": True}, {"num_key_value_heads": 4, "rope_theta": 100.0}],
    "gemma3-text": [{"sliding_window_pattern": 2, "sliding_window": 3}, {"rope_scaling": None},
                    {"query_pre_attn_scalar": 8}],
    "gpt2": [{"n_inner": 40}, {"layer_norm_epsilon": 1e-3}],
    "granite": [{"residual_multiplier": 0.5, "logits_scaling": 3.0}, {"attention_bias": True, "mlp_bias": True},
                {"embedding_multiplier": 2.0, "attention_multiplier": 0.3, "tie_word_embeddings": False}],
    "phi3": [{"sliding_window": None, "num_key_value_heads": 2, "tie_word_embeddings": True},
             {"partial_rotary_factor": 0.5, "max_position_embeddings": 64, "original_max_position_embeddings": 32,
              "rope_scaling": {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}}],
    "kimi-k2": [{"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}],
    "qwen3-next": [{"full_attention_interval": 3, "linear_num_value_heads": 2, "partial_rotary_factor": 0.5},
                   {"decoder_sparse_step": 2, "norm_topk_prob": False, "linear_conv_kernel_dim": 2, "attention_bias": True},
                   {"mlp_only_layers": [1], "shared_expert_intermediate_size": 8, "tie_word_embeddings": True}],
    "qwen3-5-text": [{"full_attention_interval": 3, "linear_num_value_heads": 2, "tie_word_embeddings": False},
                     {"linear_conv_kernel_dim": 2, "num_key_value_heads": 4}],
    "nemotron-h": [{"hybrid_override_pattern": "E*MM", "num_hidden_layers": 4, "n_groups": 4, "norm_topk_prob": False},
                   {"hybrid_override_pattern": "M-*M-", "use_conv_bias": False, "time_step_min": 0.05}],
    "smollm3": [{"no_rope_layers": [0, 1, 0, 1], "tie_word_embeddings": False},
                {"use_sliding_window": True, "sliding_window": 5, "layer_types": None}],
}
# Wide enough that a detail of the model shows in its logits; published ones begin with 0.02.
DRAWN = {"initializer_range": 0.25}
# Gated norms divide by what is read of a state, next to nothing in places. With this eps transformers' own fp32 logits of
# drawn models are up to 8e-5 from those in fp64, ours 1.3e-5; with the published 1e-6 3.3e-4 and 4.2e-5.
EPS = {"qwen3-next": {"rms_norm_eps": 1e-2}, "qwen3-5-text": {"rms_norm_eps": 1e-2}}
STATES_LOGITS_BOUND = 2e-4
# Granite divides its logits by logits_scaling.
LEAST_SPREAD = {"granite": 0.1, "granite-fp32": 0.1, "granite-mixed": 0.1}


class Families(Program):
    def logits(self, folder, name, batch):
        if name.startswith("gemma4"):
            return convert_whole_test.ConvertGemma4.logits_with_images(self, folder, batch)
        return self.logits_of_transformers(folder, batch["input_ids"])

    def train_step(self, model, name, has_experts=True):
        """A step that moves every parameter, and the routers' stored biases."""
        has_biases = has_experts and name in ("deepseek-v3", "glm4-moe", "kimi-k2", "nemotron-h")
        words = ("--model.load_balance_coeff", "0.05") if has_biases else ()
        batch = DATA / f"{name}-fp32" / "reference.safetensors"
        return self.train(model, f'"{batch}"', *FLOAT32, *words, steps=1, ranks=1)

    def check(self, name, batch, checkpoint):
        """Trained, exported, read by transformers: its logits are ours."""
        out = self.folder / "out"
        self.run_tessera("convert", checkpoint, out, "--dtype", "float32")
        ours = self.gradients(checkpoint, batch, *FLOAT32)["logits"]
        self.assertGreater(ours.std(), LEAST_SPREAD.get(name, 0.3), "logits that say something")
        bound = STATES_LOGITS_BOUND if name in EPS else GROUP_LOGITS_BOUND if "group" in name else LOGITS_BOUND
        # That of logits of the size that the references have, between 5 and 10.
        bound *= max(1.0, float(ours.abs().max()) / 8)
        found = self.logits(out, name, load_file(batch))
        self.assertLess(float((found - ours).abs().max()), bound)

    def check_drawn(self, name, changes):
        config = json.loads((DATA / f"{name}-fp32" / "config.hub.json").read_text())
        config.get("text_config", config).update({**DRAWN, **EPS.get(name, {}), **changes})
        (self.folder / "model.json").write_text(json.dumps(config))
        try:
            self.check(name, DATA / f"{name}-fp32" / "reference.safetensors",
                       self.train_step('config = "model.json"', name,
                                       has_experts="E" in changes.get("hybrid_override_pattern", "E")))
        finally:
            self.remove_made()

    def remove_made(self):
        for made in ("run", "out"):
            shutil.rmtree(self.folder / made, ignore_errors=True)

    def test_every_family_of_the_registry_is_here(self):
        registry = re.findall(r"^TESSERA_FAMILY\(\w+, (\w+), \w+\)", (ROOT / "src/models/families.def").read_text(),
                              flags=re.M)
        architectures = {re.search(r'\.architecture = "(\w+)"', (ROOT / f"src/models/{name}/{name}.cpp").read_text())[1]
                         for name in registry}
        here = {json.loads((DATA / f"{name}-fp32" / "config.json").read_text())["architectures"][0] for name in FAMILIES}
        self.assertEqual(here, architectures)

    def test_a_model_of_a_config_alone_is_the_same_in_transformers(self):
        for name in in_turn(list(FAMILIES), 3, 2):  # with the one that has no other values
            with self.subTest(name):
                self.check_drawn(name, {})

    def test_other_values_of_keys_are_written_as_transformers_reads_them(self):
        for name, variants in FAMILIES.items():
            for changes in variants if FULL else variants[:1]:
                with self.subTest(name, **changes):
                    self.check_drawn(name, changes)

    @unittest.skipUnless(FULL, "scripts/full families")
    def test_every_reference_folder_that_was_trained_is_the_same_in_transformers(self):
        for folder in sorted(DATA.glob("*/reference.safetensors")):
            name = folder.parent.name
            with self.subTest(name):
                try:
                    checkpoint = self.train(f'path = "{folder.parent}"', f'"{folder}"', *FLOAT32)
                    self.check(name, folder, checkpoint)
                finally:
                    self.remove_made()


class BalancedGemma4(Program):
    """transformers has neither an auxiliary loss nor biases for this family: its routers say what they see."""

    RATE = 0.01

    def routed(self, source):
        """Of step 1's batch, by layer: probabilities [tokens, experts], chosen [tokens, k]."""
        batch = load_file(source / "reference.safetensors")
        inputs = {key: batch[f"steps/{key}"][0] for key in ("input_ids", "mm_token_type_ids")}
        inputs |= {key: batch[key] for key in ("pixel_values", "image_position_ids")}
        model = transformers.Gemma4ForConditionalGeneration.from_pretrained(
            source, dtype=torch.float32, attn_implementation="eager")
        model.train()  # as the reference: masks come from the token types
        seen = []
        for name, module in model.named_modules():
            if name.endswith(".router"):
                module.register_forward_hook(lambda module, args, result: seen.append((result[0], result[2])))
        with torch.no_grad():
            model(**inputs)
        return seen

    def test_the_auxiliary_loss_and_the_biases_are_those_of_transformers_routers(self):
        source = DATA / "gemma4-fp32"
        seen = self.routed(source)
        self.assertEqual(len(seen), 4)
        experts = seen[0][0].shape[1]
        counts = [torch.bincount(chosen.flatten(), minlength=experts).double() for _, chosen in seen]
        rows = sum(chosen.shape[0] for _, chosen in seen)  # of all layers
        mean = sum(probabilities.double().sum(0) for probabilities, _ in seen) / rows
        wanted = float(experts * (sum(counts) / rows * mean).sum())
        # Each time both rows in one micro-batch, whose loss it is.
        for layout in ((), ("--parallelism.tensor_parallel_degree", "2", "--parallelism.expert_parallel_degree", "2",
                            "--training.local_batch_size", "2")):
            with self.subTest(" ".join(layout)):
                checkpoint = self.train(f'path = "{source}"', f'"{source / "reference.safetensors"}"', *FLOAT32, *layout,
                                        "--model.aux_loss_coef", "0.5", "--model.load_balance_coeff", self.RATE, steps=1)
                line = json.loads((self.folder / "run/metrics/metrics.jsonl").read_text().splitlines()[0])
                self.assertAlmostEqual(line["aux_loss"], wanted, delta=5e-6)  # as the reference's losses
                saved = {}
                for rank in (0, 1):
                    saved |= load_file(checkpoint / f"rank_{rank}.safetensors")
                for layer, of_layer in enumerate(counts):
                    load = f"moe/load_max_over_mean/{layer}"
                    self.assertAlmostEqual(line[load], float(of_layer.max() / of_layer.mean()), delta=1e-9)
                    change = torch.sign(of_layer.mean() - of_layer) * self.RATE
                    [bias] = [tensor for name, tensor in saved.items() if f"layers.{layer}.router.expert_bias" in name]
                    self.assertEqual(bias.dtype, torch.float32)
                    self.assertLess(float((bias.view(-1) - (change - change.mean())).abs().max()), 1e-8)
                said = self.run_tessera_says("convert", checkpoint, self.folder / "out")
                self.assertIn("model.load_balance_coeff", said)
                names = self.tensors(self.folder / "out").keys()
                self.assertEqual(names, self.tensors(source).keys())
                for made in ("run", "out"):
                    shutil.rmtree(self.folder / made)

    def run_tessera_says(self, *words):
        """What a run that ends well says on stderr."""
        done = convert_test.subprocess.run([os.environ["TESSERA_PROGRAM"], *map(str, words)], capture_output=True,
                                           text=True, cwd=self.folder, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stderr


class ConvertGpt2(Program):
    """Stored masks, and a prefix that only some files have."""

    def weights(self, folder):
        return {name: tensor for name, (tensor, _) in self.tensors(folder).items() if not name.endswith(".attn.bias")}

    def test_a_folder_comes_out_without_its_masks_and_transformers_computes_the_same(self):
        for name in ("gpt2-fp32", "gpt2-mixed"):
            with self.subTest(name):
                source, out = DATA / name, self.folder / name
                self.run_tessera("convert", source, out, "--max-shard-size", "60KB")
                self.assertSameBits({key: pair[0] for key, pair in self.tensors(out).items()}, self.weights(source))
                batch = load_file(source / "reference.safetensors")
                found = self.logits_of_transformers(out, batch["input_ids"])
                self.assertLess((found - batch["logits"]).abs().max(), LOGITS_BOUND)
                original = transformers.AutoConfig.from_pretrained(source).to_dict()
                written = transformers.AutoConfig.from_pretrained(out).to_dict()
                for config in (original, written):
                    for key in ("_name_or_path", "transformers_version", "n_ctx"):
                        config.pop(key, None)
                self.assertEqual(written, original)

    def test_names_with_the_prefix_of_the_whole_model_load_too(self):
        from safetensors.torch import save_file
        source, folder = DATA / "gpt2-fp32", self.folder / "prefixed"
        folder.mkdir()
        tensors = load_file(source / "model.safetensors")
        save_file({f"transformer.{key}": tensor for key, tensor in tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_bytes((source / "config.hub.json").read_bytes())
        batch = source / "reference.safetensors"
        self.assertSameBits(self.gradients(folder, batch, *FLOAT32), self.gradients(source, batch, *FLOAT32))
        save_file({**tensors, "transformer.wte.weight": tensors["wte.weight"].clone()}, folder / "model.safetensors")
        self.assertIn("'transformer.wte.weight' and 'wte.weight'", self.run_tessera(
            "gradients", "--model", folder, "--batch", batch, "--out", "x.safetensors", code=2))

    def test_a_trained_checkpoint_gives_transformers_the_same_logits(self):
        source = DATA / "gpt2-mixed"
        batch = source / "reference.safetensors"
        checkpoint = self.train(f'path = "{source}"', f'"{batch}"', *FLOAT32)
        self.run_tessera("convert", checkpoint, "out", "--dtype", "float32")
        ours = self.gradients(checkpoint, batch, *FLOAT32)
        self.assertSameBits(self.gradients(self.folder / "out", batch, *FLOAT32), ours)
        found = self.logits_of_transformers(self.folder / "out", load_file(batch)["input_ids"])
        self.assertLess((found - ours["logits"]).abs().max(), LOGITS_BOUND)
        words = ("--prompt-tokens", "5,6,7", "--max-new-tokens", "8")
        self.assertEqual(self.run_tessera("generate", "--model", checkpoint, *words),
                         self.run_tessera("generate", "--model", "out", *words))


if __name__ == "__main__":
    unittest.main(verbosity=1)
