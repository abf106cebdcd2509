// A folder of a larger model, seen as the one of the model in it.
#include "train/hf/renamed_tensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>

#include "tessera/error.h"

namespace tessera::train::renamed_tensors_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Each tensor holds its name's first letters, a byte each.
class Letters final : public TensorSource {
 public:
  explicit Letters(const std::vector<std::string>& names) {
    for (const std::string& name : names) tensors_[name] = {DType::kUInt8, {2}, DType::kUInt8};
  }
  const std::filesystem::path& path() const override { return path_; }
  const Tensors& tensors() const override { return tensors_; }
  void read(std::string_view name, std::int64_t begin, std::int64_t end,
            std::span<std::byte> out) const override {
    std::memcpy(out.data(), name.data() + begin, static_cast<std::size_t>(end - begin));
  }
  std::vector<HashedFile> hashed_files() const override { return {{"one", 7}}; }

 private:
  std::filesystem::path path_ = "folder";
  Tensors tensors_;
};

std::string text_in_it(std::string_view name) {
  if (name.starts_with("vision.")) return {};
  return std::string(name.starts_with("text.") ? name.substr(5) : name);
}

std::string letters(const TensorSource& source, std::string_view name) {
  std::array<std::byte, 2> out{};
  source.read(name, 0, 2, out);
  return {reinterpret_cast<const char*>(out.data()), 2};
}

TEST(RenamedTensors, HaveTheModelsNamesAndTheFoldersBytes) {
  const RenamedTensors renamed(
      std::make_shared<Letters>(std::vector<std::string>{"text.norm", "vision.a", "head"}),
      text_in_it);
  EXPECT_EQ(renamed.tensors().size(), 2U);
  EXPECT_EQ(letters(renamed, "norm"), "te");
  EXPECT_EQ(letters(renamed, "head"), "he");
  EXPECT_THAT(renamed.left_out(), ElementsAre("vision.a"));
  EXPECT_TRUE(renamed.changes());
  EXPECT_EQ(renamed.hashed_files().front().bytes, 7);
  EXPECT_THROW(letters(renamed, "text.norm"), Error);
  EXPECT_THROW(letters(renamed, "vision.a"), Error);
}

TEST(RenamedTensors, OfTheModelItselfChangeNothing) {
  const RenamedTensors renamed(std::make_shared<Letters>(std::vector<std::string>{"norm", "head"}),
                               text_in_it);
  EXPECT_FALSE(renamed.changes());
  EXPECT_EQ(letters(renamed, "norm"), "no");
}

TEST(RenamedTensors, TwoOfOneNameAreRefusedWithBoth) {
  try {
    const RenamedTensors renamed(
        std::make_shared<Letters>(std::vector<std::string>{"text.norm", "norm"}), text_in_it);
    FAIL() << "two tensors for one parameter";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kFormat);
    EXPECT_THAT(error.what(), HasSubstr("'norm' and 'text.norm'"));
  }
}

}  // namespace
}  // namespace tessera::train::renamed_tensors_test
