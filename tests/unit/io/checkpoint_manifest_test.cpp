// The manifest as a value: its text, its own hash, and everything that it must not say.
#include "io/checkpoint_manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "unit/io/checkpoint_cases.h"
#include "unit/io/temporary_folder.h"

namespace tessera::checkpoint_manifest_test {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::Random;
using testing::random_manifest;

/// One tensor [4, 6] of two files: the left half in two pieces, the right half in one.
CheckpointManifest small_manifest() {
  CheckpointManifest manifest;
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

TEST(CheckpointManifest, TextAndValueAreTheSameThing) {
  Random random(1);
  for (int i = 0; i < 300; ++i) {
    const auto manifest = random_manifest(random);
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

TEST(CheckpointManifest, WhatDoesNotFitIsRefusedByName) {
  constexpr auto kMax = std::numeric_limits<std::int64_t>::max();
  const auto piece = [](CheckpointManifest& m, std::size_t i) -> CheckpointPiece& {
    return m.tensors["model/w"].pieces[i];
  };
  const CheckpointLora lora{{}, 4, 8.0, 0.5, {"q"}};
  const Broken cases[] = {
      {"found format 2, expected 1", [](auto& m) { m.format = 2; }},
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
    EXPECT_THAT(message, AllOf(HasSubstr("FILE"), HasSubstr(broken.says)));
  }
}

TEST(CheckpointManifest, TypesAndMissingKeysAreRefusedWithTheirPlace) {
  auto manifest = small_manifest();
  manifest.lora = {{}, 4, 8.0, 0.5, {"q"}};
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
        AllOf(HasSubstr("FILE"), HasSubstr(says), Not(HasSubstr("\n")), Not(HasSubstr("[json"))));
  }
}

TEST(CheckpointManifest, PartsOfRanksMergeIntoTheWhole) {
  const auto whole = small_manifest();
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
    merge(merged, parse_manifest_part(to_json(part), "x"));
  }
  EXPECT_EQ(merged, whole);
  EXPECT_THROW(merge(merged, whole), Error) << "the same files again";
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
