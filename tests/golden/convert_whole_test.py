#!/usr/bin/env python3
"""What `tessera convert` writes of models of more than text: whole (Gemma 4), or the text model of them.

Run by ctest with TESSERA_PROGRAM and TESSERA_TEST_DATA; leaves with 77 (skipped) where `transformers` is missing, as
with TESSERA_TORCH.
"""

import json
import os
import subprocess
import unittest

from convert_test import DATA, FLOAT32, FULL, LOGITS_BOUND, Program, load_file, torch, transformers
from safetensors.torch import save_file


class ConvertGemma4(Program):
    """Images and stored buffers: other inputs, another class of transformers."""

    def logits_with_images(self, folder, batch):
        model = transformers.Gemma4ForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager")
        model.train()  # as the reference: masks come from the token types
        keys = ("input_ids", "pixel_values", "image_position_ids", "mm_token_type_ids")
        with torch.no_grad():
            return model(**{key: batch[key] for key in keys}).logits

    def test_a_folder_comes_out_with_the_same_bytes_and_config(self):
        for name in ("gemma4-fp32", "gemma4-mixed"):
            with self.subTest(name):
                out = self.folder / name
                self.run_tessera("convert", DATA / name, out, "--max-shard-size", "60KB")
                self.assertSameBits({k: v[0] for k, v in self.tensors(out).items()},
                                    {k: v[0] for k, v in self.tensors(DATA / name).items()})
                original = transformers.AutoConfig.from_pretrained(DATA / name).to_dict()
                written = transformers.AutoConfig.from_pretrained(out).to_dict()
                for config in (original, written):
                    config.pop("_name_or_path", None), config.pop("transformers_version", None)
                self.assertEqual(written, original)

    def test_a_trained_checkpoint_gives_transformers_the_same_logits(self):
        source = DATA / "gemma4-mixed"
        batch = source / "reference.safetensors"
        checkpoint = self.train(f'path = "{source}"', f'"{batch}"', *FLOAT32)
        self.run_tessera("convert", checkpoint, "out", "--dtype", "float32")
        ours = self.gradients(checkpoint, batch, *FLOAT32)
        self.assertSameBits(self.gradients(self.folder / "out", batch, *FLOAT32), ours)
        found = self.logits_with_images(self.folder / "out", load_file(batch))
        self.assertLess((found - ours["logits"]).abs().max(), LOGITS_BOUND)
        before = {k: v[0].float() for k, v in self.tensors(source).items()}
        after = {k: v[0] for k, v in self.tensors(self.folder / "out").items()}
        self.assertEqual(before.keys(), after.keys())
        still = {k for k in before if torch.equal(before[k], after[k])}
        self.assertTrue({k for k in before if k.startswith("model.vision_tower.")} <= still)
        self.assertTrue({k for k in before if k.endswith("layer_scalar")} <= still)
        self.assertFalse(any("language_model" in k and k.endswith("proj.weight") for k in still))

    def test_text_is_written_as_transformers_writes_it(self):
        model = transformers.Gemma4ForConditionalGeneration.from_pretrained(
            DATA / "gemma4-fp32", dtype=torch.float32, attn_implementation="eager").eval()
        batch = load_file(DATA / "gemma4-fp32" / "reference.safetensors")
        words = batch["input_ids"][batch["mm_token_type_ids"] == 0]
        for length in (6, 20, 1) if FULL else (6, 20):  # within its window, and beyond
            prompt = words[length:2 * length].unsqueeze(0)
            expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                                      max_new_tokens=16)[0, length:].tolist()
            found = self.run_tessera(
                "generate", "--model", DATA / "gemma4-fp32", "--max-new-tokens", "16", "--prompt-tokens",
                ",".join(str(token) for token in prompt[0].tolist()))
            self.assertEqual([int(token) for token in found.strip().split(",")], expected)


class ConvertGemma3(Program):
    """A folder of the whole model: its text model comes out."""

    def whole_folder(self, name, prefix):
        """The text model's tensors under names of the whole one, with some of a vision tower."""
        folder = self.folder / name
        folder.mkdir()
        source = DATA / "gemma3-text-fp32"
        tensors = {prefix(key): tensor for key, tensor in load_file(source / "model.safetensors").items()}
        inner = "model." if any(key.startswith("model.language_model.") for key in tensors) else ""
        tensors[f"{inner}vision_tower.vision_model.post_layernorm.weight"] = torch.ones(4)
        tensors[f"{inner}multi_modal_projector.mm_soft_emb_norm.weight"] = torch.ones(4)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        text = json.loads((source / "config.hub.json").read_text())
        text.pop("architectures")
        dtype = text.pop("torch_dtype")
        (folder / "config.json").write_text(json.dumps({
            "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text,
            "vision_config": {"hidden_size": 4}, "mm_tokens_per_image": 4, "image_token_index": 5,
            "torch_dtype": dtype}))
        return folder

    def test_a_folder_of_the_whole_model_gives_its_text_model(self):
        source = DATA / "gemma3-text-fp32"
        batch = source / "reference.safetensors"
        for name, prefix in (("published", lambda key: f"language_model.{key}"),
                             ("inside", lambda key: key.replace("model.", "model.language_model.", 1))):
            with self.subTest(name):
                folder, out = self.whole_folder(name, prefix), self.folder / f"{name}-out"
                done = subprocess.run([os.environ["TESSERA_PROGRAM"], "convert", folder, out], capture_output=True,
                                      text=True, cwd=self.folder)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertIn("2 tensors are left out", done.stderr)
                self.assertIn("multi_modal_projector", done.stderr)
                self.assertSameBits(load_file(out / "model.safetensors"), load_file(source / "model.safetensors"))
                self.assertEqual(json.loads((out / "config.json").read_text())["architectures"], ["Gemma3ForCausalLM"])
                self.assertSameBits(self.gradients(folder, batch, *FLOAT32), self.gradients(source, batch, *FLOAT32))
                found = self.logits_of_transformers(out, load_file(batch)["input_ids"])
                self.assertLess((found - load_file(batch)["logits"]).abs().max(), LOGITS_BOUND)

    def test_the_whole_folder_comes_back_where_it_is_asked_for(self):
        source = self.whole_folder("published", lambda key: f"language_model.{key}")
        checkpoint = self.train(f'path = "{source}"', f'"{DATA / "gemma3-text-fp32" / "reference.safetensors"}"')
        self.run_tessera("convert", checkpoint, "out", "--whole", "--verify")
        before, after = self.tensors(source), self.tensors(self.folder / "out")
        self.assertEqual(before.keys(), after.keys())
        for name in before:
            is_text = name.startswith("language_model.")
            self.assertEqual(torch.equal(before[name][0], after[name][0]), not is_text, name)
        self.assertEqual(json.loads((self.folder / "out/config.json").read_text()),
                         json.loads((source / "config.json").read_text()))
        said = self.run_tessera("convert", DATA / "llama-fp32", "other", "--whole", code=2)
        self.assertIn("--whole: found LlamaForCausalLM, which is all of its model", said)
        said = self.run_tessera("convert", DATA / "gemma3-text-fp32", "other", "--whole", code=2)
        self.assertIn("which has the text model alone", said)


class ConvertQwen3Vl(Program):
    """A folder of Qwen3-VL, written by transformers with random weights: its text model is a Qwen3, on text alone."""

    TEXT = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True,
                                "mrope_section": [2, 2, 2]}}
    VISION = {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4,
              "out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}

    def whole_model(self, **changes):
        torch.manual_seed(7)
        config = transformers.Qwen3VLConfig(text_config={**self.TEXT}, vision_config={**self.VISION},
                                            image_token_id=60, video_token_id=61, vision_start_token_id=62,
                                            vision_end_token_id=63, **changes)
        model = transformers.Qwen3VLForConditionalGeneration._from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter) if "norm" in name else
                                0.3 * torch.randn_like(parameter))
        return model.train()

    def write(self, model, name):
        """The model's folder, and a batch of text."""
        folder = self.folder / name
        model.save_pretrained(folder)
        ids = torch.randint(0, 60, (2, 24), generator=torch.Generator().manual_seed(3))
        labels = ids.masked_fill(torch.arange(24) < 4, -100)
        steps = {f"steps/{key}": tensor.expand(3, 2, 24).contiguous() for key, tensor in
                 (("input_ids", ids), ("labels", labels))}
        save_file({"input_ids": ids, "labels": labels, **steps}, self.folder / "batch.safetensors")
        return folder, ids, labels

    def test_loss_logits_and_every_gradient_of_the_text_model_are_those_of_transformers(self):
        for name, tied in (("untied", False), ("tied", True)):
            with self.subTest(name):
                model = self.whole_model(tie_word_embeddings=tied)
                source, ids, labels = self.write(model, name)
                ours = self.gradients(source, self.folder / "batch.safetensors", *FLOAT32)
                result = model(input_ids=ids, labels=labels)
                result.loss.backward()
                self.assertLess(abs(float(ours["loss"]) - result.loss.item()), 5e-6)
                self.assertGreater(result.logits.std(), 0.3, "logits that say something")
                self.assertLess((ours["logits"] - result.logits).abs().max(), LOGITS_BOUND)
                seen = {f'grad/{key.replace("model.language_model.", "model.", 1)}': parameter.grad
                        for key, parameter in model.named_parameters() if not key.startswith("model.visual.")}
                self.assertEqual({key for key in ours if key.startswith("grad/")}, seen.keys())
                for key, expected in seen.items():
                    self.assertLess(((ours[key] - expected).norm() / expected.norm()).item(), 5e-5, key)

    def test_published_spelling_is_read_as_the_same(self):
        source, _, _ = self.write(self.whole_model(tie_word_embeddings=False), "written")
        expected = self.gradients(source, self.folder / "batch.safetensors", *FLOAT32)
        config = json.loads((source / "config.json").read_text())
        text = config["text_config"]
        record = text.pop("rope_parameters")
        text["rope_theta"] = record.pop("rope_theta")
        text["rope_scaling"] = record
        (source / "config.json").write_text(json.dumps(config))
        self.assertSameBits(self.gradients(source, self.folder / "batch.safetensors", *FLOAT32), expected)
        for key, value in (("model_type", "qwen3_vl_moe_text"), ("hidden_act", "gelu")):
            (source / "config.json").write_text(json.dumps({**config, "text_config": {**text, key: value}}))
            self.assertIn(f"{key}: found", self.run_tessera("convert", source, "refused", code=2))

    def test_a_trained_text_model_is_a_qwen3_or_stands_in_its_folder_again(self):
        source, ids, _ = self.write(self.whole_model(tie_word_embeddings=False), "vl")
        checkpoint = self.train(f'path = "{source}"', f'"{self.folder / "batch.safetensors"}"', *FLOAT32)
        ours = self.gradients(checkpoint, self.folder / "batch.safetensors", *FLOAT32)["logits"]
        self.run_tessera("convert", checkpoint, "text")
        self.assertEqual(json.loads((self.folder / "text/config.json").read_text())["architectures"],
                         ["Qwen3ForCausalLM"])
        self.assertLess((self.logits_of_transformers(self.folder / "text", ids) - ours).abs().max(), LOGITS_BOUND)
        self.run_tessera("convert", checkpoint, "whole", "--whole", "--max-shard-size", "60KB", "--verify")
        model, about = transformers.Qwen3VLForConditionalGeneration.from_pretrained(
            self.folder / "whole", dtype=torch.float32, output_loading_info=True)
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            self.assertFalse(about[kind], kind)
        with torch.no_grad():
            self.assertLess((model.eval()(input_ids=ids).logits - ours).abs().max(), LOGITS_BOUND)
        before, after = self.tensors(source), self.tensors(self.folder / "whole")
        self.assertEqual(before.keys(), after.keys())
        same = {name for name in before if torch.equal(before[name][0], after[name][0])}
        self.assertEqual(same, {name for name in before if name.startswith("model.visual.")})


if __name__ == "__main__":
    unittest.main(verbosity=1)
