// The manifest as a value: its text, its own hash, and everything that it must not say.
#include "io/checkpoint_manifest.h"

#include <cmath>
#include <limits>

#include "support/temporary_folder.h"
#include "unit/io/checkpoint_cases.h"

namespace tessera::checkpoint_manifest_test {
namespace {

using testing::Random;
using testing::random_manifest;

/// One tensor [4, 6] of two files: the left half in two pieces, the right half in one. Version 1.
CheckpointManifest small_manifest() {
  CheckpointManifest manifest;
  manifest.format = 1;
  manifest.step = 3;
  manifest.files["a.safetensors"] = {};
  manifest.files["b.safetensors"] = {};
  const TensorBox left{{0, 0}, {4, 3}};
  const TensorBox right{{0, 3}, {4, 3}};
  manifest.tensors["model/w"] = {DType::kFloat32,
                                 {4, 6},
                                 std::nullopt,
                                 {{"a.safetensors", "w", left, 0, 5},
                                  {"b.safetensors", "w", left, 5, 12},
                                  {"b.safetensors", "x", right, 0, 12}}};
  return manifest;
}

/// The same as ranks write it.
CheckpointManifest version_2() {
  auto manifest = small_manifest();
  manifest.format = 2;
  manifest.files = {{rank_file(0), {}}, {rank_file(12), {}}};
  auto& pieces = manifest.tensors["model/w"].pieces;
  pieces[0].file = rank_file(0);
  pieces[1].file = pieces[2].file = rank_file(12);
  pieces[0].key = pieces[1].key = "model/w";
  pieces[2].key = "model/w#2";
  return manifest;
}

TEST(CheckpointManifest, TextAndValueAreTheSameThing) {
  Random random(1);
  for (int i = 0; i < 300; ++i) {
    auto manifest = random_manifest(random);
    if (manifest.format > 1) {
      const auto texts = texts_of(manifest);
      check_manifest_hash(texts.manifest, "x");
      const auto found = testing::parsed(texts);
      manifest.blocks = found.blocks;
      const std::string file(kTensorsFile);
      manifest.files[file] = found.files.at(file);
      EXPECT_EQ(found, manifest);
      continue;
    }
    const auto text = to_json(manifest);
    check_manifest_hash(text, "x");
    EXPECT_EQ(parse_checkpoint_manifest(text, "x"), manifest);
  }
}

TEST(CheckpointManifest, EveryFlippedBitOfTheTextIsFound) {
  const auto text = to_json(small_manifest());
  for (std::size_t i = 0; i < 8 * text.size(); ++i) {
    auto flipped = text;
    flipped[i / 8] = static_cast<char>(flipped[i / 8] ^ (1 << (i % 8)));
    EXPECT_THROW(check_manifest_hash(flipped, "x"), Error) << "bit " << i;
  }
  for (std::size_t length = 0; length < text.size(); ++length) {
    EXPECT_THROW(check_manifest_hash(text.substr(0, length), "x"), Error) << length;
  }
}

TEST(CheckpointManifest, ElementsWithoutAPieceAndElementsWithTwoAreFound) {
  Random random(2);
  int broken = 0;
  for (int i = 0; i < 300; ++i) {
    const auto manifest = random_manifest(random);
    for (const auto& [name, tensor] : manifest.tensors) {
      for (std::size_t p = 0; p < tensor.pieces.size(); ++p) {
        auto changed = manifest;
        auto& pieces = changed.tensors[name].pieces;
        switch (random() % 4) {
          case 0:
            pieces.erase(pieces.begin() + static_cast<std::ptrdiff_t>(p));
            break;
          case 1:
            pieces.push_back(pieces[p]);
            break;
          case 2:
            ++pieces[p].end;  // into the next one, or out of the box
            break;
          default:
            --pieces[p].end;  // empty, or short
        }
        EXPECT_THROW(validate(changed, "x"), Error) << to_json(changed);
        ++broken;
      }
    }
  }
  EXPECT_GT(broken, 1000);
}

std::string ones(int count) {
  std::string text;
  for (int i = 0; i < count; ++i) text += ", 1";
  return text;
}

struct Broken {
  std::string says;
  std::function<void(CheckpointManifest&)> change;
};

// Naive: a run from before the key resumes as if it had made every step.
TEST(CheckpointManifest, WithoutItsKeyTheStepsThatAScalerSkippedAreThoseLeftOut) {
  auto manifest = small_manifest();
  manifest.step = 20;
  EXPECT_EQ(manifest.left_out(), 0);
  manifest.loss_scale = {1024, 3, 5};
  EXPECT_THAT(to_json(manifest), Not(Says("left_out_steps")));
  EXPECT_EQ(parse_checkpoint_manifest(to_json(manifest), "x").left_out(), 5);
  manifest.left_out_steps = 7;  // two more without a label
  EXPECT_EQ(parse_checkpoint_manifest(to_json(manifest), "x").left_out(), 7);
  manifest.left_out_steps.reset();
  manifest.loss_scale->skipped_steps = 21;
  EXPECT_EQ(manifest.left_out(), 20);
}

// Naive: 2^53 + 1 comes back as a double, or a text of digits as a number.
TEST(CheckpointManifest, ValuesOfTheUserComeBackAsTheyWere) {
  auto manifest = small_manifest();
  EXPECT_THAT(to_json(manifest), Not(Says("\"user\"")));
  manifest.user = {{"epoch", (std::int64_t{1} << 53) + 1},
                   {"lowest", std::numeric_limits<std::int64_t>::min()},
                   {"digits", "12"},
                   {"text \"\n\x01\u00e4", "\\ \"\t\u20ac"}};
  EXPECT_NO_THROW(check_user_values(manifest.user));
  EXPECT_EQ(parse_checkpoint_manifest(to_json(manifest), "x"), manifest);
  for (const auto& [text, says] : {std::pair("3.5", "'epoch': found '3.5'"),
                                   {"true", "integer or"},
                                   {"9223372036854775808", "below 2^63"},
                                   {"[1]", "integer or"}}) {
    auto changed = small_manifest();
    changed.user = {{"epoch", std::int64_t{777}}};
    auto json = to_json(changed);
    json.replace(json.find("777"), 3, text);
    EXPECT_REFUSED(kFormat, parse_checkpoint_manifest(json, "FILE"), "'user': 'epoch'", says);
  }
  for (const auto& [values, says] : std::initializer_list<std::pair<CheckpointValues, const char*>>{
           {{{"", std::int64_t{1}}}, "an empty name"},
           {{{"a\xc3", std::int64_t{1}}}, "expected UTF-8"},
           {{{"a", "\xe4"}}, "expected UTF-8"},
           {{{"a", std::string(kMaxUserBytes, 'x')}}, "expected at most 1048576"}}) {
    EXPECT_THAT(error_of(ErrorKind::kUsage, [&, &v = values] { check_user_values(v); }),
                Says(says));
  }
}

TEST(CheckpointManifest, WhatDoesNotFitIsRefusedByName) {
  constexpr auto kMax = std::numeric_limits<std::int64_t>::max();
  const auto piece = [](CheckpointManifest& m, std::size_t i) -> CheckpointPiece& {
    return m.tensors["model/w"].pieces[i];
  };
  const CheckpointLora lora{{4, 8.0, 0.5, {"q"}}, {}};
  const Broken cases[] = {
      {"found format 3, expected 1 to 2", [](auto& m) { m.format = 3; }},
      {"found format 0, expected 1 to 2", [](auto& m) { m.format = 0; }},
      {"found step 4611686018427387904", [](auto& m) { m.step = kMaxStep; }},
      {"found step 9223372036854775807", [](auto& m) { m.step = kMax; }},
      {"found step -1", [](auto& m) { m.step = -1; }},
      {"world_size 0", [](auto& m) { m.world_size = 0; }},
      {"found the file '../x'", [](auto& m) { m.files["../x"] = {}; }},
      {"found the file 'manifest.json'", [](auto& m) { m.files["manifest.json"] = {}; }},
      {"found the loss scale 3", [](auto& m) { m.loss_scale = {3.0, 0, 0}; }},
      {"found the loss scale 0", [](auto& m) { m.loss_scale = {0.0, 0, 0}; }},
      {"after -1 finite", [](auto& m) { m.loss_scale = {8.0, -1, 0}; }},
      {"and -1 skipped", [](auto& m) { m.loss_scale = {8.0, 0, -1}; }},
      {"lora: found rank 0", [&](auto& m) { m.lora = lora, m.lora->rank = 0; }},
      {"lora: found rank -1", [&](auto& m) { m.lora = lora, m.lora->rank = -1; }},
      {"alpha 0, dropout", [&](auto& m) { m.lora = lora, m.lora->alpha = 0; }},
      {"alpha -2", [&](auto& m) { m.lora = lora, m.lora->alpha = -2; }},
      {"alpha inf", [&](auto& m) { m.lora = lora, m.lora->alpha = HUGE_VAL; }},
      {"dropout 1, 1 layers", [&](auto& m) { m.lora = lora, m.lora->dropout = 1; }},
      {"dropout -0.5", [&](auto& m) { m.lora = lora, m.lora->dropout = -0.5; }},
      {"dropout nan", [&](auto& m) { m.lora = lora, m.lora->dropout = NAN; }},
      {"0 layers", [&](auto& m) { m.lora = lora, m.lora->layers.clear(); }},
      // One more step would overflow the count.
      {"after 9223372036854775807 finite", [](auto& m) { m.loss_scale = {8.0, kMax, 0}; }},
      {"and 9223372036854775807 skipped", [](auto& m) { m.loss_scale = {8.0, 0, kMax}; }},
      {"found -1 left_out_steps", [](auto& m) { m.left_out_steps = -1; }},
      {"left_out_steps, expected from 0 to the step",
       [](auto& m) { m.left_out_steps = m.step + 1; }},
      {"found -1 bytes", [](auto& m) { m.files["a.safetensors"].bytes = -1; }},
      {"found a piece in 'c'", [&](auto& m) { piece(m, 0).file = "c"; }},
      {"dims, expected 2", [&](auto& m) { piece(m, 0).box.size = {12}; }},
      {"expected one inside [4, 6]", [&](auto& m) { piece(m, 2).box.offset = {0, 4}; }},
      {"expected one inside [4, 6]", [&](auto& m) { piece(m, 2).box.offset = {0, kMax}; }},
      {"expected one inside [4, 6]", [&](auto& m) { piece(m, 2).box.size = {kMax, kMax}; }},
      {"expected one inside [4, 6]", [&](auto& m) { piece(m, 2).box.offset = {-1, 3}; }},
      {"expected some of the 12", [&](auto& m) { piece(m, 2).end = kMax; }},
      {"expected some of the 12", [&](auto& m) { piece(m, 2).begin = 12; }},
      {"with common elements", [&](auto& m) { piece(m, 2).box = {{0, 2}, {4, 3}}; }},
      {"found 12 elements in its pieces, expected 24",
       [](auto& m) { m.tensors["model/w"].pieces.pop_back(); }},
      {"found no piece with element 4",
       [&](auto& m) { piece(m, 0).end = 4, piece(m, 1).begin = 5; }},
      {"two pieces with element 4", [&](auto& m) { piece(m, 1).begin = 4; }},
      {"less than 2^63 bytes", [](auto& m) { m.tensors["model/w"].shape = {kMax, 6}; }},
      {"no negative dim", [](auto& m) { m.tensors["model/w"].shape = {4, -6}; }},
      {"expected model/NAME", [](auto& m) { m.tensors["model/"] = m.tensors["model/w"]; }},
      {"expected model/NAME", [](auto& m) { m.tensors["optim/step"] = m.tensors["model/w"]; }},
      {"expected model/NAME", [](auto& m) { m.tensors["w"] = m.tensors["model/w"]; }},
  };
  auto sound = small_manifest();
  EXPECT_NO_THROW(validate(sound, "x"));
  sound.lora = lora;
  EXPECT_NO_THROW(validate(sound, "x"));
  for (const auto& broken : cases) {
    auto manifest = small_manifest();
    broken.change(manifest);
    const auto message = error_of(ErrorKind::kFormat, [&] { validate(manifest, "FILE"); });
    EXPECT_THAT(message, Says("FILE", broken.says));
  }
}

TEST(CheckpointManifest, TypesAndMissingKeysAreRefusedWithTheirPlace) {
  auto manifest = small_manifest();
  manifest.lora = {{4, 8.0, 0.5, {"q"}}, {}};
  const auto text = to_json(manifest);
  const auto with = [&](const std::string& from, const std::string& to) {
    auto changed = text;
    const auto at = changed.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return changed.replace(at, from.size(), to);
  };
  const std::pair<std::string, std::string> cases[] = {
      {with("\"step\": 3", "\"step\": 3.5"), "'step': found '3.5', expected an integer"},
      {with("\"step\": 3", "\"step\": 9223372036854775808"), "expected an integer below 2^63"},
      {with("\"seed\"", "\"sead\""), "found no \"seed\""},
      {with("\"begin\": 5", "\"begin\": \"5\""), "'tensors': 'model/w': 'pieces'"},
      {with("\"float32\"", "\"float\""), "expected the name of a dtype"},
      {with("\"shape\": [4, 6]", "\"shape\": 24"), "'shape': found '24', expected a list"},
      {with("\"shape\": [4, 6]", "\"shape\": [4, 6" + ones(63) + "]"),
       "'shape': found 65 dims, expected at most 64"},
      {with("\"size\": [4, 3]", "\"size\": [4, 3" + ones(100'000) + "]"),
       "'size': found 100002 dims, expected at most 64"},
      {with("\"box\": {", "\"box\": {\"offset\": [], "), "twice in one object"},
      {with("\"format\": 1", "\"format\": 7"), "found format 7"},
      {with("\"rank\": 4", "\"rank\": 4.5"), "'lora': 'rank': found '4.5', expected an integer"},
      {with("\"alpha\": 8.0", "\"alpha\": \"8\""), "'lora': 'alpha': found"},
      {with("\"dropout\": 0.5", "\"drop\": 0.5"), "'lora': found no \"dropout\""},
      {with("\"layers\": [\"q\"]", "\"layers\": \"q\""), "'lora': 'layers': found"},
      {with("\"layers\": [\"q\"]", "\"layers\": [7]"), "expected a string"},
      {with("\"base_xxh3_128\": \"", "\"base_xxh3_128\": \"x"), "32 hexadecimal digits"},
      {"[]", "expected an object"},
      {text.substr(0, text.size() / 2), "malformed JSON"},
      {"{\n\"a\":\n\x1b[31m",
       "FILE: malformed JSON at byte 8: syntax error while parsing value - invalid literal; "
       "last read: '\"a\":<U+000A><U+001B>'"},
  };
  for (const auto& [changed, says] : cases) {
    EXPECT_THAT(
        error_of(ErrorKind::kFormat, [&, &t = changed] { parse_checkpoint_manifest(t, "FILE"); }),
        AllOf(Says("FILE"), Says(says), Not(Says("\n")), Not(Says("[json"))));
  }
}

TEST(CheckpointManifest, PartsOfRanksMergeIntoTheWhole) {
  const auto whole = version_2();
  CheckpointManifest merged;
  merged.step = whole.step;
  for (const auto& [file, entry] : whole.files) {
    CheckpointManifest part;
    part.files[file] = entry;
    for (const auto& [name, tensor] : whole.tensors) {
      auto mine = tensor;
      std::erase_if(mine.pieces, [&, &f = file](const auto& piece) { return piece.file != f; });
      part.tensors[name] = mine;
    }
    merge(merged, parse_manifest_part(part_text(part), "x"));
  }
  EXPECT_EQ(merged, whole);
  EXPECT_THROW(merge(merged, whole), Error) << "the same files again";
}

/// Version 1 as its first readers knew it, not as to_json() writes it.
constexpr const char* kVersion1 = R"({
 "format": 1,
 "step": 3,
 "world_size": 2,
 "config_hash": "5388dbe8857442f4b966801b19797408",
 "model_path": "models/qwen3",
 "seed": 42,
 "data": {"path": ["t.bin"], "bytes": 7, "xxh3_128": "5388dbe8857442f4b966801b19797408", "seq_len": 8, "global_batch_size": 4},
 "files": {
  "config.json": {"bytes": 2, "xxh3_128": "5388dbe8857442f4b966801b19797408"},
  "rank_0.safetensors": {"bytes": 80, "xxh3_128": "5388dbe8857442f4b966801b19797408"}
 },
 "tensors": {
  "model/w": {"dtype": "bfloat16", "shape": [2, 3], "source_dtype": "float32", "pieces": [{"file": "rank_0.safetensors", "key": "any", "box": {"offset": [0, 0], "size": [2, 2]}, "begin": 0, "end": 4}, {"file": "rank_0.safetensors", "key": "other", "box": {"offset": [0, 2], "size": [2, 1]}, "begin": 0, "end": 2}]}
 },
 "xxh3_128": "00000000000000000000000000000000"
}
)";

TEST(CheckpointManifest, Version1IsReadAsItWasWritten) {
  const auto found = parse_checkpoint_manifest(kVersion1, "x");
  EXPECT_EQ(found.format, 1);
  EXPECT_EQ(found.step, 3);
  EXPECT_EQ(found.model_path, "models/qwen3");
  const CheckpointTensor expected{DType::kBFloat16,
                                  {2, 3},
                                  DType::kFloat32,
                                  {{"rank_0.safetensors", "any", {{0, 0}, {2, 2}}, 0, 4},
                                   {"rank_0.safetensors", "other", {{0, 2}, {2, 1}}, 0, 2}}};
  EXPECT_EQ(found.tensors, (CheckpointTensorMap{{"model/w", expected}}));
  EXPECT_TRUE(found.blocks.empty());
  const std::string_view text(kVersion1);
  EXPECT_THAT(to_json(found),
              StartsWith(std::string(text.substr(0, text.rfind(",\n \"xxh3_128\": ")))));
}

TEST(CheckpointManifest, KeysAreWrittenInTheirOrderWhereThereIsSomethingToSay) {
  CheckpointManifest manifest;
  EXPECT_THAT(to_json(manifest), Says(R"(
 "data": {"path": [], "bytes": 0, "xxh3_128": "00000000000000000000000000000000", "seq_len": 0, "global_batch_size": 0},
 "files": {
 },
 "blocks": [
 ],
 "xxh3_128": ")"));
  manifest.step = 9;
  manifest.data.path = {"a.txt", "b.txt"};
  manifest.optimizer = "Muon";
  manifest.fused_as_one = {"gate_up"};
  manifest.lora = {{4, 8.0, 0.5, {"q"}}, {1, 2}};
  manifest.loss_scale = {1024, 3, 5};
  manifest.left_out_steps = 7;
  manifest.user = {{"epoch", std::int64_t{3}}, {"of", "a run"}};
  manifest.files["a"] = {5, {3, 4}};
  EXPECT_THAT(to_json(manifest), StartsWith(R"({
 "format": 2,
 "step": 9,
 "world_size": 1,
 "config_hash": "00000000000000000000000000000000",
 "model_path": "",
 "seed": 0,
 "data": {"path": ["a.txt", "b.txt"], "bytes": 0, "xxh3_128": "00000000000000000000000000000000", "seq_len": 0, "global_batch_size": 0},
 "optimizer": "Muon",
 "fused_as_one": ["gate_up"],
 "lora": {"base_xxh3_128": "00000000000000010000000000000002", "rank": 4, "alpha": 8.0, "dropout": 0.5, "layers": ["q"]},
 "loss_scale": {"log2": 10, "good_steps": 3, "skipped_steps": 5},
 "left_out_steps": 7,
 "user": {"epoch": 3, "of": "a run"},
 "files": {
  "a": {"bytes": 5, "xxh3_128": "00000000000000030000000000000004"}
 },
 "blocks": [
 ],
 "xxh3_128": ")"));
}

TEST(CheckpointManifest, Version2IsWhatItsPageSays) {
  const auto texts = texts_of(version_2());
  EXPECT_EQ(
      texts.tensors,
      "{\"model/w\": {\"dtype\": \"float32\", \"shape\": [4, 6], \"pieces\": [[0, 0, 5, [0, 0], "
      "[4, 3]], [12, 5, 12, [0, 0], [4, 3]], [12, 0, 12, [0, 3], [4, 3]]]}}\n");
  EXPECT_THAT(texts.manifest, Says("{\n \"format\": 2,"));
  const auto hash = to_string(Hash128Stream().add(texts.tensors).digest());
  EXPECT_THAT(texts.manifest, Says(" \"blocks\": [\n  {\"first\": \"model/w\", \"bytes\": " +
                                   std::to_string(texts.tensors.size()) + ", \"xxh3_128\": \"" +
                                   hash + "\"}\n ],\n \"xxh3_128\": "));
  EXPECT_THAT(texts.manifest, Not(Says("\"tensors\":")));
  check_manifest_hash(texts.manifest, "x");
}

/// Many blocks: tensors of some 300 bytes.
CheckpointManifest of_many_blocks() {
  CheckpointManifest manifest;
  manifest.files[rank_file(0)] = {};
  for (int i = 100; i < 400; ++i) {
    const std::string name = "model/" + std::string(200, 'x') + std::to_string(i);
    manifest.tensors[name] = {
        DType::kFloat32, {2}, std::nullopt, {{rank_file(0), name, {{0}, {2}}, 0, 2}}};
  }
  return manifest;
}

TEST(CheckpointManifest, BlocksThatDoNotFitAreRefusedByName) {
  const auto texts = texts_of(of_many_blocks());
  const auto sound = parse_checkpoint_manifest(texts.manifest, "x");
  ASSERT_GT(sound.blocks.size(), 5U);
  const std::string file(kTensorsFile);
  const Broken cases[] = {
      {"expected the 0 of tensors.jsonl", [&](auto& m) { m.files.erase(file); }},
      {"of tensors.jsonl", [&](auto& m) { ++m.files[file].bytes; }},
      {"of tensors.jsonl", [](auto& m) { m.blocks.pop_back(); }},
      {"of tensors.jsonl", [](auto& m) { m.blocks.clear(); }},
      {"in the order of names, each once", [](auto& m) { m.blocks.push_back(m.blocks.back()); }},
      {"in the order of names", [](auto& m) { std::swap(m.blocks[1], m.blocks[2]); }},
      {"found 0 bytes", [](auto& m) { m.blocks[1].bytes = 0; }},
      {"found -5 bytes", [](auto& m) { m.blocks[1].bytes = -5; }},
      {"expected 1 to 4194304", [](auto& m) { m.blocks[1].bytes = kMaxBlockBytes + 1; }},
      {"of at most 512 bytes", [](auto& m) { m.blocks[1].first = "../x"; }},
      {"of at most 512 bytes", [](auto& m) { m.blocks[1].first += std::string(512, 'y'); }},
  };
  EXPECT_NO_THROW(validate(sound, "x"));
  for (const auto& broken : cases) {
    auto manifest = sound;
    broken.change(manifest);
    EXPECT_REFUSED(kFormat, validate(manifest, "FILE"), "FILE", broken.says);
  }
}

TEST(CheckpointManifest, TensorsOfAnotherBlockAreRefused) {
  const auto texts = texts_of(of_many_blocks());
  const auto manifest = parse_checkpoint_manifest(texts.manifest, "x");
  const auto lines = testing::lines_of(texts.tensors);
  for (std::size_t text = 0; text < lines.size(); ++text) {
    for (std::size_t index = 0; index < lines.size(); ++index) {
      const auto parse = [&] { parse_checkpoint_block(lines[text], manifest, index, "FILE"); };
      if (text == index) {
        EXPECT_NO_THROW(parse());
      } else {
        EXPECT_THAT(error_of(ErrorKind::kFormat, parse), Says("FILE", "in the block from"));
      }
    }
  }
  EXPECT_REFUSED(kFormat, parse_checkpoint_block("{}", manifest, 0, "x"),
                 "expected it to be the first of its block");
}

TEST(CheckpointManifest, AMalformedBlockIsRefusedWithItsPlace) {
  const auto texts = texts_of(version_2());
  const auto manifest = parse_checkpoint_manifest(texts.manifest, "x");
  const auto with = [&](const std::string& from, const std::string& to) {
    auto changed = texts.tensors;
    const auto at = changed.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return changed.replace(at, from.size(), to);
  };
  const std::string first = "[0, 0, 5, [0, 0], [4, 3]]";
  const std::string again = "{\"model/w\": {}, \"model/w\"";
  const std::pair<std::string, std::string> cases[] = {
      {with(first, "[0, 0, 5, [0, 0]]"), "'pieces': 'an item': found a list of 4 items"},
      {with(first, "{\"file\": 0}"), "found an object, expected a list of 3 or 5"},
      {with(first, "7"), "found '7', expected a list of 3 or 5"},
      {with(first, "[0, 0, 5, 0, [4, 3]]"), "found '0', expected a list"},
      {with(first, "[-1, 0, 5, [0, 0], [4, 3]]"), "found '-1', expected the number of a rank"},
      {with(first, "[0.5, 0, 5, [0, 0], [4, 3]]"), "expected an integer"},
      {with(first, "[\"../x\", 0, 5, [0, 0], [4, 3]]"), "expected an integer"},
      {with(first, "[1, 0, 5, [0, 0], [4, 3]]"), "found a piece in 'rank_1.safetensors'"},
      {with(first, "[0, 0, 24]"), "found no piece with element 0 of the box from [0, 0]"},
      {with("[4, 3]], [12, 0", "[4, 4]], [12, 0"), "found "},
      {with(first, "[0, 0, 4, [0, 0], [4, 3]]"), "found no piece with element 4"},
      {with(first, "[0, 0, 6, [0, 0], [4, 3]]"), "two pieces with element 5"},
      {with(first, first + ", " + first), "two pieces with element 0"},
      {with(first + ", ", ""), "found no piece with element 0"},
      {with(first, "[0, 0, 5, [0" + ones(70) + "], [4, 3]]"), "found 71 dims"},
      {with(first, "[0, 0, 5, [0, [[[[[[0]]]]]]], [4, 3]]"), "nested deeper than 8"},
      {with("{\"model/w\"", again), "twice in one object"},
      {with("}\n", "}}\n"), "malformed JSON"},
      {with("model/w", "model/w" + std::string(600, 'w')), "found a name of 607 bytes"},
      {with("\"pieces\"", "\"pie\""), "found no \"pieces\""},
      {with("[4, 6]", "[4, 6000000000000000000]"), "less than 2^63 bytes"},
      {"", "malformed JSON"},
      {"[]", "expected an object"},
  };
  EXPECT_NO_THROW(parse_checkpoint_block(texts.tensors, manifest, 0, "x"));
  for (const auto& [changed, says] : cases) {
    EXPECT_THAT(error_of(ErrorKind::kFormat,
                         [&, &t = changed] { parse_checkpoint_block(t, manifest, 0, "FILE"); }),
                AllOf(Says("FILE"), Says(says), Not(Says("\n"))));
  }
}

TEST(CheckpointManifest, ATensorOfTooManyPiecesIsRefusedWithItsSize) {
  CheckpointManifest manifest;
  auto& tensor = manifest.tensors["model/w"] = {DType::kFloat32, {200'000}, std::nullopt, {}};
  for (std::int64_t i = 0; i < 200'000; ++i) {
    tensor.pieces.push_back({rank_file(i), "model/w", {{0}, {200'000}}, i, i + 1});
  }
  EXPECT_REFUSED(kIo, texts_of(manifest), "tensors.jsonl: found ", "at most 4194304");
}

TEST(CheckpointManifest, APlanIsRefusedWhereItsManifestMayBeTooLarge) {
  EXPECT_NO_THROW(check_manifest_plan({}, 1024, {.tensors = std::int64_t{100} << 20}));
  EXPECT_REFUSED(kConfig, check_manifest_plan({}, 1'000'000, {}), "for 1000000 ranks",
                 "at most 67108864");
  EXPECT_REFUSED(kConfig, check_manifest_plan({}, 8, {.tensors = std::int64_t{4} << 30}),
                 "4294967296 bytes of tensors.jsonl", "checkpoint.enable");
}

// Naive: ranks of unequal parts, and texts whose quotes and boxes are longer than their values.
TEST(CheckpointManifest, APlanIsNeverBelowWhatIsWritten) {
  constexpr std::int64_t kRanks = 7;
  std::vector<CheckpointManifest> parts(kRanks);
  CheckpointManifest whole;
  for (int i = 0; i < 400; ++i) {
    const auto name = concat("model/", std::string(static_cast<std::size_t>(i) % 90, '"'), i);
    const std::vector<std::int64_t> shape = {1000, i % 3 == 0 ? 12 : 1};
    for (std::int64_t rank = i % kRanks; rank < kRanks; ++rank) {
      auto& tensor =
          parts[static_cast<std::size_t>(rank)]
              .tensors.emplace(name, CheckpointTensor{DType::kBFloat16, shape, DType::kFloat32, {}})
              .first->second;
      const TensorBox box = {{100 * rank, 0}, {100, shape[1]}};
      for (std::size_t piece = 1; piece <= 1 + static_cast<std::size_t>(i) % 4; ++piece) {
        const auto at = static_cast<std::int64_t>(piece) * 10;
        tensor.pieces.push_back({rank_file(rank), piece_key(name, piece), box, at, at + 10});
      }
    }
  }
  std::vector<CheckpointPlan> plans;
  for (std::int64_t rank = 0; rank < kRanks; ++rank) {
    auto& part = parts[static_cast<std::size_t>(rank)];
    plans.push_back(plan_of(part));
    part.files[rank_file(rank)] = {std::int64_t{1} << 40, {}};
    merge(whole, part);
  }
  const auto plan = sum_of(plans);
  const auto texts = texts_of(whole);
  EXPECT_LE(std::ssize(texts.tensors), plan.tensors);
  EXPECT_LE(std::ssize(texts.manifest), check_manifest_plan({}, kRanks, plan));
  const auto blocks = testing::lines_of(texts.tensors);
  ASSERT_GT(blocks.size(), 5U);
  for (const auto& block : blocks)
    EXPECT_LE(std::ssize(block) + 1, kBlockBytes + plan.head + plan.pieces);
  // Not far above either.
  EXPECT_LT(plan_of(parts[0]).tensors, 3 * std::ssize(part_text(parts[0])) / 2);
}

TEST(CheckpointManifest, APlanIsRefusedWhereABlockMayBeTooLarge) {
  const CheckpointPlan one = {.tensors = 1 << 20, .pieces = 3 << 20, .head = 1000};
  const CheckpointPlan other = {.tensors = 1 << 20, .pieces = 1 << 20, .head = 2000};
  EXPECT_NO_THROW(check_manifest_plan({}, 1, one));
  const auto both = sum_of({one, other});
  EXPECT_EQ(both, (CheckpointPlan{.tensors = 2 << 20, .pieces = 4 << 20, .head = 2000}));
  EXPECT_REFUSED(kConfig, check_manifest_plan({}, 2, both),
                 "2 ranks may have 4194304 bytes of pieces of one tensor", "at most 4194304",
                 "run on fewer ranks");
}

TEST(CheckpointManifest, APlanIsRefusedWhereANameOrAPartMayBeTooLarge) {
  const auto with_name = [](CheckpointManifest& part, const std::string& name) {
    part.tensors[name] = {
        DType::kFloat32, {2}, std::nullopt, {{rank_file(3), name, {{0}, {2}}, 0, 2}}};
  };
  CheckpointManifest part;
  const auto name = "model/" + std::string(kMaxTensorNameBytes - 6, 'x');
  with_name(part, name);
  EXPECT_NO_THROW(plan_of(part));
  with_name(part, name + "y");
  EXPECT_REFUSED(kConfig, plan_of(part), "a name of 513 bytes, 'model/xxx", "at most 512");

  // Control characters are written as six bytes each: 23,000 names are 64 MiB.
  part.tensors.clear();
  for (int i = 0; i < 23'000; ++i) with_name(part, concat("model/", std::string(490, '\1'), i));
  EXPECT_REFUSED(kConfig, plan_of(part), "to say of its 23000 tensors", "at most 67108864",
                 "run on more ranks");
}

// Against counting, for every box of a tensor.
TEST(TensorBox, PositionsAreThoseOfTheWholeTensor) {
  const std::vector<std::int64_t> shape{2, 3, 4};
  for (std::int64_t code = 0; code < 3 * 6 * 10; ++code) {
    // All (offset, size) of dims 2, 3 and 4: 3, 6 and 10 of them.
    TensorBox box;
    std::int64_t rest = code;
    for (const auto dim : shape) {
      const auto choices = dim * (dim + 1) / 2;
      std::int64_t choice = rest % choices;
      rest /= choices;
      std::int64_t offset = 0;
      while (choice >= dim - offset) choice -= dim - offset++;
      box.offset.push_back(offset);
      box.size.push_back(choice + 1);
    }
    std::int64_t before = 0;
    for (std::int64_t position = 0; position < 24; ++position) {
      EXPECT_EQ(elements_before(box, shape, position), before);
      const std::int64_t at[] = {position / 12, position / 4 % 3, position % 4};
      bool inside = true;
      for (std::size_t d = 0; d < 3; ++d) {
        inside = inside && at[d] >= box.offset[d] && at[d] < box.offset[d] + box.size[d];
      }
      if (inside) {
        EXPECT_EQ(position_in_tensor(box, shape, before), position);
        ++before;
      }
    }
    EXPECT_EQ(elements_before(box, shape, 24), before);
    EXPECT_EQ(before, box.numel());
    const auto row = row_length(box, shape);
    for (std::int64_t i = 0; i + 1 < box.numel(); ++i) {
      const auto step = position_in_tensor(box, shape, i + 1) - position_in_tensor(box, shape, i);
      EXPECT_EQ(step == 1, (i + 1) % row != 0);
    }
  }
}

}  // namespace
}  // namespace tessera::checkpoint_manifest_test
